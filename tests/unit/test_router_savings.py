"""The prefill model and the books."""

import random
from types import SimpleNamespace

import pytest

from router.metrics import Metrics
from router.relay.parser import Usage
from router.savings.books import Books
from router.savings.model import PrefillModel
from router.transfer.outcome import Outcome

WORKER = SimpleNamespace(name="w")


def truth(uncached, cached):
    return 0.03 + 0.0015 * uncached + 1.5e-7 * uncached * (cached + uncached / 2)


def learned(noise=0.0, busy=0.0, count=16, slow=1.0, model=None, seed=1):
    chance = random.Random(seed)
    model = model or PrefillModel()
    for _ in range(count):
        uncached, cached = chance.randint(30, 2500), chance.randint(0, 3000)
        seconds = (
            truth(uncached, cached) * slow * (1 + chance.expovariate(1 / noise) if noise else 1)
        )
        model.observe(uncached, cached, seconds * (4 if chance.random() < busy else 1))
    return model


def error(model, slow=1.0):
    expected = truth(2060, 0) - truth(60, 2000)
    return model.predict(2000, 0, 60) / (expected * slow)


def test_it_learns_what_there_is_to_learn():
    assert 0.95 < error(learned()) < 1.05


def test_waiting_does_not_count_as_work():
    errors = sorted(error(learned(0.05, busy=0.2, count=24, seed=seed)) for seed in range(20))
    assert errors[1] > 0.85
    assert errors[-2] < 1.35


def test_no_prediction_from_too_little():
    model = PrefillModel()
    assert model.predict(100, 0, 10) is None
    for _ in range(9):
        model.observe(100, 0, 0.1)
    # Nine times the same length says nothing about any other.
    assert model.predict(100, 0, 10) is None
    model.observe(200, 0, 0.2)
    assert model.predict(100, 0, 10) is not None


def test_a_worker_that_has_become_slow_is_learned():
    model = learned()
    learned(model=model, count=256, slow=3.0)
    assert 0.8 < error(model, slow=3.0) < 1.2


def test_it_never_predicts_less_than_nothing():
    model = PrefillModel()
    for uncached in (10, 20, 1000, 30, 2000):
        model.observe(uncached, 0, 1.0 / uncached)
    assert model.predict(500, 0, 10) >= 0.0


def test_observations_without_sense_are_left_out():
    model = PrefillModel()
    for uncached, seconds in ((0, 1.0), (-5, 1.0), (10, 0.0), (10, -1.0)):
        model.observe(uncached, 0, seconds)
    assert not model.ready


def books():
    metrics = Metrics()
    books = Books(metrics)
    for uncached in (100, 200, 400, 800, 1600):
        books.observe(WORKER, Usage(uncached, 1, 0), truth(uncached, 0))
    return books, metrics


def outcome(**fields):
    base = {"status": "applied", "reason": "ok", "tokens": 960, "exact_tokens": 0,
            "mapped_tokens": 960, "seconds": 0.1, "pair": "p", "direction": "up"}  # fmt: skip
    return Outcome(**{**base, **fields})


def value(counter):
    return sum(s.value for m in counter.collect() for s in m.samples if s.name.endswith("_total"))


def test_saved():
    ledger, metrics = books()
    booking = ledger.book(WORKER, outcome(), Usage(1000, 5, 960))
    expected = truth(1000, 0) - truth(40, 960) - 0.1
    assert booking.tokens == 960
    assert booking.seconds == pytest.approx(expected, rel=0.1)
    assert value(metrics.saved) == pytest.approx(booking.seconds)
    assert value(metrics.lost) == 0


def test_lost_is_kept_apart_and_never_clamped():
    ledger, metrics = books()
    booking = ledger.book(WORKER, outcome(seconds=60.0), Usage(1000, 5, 960))
    assert booking.seconds < -50
    assert value(metrics.lost) == pytest.approx(-booking.seconds)
    assert value(metrics.saved) == 0


def test_only_the_confirmed_part_counts():
    ledger, _ = books()
    assert ledger.book(WORKER, outcome(), Usage(1000, 5, 480)).tokens == 480
    # More than was transferred is the worker's own cache.
    assert ledger.book(WORKER, outcome(tokens=320), Usage(1000, 5, 960)).tokens == 320


def test_an_exact_prefix_is_not_a_gain():
    ledger, _ = books()
    assert ledger.book(WORKER, outcome(exact_tokens=320), Usage(1000, 5, 960)).tokens == 640


def test_what_an_earlier_transfer_left_is_not_booked_again():
    ledger, metrics = books()
    assert ledger.book(WORKER, outcome(mapped_tokens=160), Usage(1000, 5, 960)).tokens == 160
    assert ledger.book(WORKER, outcome(mapped_tokens=0), Usage(1000, 5, 960)).tokens == 0
    assert value(metrics.unconfirmed) == 0
    ahead = outcome(mapped_tokens=160, ahead_tokens=640)
    assert ledger.book(WORKER, ahead, Usage(1000, 5, 960)).tokens == 800


@pytest.mark.parametrize("cached", [None, 0])
def test_unconfirmed(cached):
    ledger, metrics = books()
    booking = ledger.book(WORKER, outcome(), Usage(1000, 5, cached))
    assert booking.tokens == 0
    assert value(metrics.unconfirmed) == 1
    # The time was spent all the same.
    assert booking.seconds == pytest.approx(-0.1)
    assert value(metrics.saved) == 0


@pytest.mark.parametrize("status", ["none", "continued", "exact", "native", "unsupported"])
def test_nothing_else_is_booked(status):
    ledger, metrics = books()
    assert ledger.book(WORKER, outcome(status=status), Usage(1000, 5, 960)).tokens == 0
    assert value(metrics.saved) + value(metrics.lost) + value(metrics.unconfirmed) == 0


def test_without_a_price_it_is_counted_and_not_booked():
    metrics = Metrics()
    booking = Books(metrics).book(WORKER, outcome(), Usage(1000, 5, 960))
    assert booking.seconds is None
    assert value(metrics.unpriced) == 1
    assert value(metrics.saved) + value(metrics.lost) == 0
