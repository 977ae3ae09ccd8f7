"""Breaker and affinity."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from router.workers.affinity import choose, rank
from router.workers.breaker import Breaker


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def opened():
    clock = Clock()
    breaker = Breaker(failures=5, seconds=10, clock=clock)
    for _ in range(5):
        assert breaker.allows()
        breaker.start()
        breaker.failure()
    return breaker, clock


def test_opens_after_five_failures_in_a_row():
    breaker, _ = opened()
    assert breaker.state == "open"
    assert not breaker.allows()


def test_a_success_between_failures_starts_the_count_again():
    breaker = Breaker(failures=5, seconds=10)
    for _ in range(20):
        for _ in range(4):
            breaker.failure()
        breaker.success()
    assert breaker.state == "closed"


def test_half_open_lets_one_through():
    breaker, clock = opened()
    clock.now += 12
    assert breaker.state == "half_open"
    assert breaker.allows()
    breaker.start()
    assert not breaker.allows()
    breaker.success()
    assert breaker.state == "closed"
    assert breaker.allows()


def test_a_failed_trial_opens_it_again():
    breaker, clock = opened()
    clock.now += 12
    breaker.start()
    breaker.failure()
    assert breaker.state == "open"
    clock.now += 12
    assert breaker.allows()


def test_an_abandoned_trial_leaves_room_for_another():
    breaker, clock = opened()
    clock.now += 12
    breaker.start()
    breaker.abandon()
    assert breaker.allows()


def test_requests_from_before_it_opened_are_not_the_trial():
    breaker, clock = opened()
    breaker.failure()
    breaker.abandon()
    assert breaker.state == "open"
    clock.now += 12
    assert breaker.allows()


@dataclass
class Worker:
    name: str
    in_flight: int = 0


NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True)


@given(NAMES, st.text(max_size=20))
def test_the_choice_does_not_depend_on_the_order(names, key):
    workers = [Worker(name) for name in names]
    assert choose(key, workers, 1.25).name == choose(key, workers[::-1], 1.25).name


def test_losing_a_worker_moves_only_its_own_sessions():
    workers = [Worker(f"w{number}") for number in range(5)]
    keys = [f"session-{number}" for number in range(500)]
    before = {key: rank(key, workers)[0].name for key in keys}
    after = {key: rank(key, workers[1:])[0].name for key in keys}
    assert all(after[key] == name for key, name in before.items() if name != "w0")
    shares = [list(before.values()).count(worker.name) for worker in workers]
    assert min(shares) > 60


def test_a_full_worker_is_passed_over():
    workers = [Worker(f"w{number}") for number in range(3)]
    first = rank("s", workers)[0]
    assert choose("s", workers, 1.25) is first
    first.in_flight = 8
    assert choose("s", workers, 1.25) is rank("s", workers)[1]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.text(max_size=5))
def test_the_load_bound_holds(loads, key):
    workers = [Worker(f"w{number}", load) for number, load in enumerate(loads)]
    chosen = choose(key, workers, 1.25)
    assert chosen.in_flight <= 1.25 * (sum(loads) + 1) / len(loads) + 1 or chosen.in_flight == min(
        loads
    )
