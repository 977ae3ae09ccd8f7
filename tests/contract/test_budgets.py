"""Spend limits of sessions and tenants: degraded or refused, and nobody else is."""

import pytest

from router.auth import keys
from tests.contract.routed import BODY, PRICES
from tests.stack import Talk


def budget(at_limit="degrade", status=402, **limits):
    return {
        "kind": "adaptive",
        "threshold": -1.0,
        "budgets": {**limits, "at_limit": at_limit, "status": status},
    }


def test_a_session_is_degraded_at_its_limit(make_stack):
    stack = make_stack(policy=budget(session={"large_tokens": 100}), prices=PRICES)
    talk = Talk("s")
    assert talk.turn(stack)["x-baton-tier"] == "large"
    answer = talk.turn(stack)
    while answer["x-baton-tier"] == "large":
        answer = talk.turn(stack)
    assert answer["x-baton-reason"] == "budget_session_large_tokens"
    # Also when the large tier is asked for: the limit is the operator's.
    assert talk.turn(stack, model="large")["x-baton-tier"] == "small"
    # Another session has its own.
    assert Talk("other").turn(stack)["x-baton-tier"] == "large"


@pytest.mark.parametrize("status", [402, 429])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tenant_is_refused_at_its_limit(make_stack, status, stream):
    stack = make_stack(policy=budget("reject", status, tenant={"money": 0.001}), prices=PRICES)
    while (answer := stack.post({**BODY, "stream": stream})).status_code == 200:
        assert len(stack.large[0].seen) < 100
    assert answer.status_code == status
    assert answer.json()["error"] == {
        "message": "Today's budget is used up.",
        "type": "insufficient_quota",
        "param": None,
        "code": "budget_tenant_money",
    }
    assert answer.headers["x-baton-reason"] == "budget_tenant_money"
    assert answer.headers["x-should-retry"] == "false"
    assert ("retry-after" in answer.headers) is (status == 429)
    sent = len(stack.large[0].seen)
    assert sent == pytest.approx(
        0.001 / stack.metric("baton_money_total", tier="large") * sent, 0.5
    )
    assert stack.metric("baton_rejected_total", reason="budget_tenant_money") == 1
    assert len(stack.large[0].seen) == sent


def test_the_official_client_does_not_try_again(make_stack):
    import openai

    stack = make_stack(policy=budget("reject", 429, tenant={"large_tokens": 1}))
    stack.post(BODY)
    with pytest.raises(openai.RateLimitError) as error:
        stack.client(max_retries=3).chat.completions.create(**BODY)
    assert error.value.code == "budget_tenant_large_tokens"
    assert stack.metric("baton_rejected_total", reason="budget_tenant_large_tokens") == 1


def test_one_tenants_spending_is_not_anothers(make_stack, tmp_path):
    path = tmp_path / "keys.yaml"
    a, b = keys.create(path, "a"), keys.create(path, "b")
    stack = make_stack(
        auth={"keys_file": str(path)}, policy=budget("reject", tenant={"large_tokens": 1})
    )
    for key, expected in ((a, 200), (a, 402), (b, 200)):
        assert stack.post(BODY, {"authorization": f"Bearer {key}"}).status_code == expected
