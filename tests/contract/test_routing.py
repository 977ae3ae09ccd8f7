"""Policies at work: overrides, the decision log, live economics, rollouts, what is remembered of a session."""

import itertools
import json

import httpx
import pytest

from router.auth import keys
from tests.contract.routed import BODY, PRICES, tier
from tests.stack import Talk, eventually, user

# Overrides and explanations


def test_an_explanation(make_stack):
    stack = make_stack(policy={"kind": "adaptive", "threshold": 0.0, "gain": {"math": 0.3}})
    body = {**BODY, "messages": [user("What is 12 * 7 + 5? Calculate it, please.")]}
    named = {**body, "metadata": {"session_id": "ség — x"}}
    answer = stack.post(named, {"x-baton-explain": "1"})
    explained = json.loads(answer.headers["x-baton-explain"])
    assert explained["policy"] == "default"
    assert len(explained["version"]) == 12
    assert explained["decision"]["tier"] == answer.headers["x-baton-tier"] == "large"
    assert explained["decision"]["reason"] == answer.headers["x-baton-reason"]
    assert explained["decision"]["task"] == "math"
    assert explained["decision"]["scores"]["gain"] == 0.3
    assert explained["inputs"]["turn"]["prompt_chars"] == len(body["messages"][0]["content"])
    assert explained["inputs"]["economics"]["tiers"]["small"]["available"] is True
    assert "Calculate" not in answer.headers["x-baton-explain"]
    assert "x-baton-explain" not in stack.post(body).headers
    stream = stack.stream(body, {"x-baton-explain": "true"})
    assert json.loads(stream.headers["x-baton-explain"])["decision"]["task"] == "math"


def test_a_policy_that_a_key_may_not_use(make_stack, tmp_path):
    path = tmp_path / "keys.yaml"
    narrow = keys.create(path, "tenant", policies=["cheap"])
    stack = make_stack(
        auth={"keys_file": str(path)},
        policies={
            "cheap": {"kind": "pinned"},
            "premium": {"kind": "pinned", "tier": "large"},
        },
    )
    auth = {"authorization": f"Bearer {narrow}"}
    refused = stack.post(BODY, {**auth, "x-baton-policy": "premium"})
    assert refused.status_code == 403
    assert refused.json()["error"]["param"] == "x-baton-policy"
    # What may not be used cannot be told from what there is not.
    assert stack.post(BODY, {**auth, "x-baton-policy": "nosuch"}).status_code == 403
    assert stack.post(BODY, {**auth, "x-baton-policy": "cheap"}).status_code == 200
    assert not stack.large[0].seen


def test_a_forced_tier_goes_before_every_kind_of_policy(make_stack):
    for policy in (
        {"kind": "pinned", "tier": "large"},
        {"kind": "adaptive", "threshold": -1.0},
        {
            "kind": "rollout",
            "mode": "canary",
            "percent": 100,
            "current": {"kind": "pinned"},
            "candidate": {"kind": "pinned", "tier": "large"},
        },
    ):
        stack = make_stack(policy=policy)
        for body, headers, how in (
            ({"model": "small"}, {}, "alias"),
            ({"model": "small-model"}, {}, "model"),
            ({}, {"x-baton-tier": "small"}, "header"),
        ):
            answer = stack.post({**BODY, **body}, headers)
            assert answer.headers["x-baton-tier"] == "small"
            assert answer.headers["x-baton-reason"] == f"forced_by_{how}"


# The decision log


