"""Spare time of a device, and an audit's two passes in pieces."""

import asyncio
import itertools
import random
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from router import settings as config
from router.drift import scoring
from router.drift.metrics import DriftMetrics
from router.drift.probe import ProbeFailed, Scored
from router.drift.scoring import Audit, Scoring
from router.drift.spare import SpareTime
from router.sessions.base import TurnRecord
from router.settings import Drift
from router.transfer.outcome import Outcome
from router.workers.device import Device
from router.workers.worker import Worker


class Clock:
    """Stands still but for what is slept."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        sleep = asyncio.sleep

        async def sleeping(seconds):
            self.now += seconds
            await sleep(0)

        monkeypatch.setattr("router.drift.spare.asyncio.sleep", sleeping)


class Fleet:
    """Two workers on one device, which say that they have so many requests."""

    def __init__(self, **drift):
        self.device = Device()
        self.loads = {"small": 0, "large": 0}
        self.asked = []
        self.down = set()
        for tier in self.loads:
            worker = Worker(
                config.Worker(name=tier, tier=tier, url=f"http://{tier}", model=tier),
                config.Pool(),
                config.Timeouts(),
                self.device,
            )
            worker.client = httpx.AsyncClient(
                base_url=f"http://{tier}", transport=httpx.MockTransport(self._answer)
            )
        self.small, self.large = self.device.workers
        self.registry = CollectorRegistry()
        self.spare = SpareTime(Drift(**{"audit_share": 1.0, **drift}), DriftMetrics(self.registry))

    def _answer(self, request):
        host = request.url.host
        self.asked.append(host)
        if host in self.down:
            raise httpx.ConnectError("down")
        load = {"num_running_reqs": self.loads[host], "num_waiting_reqs": 0}
        return httpx.Response(200, json={"loads": [load]})

    def pieces(self, outcome):
        name = "baton_audit_piece_seconds_count"
        return self.registry.get_sample_value(name, {"outcome": outcome}) or 0


async def result():
    return "result"


def test_spare_time_ends_when_a_user_comes_and_is_none_while_one_is_there():
    async def run():
        device, ends = Device(), []

        async def work():
            try:
                async with device.spare():
                    await asyncio.Event().wait()
            except TimeoutError:
                ends.append(device.idle())

        working = [asyncio.create_task(work()) for _ in range(2)]
        await asyncio.sleep(0)
        with device.in_use(), device.in_use():
            await asyncio.gather(*working)
            await work()
        # None of them was let go on by one user while another was still there.
        assert ends == [False] * 3
        async with device.spare():
            assert device.idle()

    asyncio.run(run())


def test_a_piece_waits_until_the_device_was_idle_for_so_long(monkeypatch):
    clock = Clock(monkeypatch)

    async def run():
        fleet = Fleet(audit_idle_seconds=3)
        with fleet.small.busy():
            clock.now += 10
        left = clock.now
        assert await fleet.spare.run(fleet.large, result) == "result"
        assert clock.now - left >= 3
        # Of what this gateway knows itself it asks nobody.
        assert fleet.asked == ["small", "large"]
        # The next one has no pause before it.
        before = clock.now
        await fleet.spare.run(fleet.large, result)
        assert clock.now == before
        assert fleet.pieces("done") == 2

    asyncio.run(run())


def test_a_device_rests_from_audits_until_they_have_had_their_share(monkeypatch):
    clock = Clock(monkeypatch)

    async def run():
        fleet, other = Fleet(audit_share=0.25, audit_wait_seconds=3600), Fleet()
        began = clock.now

        async def piece():
            clock.now += 2
            return clock.now

        ended = await fleet.spare.run(fleet.large, piece)
        # Workers of one device rest together, others do not.
        assert await fleet.spare.run(fleet.small, piece) - ended >= 8
        before = clock.now
        assert await other.spare.run(other.small, piece) == before + 2
        for _ in range(20):
            await fleet.spare.run(fleet.large, piece)
        # The last piece has no rest behind it, and waiting goes by tenths of a second.
        assert 22 * 2 / (clock.now - began) == pytest.approx(0.25, rel=0.06)

    asyncio.run(run())


@pytest.mark.parametrize("busy", ["small", "large"])
def test_users_of_other_gateways_are_waited_for(monkeypatch, busy):
    Clock(monkeypatch)

    async def run():
        fleet = Fleet(audit_idle_seconds=1, audit_wait_seconds=60)
        fleet.loads[busy] = 1
        with pytest.raises(ProbeFailed, match="busy"):
            await fleet.spare.run(fleet.large, result)
        # Asked about once a second, not all the time.
        assert 50 <= fleet.asked.count(busy) <= 61
        assert fleet.pieces("done") == 0

    asyncio.run(run())


def test_only_the_audited_worker_must_answer(monkeypatch):
    Clock(monkeypatch)

    async def run():
        fleet = Fleet(audit_wait_seconds=5)
        fleet.down = {"small"}
        with pytest.raises(ProbeFailed, match="busy"):
            await fleet.spare.run(fleet.large, result)
        # Once its health check has found it away, so are its users.
        fleet.small.healthy = False
        assert await fleet.spare.run(fleet.large, result) == "result"
        fleet.down = {"large"}
        with pytest.raises(ProbeFailed, match="worker_failed"):
            await fleet.spare.run(fleet.large, result)

    asyncio.run(run())


@pytest.mark.parametrize("again", [True, False])
def test_an_aborted_piece_is_begun_anew_until_its_time_is_over(monkeypatch, again):
    clock = Clock(monkeypatch)

    async def run():
        fleet, began = Fleet(audit_idle_seconds=1, audit_wait_seconds=60), []

        async def interrupted():
            began.append(clock.now)
            fleet.small.enter()
            try:
                await asyncio.Event().wait()
            finally:
                # A user every seven seconds.
                clock.now += 7
                fleet.small.leave()

        with pytest.raises(ProbeFailed, match="busy" if again else "interrupted"):
            await fleet.spare.run(fleet.large, interrupted, again)
        pauses = [later - before for before, later in itertools.pairwise(began)]
        assert len(began) == fleet.pieces("aborted") == (8 if again else 1)
        assert all(pause >= 8 for pause in pauses)

    asyncio.run(run())


class Cache:
    """A worker's KV by namespace; a token's log-probability is its position, less on exact KV."""

    def __init__(self, page, drift):
        self.page = page
        self.drift = drift
        self.held = {}
        self.computed = []

    async def prefill(self, worker, ids, where, priority):
        return self._use(ids, len(ids), where, ())

    async def score(self, worker, ids, start, where, priority):
        shift = self.drift if where.extra_key else 0.0
        values = tuple(shift - at for at in range(start, len(ids)))
        return self._use(ids, start - 1, where, values)

    def _use(self, ids, readable, where, values):
        held = min(self.held.get(where.extra_key, 0), readable) // self.page * self.page
        self.computed.append(len(ids) - held)
        self.held[where.extra_key] = max(len(ids), self.held.get(where.extra_key, 0))
        return Scored(values, held, 1.0)


class Always:
    async def run(self, worker, piece, again=True):
        return await piece()


@given(
    prompt=st.integers(1, 400),
    answer=st.integers(1, 200),
    closing=st.integers(0, 4),
    size=st.integers(16, 128),
    page=st.sampled_from([1, 4, 16]),
    gone=st.booleans(),
)
def test_both_passes_score_the_whole_answer_in_small_pieces(
    prompt, answer, closing, size, page, gone
):
    cache = Cache(page, drift=0.25)
    ids = [random.randrange(1000) for _ in range(prompt + answer + closing)]

    async def conversation_ids(worker, body, said, seconds):
        return ids[:prompt], ids

    probe = SimpleNamespace(
        prefill=cache.prefill, score=cache.score, conversation_ids=conversation_ids
    )
    # A worker computes at least a prompt's last token.
    cached = (prompt - 1) // page * page
    turn = TurnRecord(
        number=2, at=0.0, tier="large", model="m", kv="applied", kv_reason="ok", epoch="1-a",
        prompt_tokens=prompt, cached_tokens=cached, completion_tokens=answer, mapped_tokens=0,
        seconds_saved=0.0, drift_expected=0.1,
    )  # fmt: skip
    if not gone:
        cache.held["lossy:s:1-a"] = prompt + answer
    audit = Audit("t", "s", "b", turn, Outcome("applied", "ok"), None, {}, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "probe", probe)
        drift = Drift(audit_piece_tokens=size)
        found = asyncio.run(Scoring(audit, drift, Always(), 1.0).run())
    assert found.exact == len(ids)
    assert cache.held[None] == len(ids)
    if gone and cached:
        # Another answer's KV, computed anew by the audit itself.
        assert found.measured is None
    else:
        assert found.measured.nats == pytest.approx([0.25] * answer)
        # What a page holds beyond a piece's begin is computed again.
        assert max(cache.computed) <= size + page
