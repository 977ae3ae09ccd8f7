"""The lineage of a session: transitions one by one, and as a machine against a world of pages."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies import Decision
from router.metrics import Metrics
from router.sessions import lineage, record
from router.sessions.base import TurnRecord, born
from router.sessions.lineage import Lineage
from router.sessions.memory import MemoryStore
from router.sessions.record import Measurement
from router.settings import Settings
from router.transfer.client import TransferAnswer
from router.transfer.outcome import Outcome
from router.transfer.plan import Transfers

PAGE = 4
MODELS = {"small": "small-model", "large": "large-model"}


def begun(epoch="1-a", exact=8, mapped=32):
    return lineage.transferred(Lineage(exact=exact), epoch, exact=exact, mapped=mapped)


def test_nothing_then_exact_then_lossy_then_exact():
    one = Lineage()
    assert (one.status, one.epoch) == ("none", None)
    one = lineage.prefilled(one, 40)
    assert (one.status, one.exact, one.epoch) == ("exact", 40, None)
    one = lineage.transferred(one, "1-a", exact=40, mapped=60)
    assert (one.status, one.epoch, one.lossy.ahead) == ("lossy", "1-a", True)
    one = lineage.answered(one, "1-a", 120, 0.1)
    assert (one.lossy.tokens, one.lossy.mapped, one.lossy.ahead, one.drift) == (120, 60, False, 0.1)
    one = lineage.reanchored(one, "1-a", 120)
    assert (one.status, one.exact, one.anchored, one.drift) == ("exact", 120, True, 0.0)


def test_drift_adds_up_and_is_corrected_by_what_was_measured():
    one = lineage.answered(begun(), "1-a", 50, 0.1)
    one = lineage.answered(one, "1-a", 60, 0.1)
    one = lineage.measured(one, "1-a", 0.25 - 0.1)
    assert one.drift == pytest.approx(0.35)


def test_drift_of_the_source_is_carried_on():
    one = lineage.transferred(Lineage(), "2-a", exact=0, mapped=10, drift=0.3)
    assert lineage.answered(one, "2-a", 20, 0.1).drift == pytest.approx(0.4)
    again = lineage.transferred(one, "2-a", exact=0, mapped=10, drift=0.5)
    assert again.drift == 0.5


def test_a_native_turn_gives_up_the_lossy_lineage_for_good():
    one = lineage.prefilled(begun(), 50)
    assert one.status == "exact"
    assert lineage.transferred(one, "1-a", exact=0, mapped=9) == one
    assert lineage.answered(one, "1-a", 60, 0.1) == one
    assert lineage.transferred(one, "2-b", exact=0, mapped=9).epoch == "2-b"


def test_an_audit_that_comes_late_leaves_a_later_lineage_alone():
    one = lineage.transferred(Lineage(), "3-a", exact=0, mapped=10)
    after = lineage.reanchored(one, "2-b", 30)
    assert (after.epoch, after.exact, after.anchored) == ("3-a", 30, False)


def test_of_two_lineages_begun_at_once_one_stays():
    one, other = begun("1-a"), begun("1-b")
    assert lineage.transferred(one, "1-b", exact=0, mapped=4).epoch == "1-b"
    assert lineage.transferred(other, "1-a", exact=0, mapped=4).epoch == "1-a"
    # Whichever audit comes first gives up both.
    assert lineage.reanchored(one, "1-b", 10).status == "exact"


def test_eviction_shortens_and_forgives_nothing():
    one = lineage.answered(begun(), "1-a", 60, 0.2)
    after = lineage.evicted(one, 10)
    assert (after.lossy.tokens, after.drift, after.epoch) == (10, 0.2, "1-a")
    assert lineage.evicted(Lineage(exact=50), 20).exact == 20


def test_a_restart_changes_no_namespace():
    after = lineage.restarted(begun())
    assert (after.epoch, after.confirmed) == ("1-a", False)
    assert lineage.answered(after, "1-a", 60, 0.0).confirmed


EVENTS = st.one_of(
    st.tuples(st.just("prefilled"), st.integers(0, 99)),
    st.tuples(st.just("transferred"), st.integers(1, 5), st.sampled_from("ab")),
    st.tuples(st.just("answered"), st.integers(1, 5), st.sampled_from("ab")),
    st.tuples(st.just("reanchored"), st.integers(1, 5), st.sampled_from("ab")),
    st.tuples(st.just("evicted"), st.integers(0, 99)),
    st.tuples(st.just("abandoned")),
)


def happens(one, event):
    kind, *rest = event
    if kind in ("prefilled", "evicted"):
        return getattr(lineage, kind)(one, rest[0])
    if kind == "abandoned":
        return lineage.abandoned(one)
    epoch = f"{rest[0]}-{rest[1]}"
    if kind == "transferred":
        return lineage.transferred(one, epoch, exact=3, mapped=5)
    if kind == "answered":
        return lineage.answered(one, epoch, 20, 0.1)
    return lineage.reanchored(one, epoch, 20)


@given(st.lists(EVENTS, max_size=30))
def test_what_was_given_up_never_comes_back(events):
    one, given_up = Lineage(), set()
    for event in events:
        before = one.epoch
        one = happens(one, event)
        assert one.epoch not in given_up
        if before is not None and one.epoch != before and event[0] != "transferred":
            given_up.add(before)
        assert one.epoch is None or lineage.ordinal(one.epoch) > one.retired
        assert Lineage.model_validate_json(one.model_dump_json()) == one


class World:
    """Pages as workers and mapper keep them: per model and namespace, exact or not by position.

    It stands in for the mapper, too: `transfer` does what the real one is tested to do.
    """

    def __init__(self):
        self.pages = {}
        self.ever_exact = {}
        self.owners = {}

    def prefix(self, model, namespace):
        held = self.pages.get((model, namespace), {})
        count = 0
        while count in held:
            count += 1
        return count

    def answer(self, model, namespace, length):
        """A turn is computed on what the namespace holds; returns the pages found there."""
        held = self.pages.setdefault((model, namespace), {})
        found = min(self.prefix(model, namespace), (length - 1) // PAGE)
        exact = all(held[page] for page in range(found))
        assert exact or namespace is not None, "an exact lookup was answered by lossy KV"
        for page in range(found, length // PAGE):
            held.setdefault(page, exact)
        if namespace is None:
            self.ever_exact[model] = max(self.ever_exact.get(model, 0), length)
        return found * PAGE

    async def transfer(self, request, timeout):
        source = self.pages.get((request.source.model, request.source.extra_key), {})
        target = self.pages.setdefault((request.target.model, request.target.extra_key), {})
        exact = self.pages.get((request.target.model, None), {})
        session = request.target.extra_key.split(":")[1]
        assert self.owners.setdefault(request.target.extra_key, session) == session
        mapped = reused = leading = total = 0
        for page in range(len(request.token_ids) // PAGE):
            if page in exact and leading == page:
                leading += 1
            if page in target:
                reused += 1
            elif page in exact:
                target[page] = True
            elif page in source:
                target[page] = False
                mapped += 1
            else:
                break
            total += 1
        status = "applied" if total else "fallback_reprefill"
        lossy = mapped or reused
        return TransferAnswer(
            status=status, reason="mapped" if lossy else "exact", tokens=total * PAGE,
            exact_tokens=leading * PAGE, mapped_tokens=mapped * PAGE,
            reused_tokens=reused * PAGE, pages=total,
        )  # fmt: skip


class OpenTurn:
    def __init__(self, session, tier, length, outcome):
        self.born = session.born if session else ""
        self.before, self.tier, self.length, self.outcome = session, tier, length, outcome
        self.audit = None


class LineageMachine(RuleBasedStateMachine):
    """Turns of one session begin and end in any order, at two gateways that share a store."""

    def __init__(self):
        super().__init__()
        self.world = World()
        self.store = MemoryStore(3600)
        self.loop = asyncio.new_event_loop()
        workers = [
            {"name": tier, "tier": tier, "url": "http://127.0.0.1:9", "model": model}
            for tier, model in MODELS.items()
        ]
        config = Settings(workers=workers, mapper_url="http://127.0.0.1:9")
        self.transfers = Transfers(config, Metrics())
        self.transfers.client = self.world
        self.length = 10
        self.open = []
        self.to_audit = []
        self.given_up = set()
        self.clock = 0.0

    def teardown(self):
        self.loop.close()

    def run(self, work):
        return self.loop.run_until_complete(work)

    def session(self):
        return self.run(self.store.get("t", "s"))

    def worker(self, tier):
        async def tokenize(body, seconds):
            return list(range(self.length))

        return SimpleNamespace(model=MODELS[tier], tier=tier, name=tier, tokenize=tokenize)

    @rule(tier=st.sampled_from(["small", "large"]), kv=st.sampled_from(["map", "map", "native"]))
    def begin(self, tier, kv):
        if len(self.open) >= 3:
            self.finish(0, 3)
        session = self.session()
        decision = Decision(tier=tier, stage="s", reason="r", kv=kv)
        outcome = self.run(
            self.transfers.prepare(session, "t", {"messages": []}, self.worker(tier), decision)
        )
        if outcome.epoch is not None:
            assert outcome.extra_key == f"lossy:s:{outcome.epoch}"
            assert (MODELS[tier], outcome.epoch) not in self.given_up, "given up, and used again"
        else:
            assert outcome.extra_key is None
        self.open.append(OpenTurn(session, tier, self.length, outcome))

    @initialize()
    def a_switch_has_happened(self):
        for tier in ("small", "large"):
            self.turn(tier, "map", 12)

    @rule(tier=st.sampled_from(["small", "large"]), kv=st.just("map"), answer=st.integers(1, 40))
    def turn(self, tier, kv, answer):
        self.begin(tier, kv)
        self.finish(len(self.open) - 1, answer)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2), answer=st.integers(1, 40))
    def finish(self, which, answer):
        turn = self.open.pop(which % len(self.open))
        model, outcome = MODELS[turn.tier], turn.outcome
        cached = self.world.answer(model, outcome.extra_key, turn.length + answer)
        self.length = max(self.length, turn.length + answer + 5)
        self.clock += 1
        entry = TurnRecord(
            number=0, at=self.clock, tier=turn.tier, model=model, kv=outcome.status,
            kv_reason=outcome.reason, epoch=outcome.epoch, prompt_tokens=turn.length,
            cached_tokens=cached, completion_tokens=answer, drift_expected=0.01,
        )  # fmt: skip

        def change(session):
            held = session.lineage(model).epoch
            if outcome.epoch is None and held is not None:
                self.given_up.add((model, held))
            session.turns += 1
            session.model, session.tier = model, turn.tier
            record.advance(session, entry, outcome, turn.born)

        session = self.run(self.store.update("t", "s", change, []))
        if outcome.epoch is not None:
            self.to_audit.append((session.born, session.timeline[-1], turn.length + answer))

    @precondition(lambda self: self.to_audit)
    @rule(which=st.integers(0, 5), nats=st.floats(-0.2, 0.6), faithful=st.booleans())
    def audit(self, which, nats, faithful):
        born, turn, tokens = self.to_audit.pop(which % len(self.to_audit))
        self.world.answer(turn.model, None, tokens)
        found = Measurement((nats, nats)) if faithful else None

        def change(session):
            record.audit(session, turn, found, tokens, "measured", born)
            if session.born == born:
                self.given_up.add((turn.model, turn.epoch))

        self.run(self.store.amend("t", "s", change))

    @rule()
    def operator_reanchors(self):
        session = self.session()
        if session is None:
            return
        for model, one in session.lineages.items():
            if one.epoch is not None:
                self.given_up.add((model, one.epoch))
        self.run(self.store.amend("t", "s", record.abandon))

    @rule(tier=st.sampled_from(["small", "large"]), start=st.integers(0, 20))
    def pages_are_evicted(self, tier, start):
        for (model, _), held in self.world.pages.items():
            if model == MODELS[tier]:
                held.pop(start, None)

    @rule(tier=st.sampled_from(["small", "large"]))
    def worker_restarts(self, tier):
        self.run(self.store.amend("t", "s", lambda s: record.restart(s, MODELS[tier])))

    @rule()
    def session_expires(self):
        session = self.session()
        if session is not None:
            for model, one in session.lineages.items():
                if one.epoch is not None:
                    self.given_up.add((model, one.epoch))
        self.run(self.store.delete("t", "s"))

    @invariant()
    def state_is_true(self):
        session = self.session()
        if session is None:
            return
        for model, one in session.lineages.items():
            assert one.exact <= self.world.ever_exact.get(model, 0)
            if one.epoch is not None:
                assert (model, one.epoch) not in self.given_up
                assert lineage.ordinal(one.epoch) <= session.epoch
        assert len({(t.number, t.at) for t in session.timeline}) == len(session.timeline)


LineageMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestLineageMachine = LineageMachine.TestCase


def finished(at, model="large-model", epoch="1-a"):
    return TurnRecord(
        number=0, at=at, tier="large", model=model, kv="applied", kv_reason="mapped", epoch=epoch,
        prompt_tokens=40, completion_tokens=8, drift_expected=0.1,
    )  # fmt: skip


APPLIED = Outcome("applied", "mapped", epoch="1-a", tokens=32, mapped_tokens=32)


def test_a_deleted_session_does_not_come_back_through_what_was_under_way():
    old, new = born("s"), born("s")
    record.advance(new, finished(1.0), APPLIED, old.born)
    assert new.lineage("large-model").status == "none"
    record.advance(old, finished(1.0), APPLIED, old.born)
    assert old.lineage("large-model").epoch == "1-a"
    record.audit(new, finished(1.0), Measurement((0.3,)), 48, "measured", old.born)
    assert not new.drift and new.lineage("large-model").exact == 0


def test_an_audit_is_written_to_its_turn_and_to_the_totals():
    session = born("s")
    for at in (1.0, 2.0):
        session.turns += 1
        record.advance(session, finished(at), APPLIED, session.born)
    found = Measurement((0.5, 0.1, 0.0, 0.2))
    record.audit(session, session.timeline[0], found, 48, "measured", session.born)
    first, second = session.timeline
    assert (first.drift, first.drift_first_token, first.audit) == (0.2, 0.5, "measured")
    assert (second.drift, second.audit) == (None, "none")
    up = session.drift["up"]
    assert (up.turns, up.tokens, up.nats) == (1, 4, pytest.approx(0.8))
    assert up.position_tokens[:4] == [1, 1, 2, 0]
    assert up.position_nats[:3] == [0.5, 0.1, pytest.approx(0.2)]
    assert session.lineage("large-model").status == "exact"