def lines(path):
    """The whole lines; the last one may still be on its way."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.mark.parametrize("with_text", [False, True])
def test_the_decision_log(make_stack, tmp_path, capsys, with_text):
    path = tmp_path / "decisions.jsonl"
    stack = make_stack(
        policy={"kind": "turns", "escalate_at": 2},
        decisions={"log_file": path, "log_text": with_text},
        prices=PRICES,
        transfers={"min_mapped_tokens": 16},
    )
    secret = "my-secret-prompt-words"
    talk = Talk("s")
    for _ in range(2):
        talk.turn(stack, text=f"{secret} " * 60)
    first, second = eventually(lambda: (found := lines(path)) and len(found) == 2 and found)
    assert (first["tier"], second["tier"]) == ("small", "large")
    assert second["event"] == "decision"
    assert second["policy"] == "default" and len(second["version"]) == 12
    assert (second["session"], second["tenant"], second["turn"]) == ("s", "default", 2)
    assert (second["stage"], second["reason"], second["kv"]) == ("turns", "turns_escalated", "map")
    assert (second["kv_status"], second["answered"]) == ("applied", True)
    assert second["prompt_tokens"] > 120 and second["completion_tokens"] > 0
    # The prompt's length is an estimate, from what the last turn is known to have had.
    assert second["uncached"]["small"] < second["uncached"]["large"]
    assert 0.4 < second["uncached"]["large"] / second["prompt_tokens"] < 2.5
    assert 0 < second["mapped_share"] <= 1
    assert second["money"] > first["money"] > 0
    assert second["inputs"]["session"]["stay"] == 1
    assert second["inputs"]["economics"]["tiers"]["large"]["prompt_price"] == 10
    assert path.stat().st_mode & 0o077 == 0
    assert (secret in path.read_text()) is with_text
    if with_text:
        assert secret in second["text"] and secret in second["earlier"][0]
    log = capsys.readouterr().err
    assert log.count('"event": "decision"') == 2
    assert secret not in log


def test_a_log_file_that_cannot_be_written_costs_no_turn(make_stack, tmp_path):
    stack = make_stack(decisions={"log_file": tmp_path / "no-such-folder" / "decisions.jsonl"})
    assert stack.post(BODY).status_code == 200
    eventually(lambda: stack.metric("baton_decisions_unwritten_total") == 1)


def test_a_log_file_that_was_moved_away(make_stack, tmp_path):
    path = tmp_path / "decisions.jsonl"
    stack = make_stack(decisions={"log_file": path})
    stack.post(BODY)
    eventually(lambda: len(lines(path)) == 1)
    path.rename(tmp_path / "old.jsonl")
    stack.post(BODY)
    eventually(path.exists)
    assert len(lines(path)) == 1


# Live economics


def test_times_are_learned_from_the_workers(make_stack):
    stack = make_stack(prices=PRICES)
    stack.large[0].seconds_per_token = 0.001
    stack.large[0].seconds_per_word = 0.01
    for size in (60, 240, 120, 400, 180, 300):
        Talk().turn(stack, text="word " * size, model="large")
    talk = Talk("s")
    talk.turn(stack, text="word " * 300, model="small")
    answer = stack.post(
        {"model": "small", "messages": [*talk.messages, user()]},
        {"x-session-id": "s", "x-baton-explain": "1"},
    )
    large = json.loads(answer.headers["x-baton-explain"])["inputs"]["economics"]["tiers"]["large"]
    assert 280 < large["uncached_tokens"] < 600
    assert 0.6 < large["prefill_seconds"] / (large["uncached_tokens"] * 0.001) < 1.6
    assert 0.8 < large["decode_token_seconds"] / 0.01 < 2.5
    # All that the small model has would be mapped.
    assert 0.8 < large["mapped_share"] <= 1


def test_a_mapper_that_is_down_maps_nothing(make_stack):
    stack = make_stack()
    stack.mapper.fault = "status"
    talk = Talk("s")
    shares = []
    for number in range(8):
        talk.turn(stack, model=("small", "large")[number % 2])
    answer = stack.post(
        {"model": "large", "messages": [*talk.messages, user()]},
        {"x-session-id": "s", "x-baton-explain": "1"},
    )
    tiers = json.loads(answer.headers["x-baton-explain"])["inputs"]["economics"]["tiers"]
    shares = [one["mapped_share"] for one in tiers.values()]
    assert shares == [0.0, 0.0]


# Rollouts


def rollout(mode, **options):
    return {
        "kind": "rollout",
        "mode": mode,
        "current": {"kind": "pinned", "tier": "small"},
        "candidate": {"kind": "pinned", "tier": "large"},
        **options,
    }


def test_a_shadow_decides_and_is_logged_and_nothing_else(make_stack, tmp_path):
    path = tmp_path / "decisions.jsonl"
    stack = make_stack(policy=rollout("shadow"), decisions={"log_file": path})
    assert tier(stack) == "small"
    assert not stack.large[0].seen
    (line,) = eventually(lambda: lines(path))
    assert line["shadow"] == {"tier": "large", "stage": "pinned", "reason": "pinned"}
    assert line["arm"] == "current"
    assert stack.metric("baton_policy_shadow_total", tier="small", shadow_tier="large") == 1


def test_a_canary_is_a_share_of_the_sessions(make_stack):
    stack = make_stack(policy=rollout("canary", percent=30))
    tiers = {
        number: {tier(stack, **{"x-session-id": f"session-{number}"}) for _ in range(2)}
        for number in range(60)
    }
    # A session's turns all go the same way.
    assert all(len(one) == 1 for one in tiers.values())
    candidates = sum(one == {"large"} for one in tiers.values())
    assert 6 <= candidates <= 32
    assert stack.metric("baton_policy_decisions_total", arm="candidate") == 2 * candidates
    assert stack.metric("baton_policy_decisions_total", arm="current") == 120 - 2 * candidates


def test_ab_by_tenant(make_stack, tmp_path):
    path = tmp_path / "keys.yaml"
    a, b = keys.create(path, "a"), keys.create(path, "b")
    stack = make_stack(auth={"keys_file": str(path)}, policy=rollout("ab", tenants=["b"]))
    assert tier(stack, authorization=f"Bearer {a}") == "small"
    assert tier(stack, authorization=f"Bearer {b}") == "large"
    text = httpx.get(f"{stack.url}/metrics").text
    assert 'arm="candidate"' in text and "tenant=" not in text


# What is remembered of a session


def test_a_session_that_goes_to_and_fro_stays_for_a_while(make_stack):
    stack = make_stack(
        policy={
            "kind": "adaptive",
            "threshold": 0.1,
            "gain": {"math": 0.9, "chat": -0.9},
            "stability": {"min_stay": 3, "latch_after": None},
        }
    )
    talk = Talk("s")
    hard, easy = "What is 12 * 7 + 5? Calculate 3 + 4 * 9 as well.", "Thanks, that was nice."
    tiers = [
        talk.turn(stack, text=(hard, easy)[number % 2])["x-baton-tier"] for number in range(13)
    ]
    switches = [i for i in range(1, 13) if tiers[i] != tiers[i - 1]]
    assert switches
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(switches))


def test_two_confirmations_keep_it_on_the_large_tier(make_stack):
    stack = make_stack(
        policy={
            "kind": "adaptive",
            "threshold": 0.1,
            "gain": {"math": 0.9, "chat": -0.9},
            "stability": {"min_stay": 1, "latch_after": 2},
        }
    )
    talk = Talk("s")
    hard, easy = "What is 12 * 7 + 5? Calculate 3 + 4 * 9 as well.", "Thanks, that was nice."
    headers = [talk.turn(stack, text=text) for text in (hard, hard, easy, easy)]
    assert [one["x-baton-tier"] for one in headers] == ["large"] * 4
    assert headers[-1]["x-baton-reason"] == "latched"


READS_PROMPT = {"weights": {"prompt_logprob": -1.0}, "fill": {"prompt_logprob": -1.0}}


@pytest.mark.parametrize("refused", [False, True])
def test_what_is_asked_before_the_decision_is_paid_for(make_stack, refused):
    policy = {
        "kind": "adaptive",
        "threshold": 1.0,
        "classifier": {"model": READS_PROMPT},
        **({"budgets": {"tenant": {"money": 1e-9}, "at_limit": "reject"}} if refused else {}),
    }
    stack = make_stack(policy=policy, prices=PRICES)
    usage = stack.post(BODY).json()["usage"]
    (probe,) = stack.small[0].probes
    assert probe["text"] == BODY["messages"][0]["content"]
    # The fake counts a token a byte. Small tokens cost 1, and 2 where they are written.
    asked = len(probe["text"].encode()) + 2
    answer = usage["prompt_tokens"] + 2 * usage["completion_tokens"]
    money = stack.metric("baton_money_total", tier="small")
    assert money == pytest.approx((asked + answer) / 1e6)
    if refused:
        assert stack.post(BODY).status_code == 402
        money = stack.metric("baton_money_total", tier="small")
        assert money == pytest.approx((2 * asked + answer) / 1e6)
