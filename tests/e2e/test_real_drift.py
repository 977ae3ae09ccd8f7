"""Audits and re-anchoring on real workers."""

from __future__ import annotations

import time
from statistics import fmean

import httpx
import pytest

from mapper.keys import Namespace, page_keys
from tests.e2e.talk import PAGE, Conversation, lineage, metric, session, token_ids

pytestmark = pytest.mark.e2e


def audited(stack, id, number):
    """The turn's record, once its audit has ended."""
    for _ in range(900):
        turn = session(stack, id)["timeline"][number - 1]
        if turn["audit"] != "none":
            return turn
        time.sleep(0.1)
    raise AssertionError(turn)


def score(stack, tier, ids, start, **namespace):
    """Log-probabilities of ids[start:] as the worker gives them."""
    body = {
        "input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True, "logprob_start_len": start - 1, **namespace,
    }  # fmt: skip
    answer = httpx.post(f"{stack.config.url(tier)}/generate", json=body, timeout=300)
    entries = answer.raise_for_status().json()["meta_info"]["input_token_logprobs"]
    return [entry[0] for entry in entries[-(len(ids) - start) :]]


@pytest.fixture(scope="module")
def talk(real_stack, document):
    """A session whose switched turn was audited."""
    talk = Conversation(real_stack, f"Audited. {document[:2600]}", policy="audited", max_tokens=12)
    talk.turn("When was the line opened?", "small")
    talk.settle()
    assert talk.turn("Which engine was first?", "large").headers["x-baton-kv"] == "applied"
    talk.lineage = lineage(real_stack, talk.session)
    talk.audited = audited(real_stack, talk.session, 2)
    return talk


def test_an_audit_measures_what_the_workers_say(real_stack, talk):
    turn = talk.audited
    assert turn["audit"] == "measured"
    prompt = token_ids(real_stack, "large", talk.messages[:3])
    url = f"{real_stack.config.url('large')}/v1/tokenize"
    body = {"messages": talk.messages[:4], "add_generation_prompt": False}
    whole = httpx.post(url, json=body, timeout=60).json()["tokens"]
    ids, start = whole[: turn["prompt_tokens"] + turn["completion_tokens"]], len(prompt)
    assert start == turn["prompt_tokens"]
    mapped = score(real_stack, "large", ids, start, cache_salt="default", extra_key=talk.lineage)
    native = score(real_stack, "large", ids, start, cache_salt="a-salt-of-its-own")
    expected = fmean(a - b for a, b in zip(mapped, native, strict=True))
    assert turn["drift"] == pytest.approx(expected, abs=1e-3)
    assert turn["drift_first_token"] == pytest.approx(mapped[0] - native[0], abs=1e-3)
    assert metric(real_stack, "gateway", "baton_drift_nats_count", direction="up") >= 1


def test_the_next_turn_runs_on_the_exact_kv_that_the_audit_left(real_stack, talk):
    before = session(real_stack, talk.session)["lineages"][talk.audited["model"]]
    assert (before["kv"], before["reanchored"]) == ("exact", True)
    reply = talk.turn("Who drove it?", "large")
    assert (reply.headers["x-baton-kv"], reply.headers["x-baton-kv-reason"]) == (
        "none",
        "reanchored",
    )
    held = talk.audited["prompt_tokens"] + talk.audited["completion_tokens"]
    assert reply.cached_tokens >= held - PAGE
    # And it is native to the last digit: the same as a prefill that has never seen a map.
    ids = token_ids(real_stack, "large", talk.messages[:5])
    start = len(ids) - 8
    ours = score(real_stack, "large", ids, start, cache_salt="default")
    native = score(real_stack, "large", ids, start, cache_salt="another-salt")
    assert ours == pytest.approx(native, abs=2e-3)


def test_exact_and_lossy_pages_of_one_conversation_stay_apart(real_stack, talk):
    ids = token_ids(real_stack, "large", talk.messages[:3])
    folder = real_stack.config.store_folder / real_stack.config.worker("large").spec().fingerprint
    exact = page_keys(ids, PAGE, Namespace(None, "default"))
    lossy = page_keys(ids, PAGE, Namespace(talk.lineage, "default"))
    provenance = {}
    for name, keys in (("exact", exact), ("lossy", lossy)):
        files = [path for key in keys for path in folder.rglob(f"{key}.*.kv")]
        provenance[name] = [path.read_bytes()[40] for path in files]
    assert len(provenance["exact"]) >= len(exact) - 1 and set(provenance["exact"]) == {0}
    assert 1 in provenance["lossy"]


def test_going_back_maps_nothing_that_is_exact(real_stack, talk):
    before = metric(real_stack, "mapper", "baton_mapper_tokens_total", origin="mapped")
    back = talk.turn("And the smallest?", "small")
    # The small worker has its own pages of the first turn; the rest is its own to prefill.
    assert back.headers["x-baton-kv"] in ("exact", "native")
    assert lineage(real_stack, talk.session) is None
    after = metric(real_stack, "mapper", "baton_mapper_tokens_total", origin="mapped")
    assert after == before
