"""The measurements of drift, against scripted workers: what they ask, and what they make of it."""

import argparse
import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from loadtests import drift, drift_ttft, realstack
from tests.stack import Stack

PLAIN = {"kind": "pinned", "tier": "large"}
NAMES = (
    drift.DRIFTING, drift.REANCHORED, drift_ttft.AUDITED, drift_ttft.UNAUDITED, "unwatched"
)  # fmt: skip


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Looks like the local stack to the measurements."""
    key = tmp_path_factory.mktemp("keys") / "admin.key"
    key.write_text(realstack.ADMIN_KEY)
    rates = {drift.REANCHORED: 1.0, drift_ttft.AUDITED: 1.0}
    stack = Stack(
        auth={"admin_key_file": str(key)},
        policies=dict.fromkeys(NAMES, PLAIN),
        drift={**drift.SETTINGS, "audit_rates": rates},
    )
    for worker in (*stack.small, *stack.large):
        worker.drift = 0.2
    urls = {"gateway": stack.url, **{t: stack.servers[f"{t}-0"].url for t in ("small", "large")}}
    models = {"small": None, "large": None}
    yield SimpleNamespace(config=SimpleNamespace(models=models, url=urls.__getitem__))
    stack.stop()


def test_reanchored_drift_ends_where_the_other_goes_on(local):
    options = argparse.Namespace(sessions=1, patterns=["up"], tokens=12, passages=None, minutes=5)
    report = asyncio.run(drift.measure(local, options, 6))
    arms = report["patterns"]["up"]
    after = {arm: values["drift_by_turn"][2:] for arm, values in arms.items()}
    assert after[drift.DRIFTING] == pytest.approx([0.2] * 4)
    assert after[drift.REANCHORED] == pytest.approx([0.2, 0, 0, 0])
    assert after[drift.NATIVE] == pytest.approx([0] * 4)
    assert arms[drift.NATIVE]["same_answer_share"] == 1
    assert arms[drift.REANCHORED]["kv"]["none:reanchored"] == 1


def test_time_to_first_token_is_compared_in_pairs_of_rounds(local, tmp_path):
    options = argparse.Namespace(
        minutes=0.001, users=2, pause=0.05, tokens=3, seed=1, passages=None
    )
    report = asyncio.run(drift_ttft.run(local, options))
    on, off = drift_ttft.AUDITED, drift_ttft.UNAUDITED
    for ratios in report["ratios"].values():
        assert ratios["pairs"] == 4
        for statistic in ("median", "mean"):
            low, high = ratios[f"ratio_of_{statistic}s"]["interval"]
            assert low <= ratios[f"ratio_of_{statistic}s"]["value"] <= high
    assert report["ratios"]["plain"][on]["turns"] == report["ratios"]["plain"][off]["turns"] == 68
    # Lossy turns were audited in one arm, and none in the other.
    assert report["audits_ran"] >= 1
    assert set(report["audits"][off]) == {"none"}
    assert report["audit_pieces"]["done"]["count"] > 0
    assert report["kv"][off]["applied"] == report["kv"][on]["applied"] == 4
    drift_ttft.write(tmp_path, report)
    assert {path.name for path in tmp_path.iterdir()} == {"ttft.json", "ttft.md", "ttft.png"}


def test_a_measurement_without_audits_fails(local, tmp_path, monkeypatch):
    """For there was nothing that could have cost anything."""
    monkeypatch.setattr(drift_ttft, "AUDITED", "unwatched")
    monkeypatch.setattr(drift_ttft, "real_stack", lambda *_: contextlib.nullcontext(local))
    arguments = ["drift_ttft", "--minutes=0.001", "--pause=0.02", "--users=1", f"--out={tmp_path}"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit, match="no audit"):
        drift_ttft.main()


@pytest.mark.parametrize(("shift", "good"), [(0.0, True), (0.5, False)])
def test_the_estimate_is_held_to_the_divergence(shift, good):
    torch = pytest.importorskip("torch")
    from loadtests.drift_estimator import compare

    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(60, 50, generator=generator) * 0.4
    answers = [((row + 0.1 + shift).tolist(), [0.1] * 50) for row in noise]
    report = compare(answers)
    assert report["tokens"] == 3000
    assert report["divergence"]["value"] == pytest.approx(0.1)
    assert report["within_20_percent_or_0.01_nats"] is good
    low, high = report["difference"]["interval"]
    assert (low <= 0 <= high) is good
