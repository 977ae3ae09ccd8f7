"""Changes of model on real workers: what is carried over, what stays apart, what is repaired."""

from __future__ import annotations

import time

import pytest

from mapper.keys import Namespace, page_keys
from tests.e2e.talk import (
    PAGE,
    SHARED,
    Conversation,
    ask_worker,
    cached,
    flush,
    lineage,
    metric,
    token_ids,
    transfer,
)

pytestmark = pytest.mark.e2e


def lossy_pages(stack, names, opening):
    """A lossy lineage on the large worker, made straight through the mapper."""
    messages = [{"role": "user", "content": opening}]
    salt = f"tenant-{abs(hash(opening))}"
    ask_worker(stack, "small", messages, cache_salt=salt).raise_for_status()
    ids = token_ids(stack, "small", messages)
    target = {"model": names["large"], "extra_key": "lossy:direct:1", "cache_salt": salt}
    source = {"model": names["small"], "cache_salt": salt}
    for _ in range(50):  # the worker writes its pages after it has answered
        answer = transfer(stack, ids, source, target)
        if answer["tokens"] >= len(ids) - 3 * PAGE:
            return messages, salt, answer
        time.sleep(0.1)
    raise AssertionError(answer)


def test_escalation_takes_the_cache_along(real_stack, document):
    talk = Conversation(real_stack, f"Escalation. {document}")
    first = talk.turn("When was the line opened?", "small")
    assert first.headers["x-baton-kv"] == "none" and first.cached_tokens <= SHARED
    talk.settle()
    second = talk.turn("What was the first engine called?", "large")
    assert second.headers["x-baton-kv"] == "applied"
    assert second.headers["x-baton-tier"] == "large"
    assert second.cached_tokens >= 0.9 * second.prompt_tokens
    assert int(second.headers["x-baton-kv-tokens"]) == second.cached_tokens
    third = talk.turn("And the smallest?", "large")
    assert third.headers["x-baton-kv"] == "continued"
    assert third.cached_tokens >= second.cached_tokens


def test_escalation_is_booked_once_confirmed(real_stack, document):
    before = metric(real_stack, "gateway", "baton_kv_transfer_total", status="applied")
    talk = Conversation(real_stack, f"Booked. {document}")
    talk.turn("When was the line opened?", "small")
    talk.settle()
    talk.turn("What was the first engine called?", "large")
    after = metric(real_stack, "gateway", "baton_kv_transfer_total", status="applied")
    assert after == before + 1


def test_a_cascade_hands_the_prompt_over_at_once(real_stack, document):
    talk = Conversation(real_stack, f"Cascade. {document}", policy="unsure", max_tokens=64)
    first = talk.turn("When was the line opened?", "auto", stream=True)
    assert first.headers["x-baton-cascade"] == "escalated"
    assert first.headers["x-baton-reason"] == "cascade_low_logprob"
    assert first.headers["x-baton-tier"] == "large"
    # The small worker has only just read the prompt; the large one does not read it again.
    assert first.headers["x-baton-kv"] == "applied"
    assert first.cached_tokens >= 0.9 * first.prompt_tokens
    after = talk.turn("What was the first engine called?", "large")
    assert after.headers["x-baton-kv"] == "continued"
    assert after.cached_tokens >= first.cached_tokens


def test_downgrade_takes_the_cache_along(real_stack, document):
    talk = Conversation(real_stack, f"Downgrade. {document}")
    talk.turn("When was the line opened?", "large")
    talk.settle()
    second = talk.turn("What was the first engine called?", "small")
    assert second.headers["x-baton-kv"] == "applied"
    assert second.cached_tokens >= 0.9 * second.prompt_tokens


def test_a_return_reuses_exact_pages_first(real_stack, document):
    talk = Conversation(real_stack, f"Return. {document[:3000]}")
    small = talk.turn("When was the line opened?", "small")
    talk.settle()
    talk.messages[-1]["content"] += f" {document[3000:5200]}"
    talk.turn("Which engine was the smallest?", "large")
    talk.settle()
    before = metric(real_stack, "mapper", "baton_store_events_total", event="linked")
    back = talk.turn("Who drove it?", "small")
    assert back.headers["x-baton-kv"] == "applied"
    linked = metric(real_stack, "mapper", "baton_store_events_total", event="linked") - before
    exact_pages = small.prompt_tokens // PAGE
    assert exact_pages - 1 <= linked <= exact_pages + 1
    assert back.cached_tokens > small.prompt_tokens + 200


def test_too_little_to_map_is_prefilled_exactly(real_stack, document):
    talk = Conversation(real_stack, f"Little. {document[:2500]}")
    talk.turn("When was the line opened?", "small")
    talk.settle()
    talk.turn(f"{document[2500:3000]} Which engine was first?", "large")
    talk.settle()
    back = talk.turn("Who drove it?", "small")
    assert (back.headers["x-baton-kv"], back.headers["x-baton-kv-reason"]) == (
        "native",
        "too_little",
    )


def test_lossy_pages_are_out_of_reach(real_stack, names, document):
    messages, salt, answer = lossy_pages(real_stack, names, f"Out of reach. {document[:2500]}")

    def hit(**namespace):
        flush(real_stack, "large")
        return cached(ask_worker(real_stack, "large", messages, **namespace).raise_for_status())

    # The lineage itself last: a hit before it would be of pages that it computed.
    assert hit(cache_salt=salt, extra_key="lossy:other:1") == 0
    assert hit(cache_salt="someone-else", extra_key="lossy:direct:1") == 0
    assert hit(extra_key="lossy:direct:1") == 0
    assert hit(cache_salt=salt) == 0
    assert hit(cache_salt=salt, extra_key="lossy:direct:1") == answer["tokens"]


def test_tenants_and_lineages_with_one_system_prompt(real_stack, names, document):
    """What a request finds is what its own tenant and lineage have left, and no more."""
    opening = f"Isolation. {document[:2000]}"
    messages, salt, answer = lossy_pages(real_stack, names, opening)
    other = [*messages, {"role": "user", "content": "And now something else."}]
    exact = ask_worker(real_stack, "large", messages, cache_salt="tenant-b").raise_for_status()
    assert cached(exact) == 0
    time.sleep(1)  # the worker writes its pages after it has answered
    found = {}
    for tenant in (salt, "tenant-b", "tenant-c"):
        for extra_key in (None, "lossy:direct:1", "lossy:other:1"):
            flush(real_stack, "large")
            response = ask_worker(
                real_stack, "large", other, cache_salt=tenant, extra_key=extra_key, max_tokens=1
            ).raise_for_status()
            found[tenant, extra_key] = cached(response)
    assert found.pop((salt, "lossy:direct:1")) >= answer["tokens"] - PAGE
    # Its own exact prompt, as far as the two conversations are the same.
    assert found.pop(("tenant-b", None)) >= answer["tokens"] - 2 * PAGE
    assert set(found.values()) == {0}


def test_one_tenants_pages_cannot_be_asked_for_by_another(real_stack, names):
    import httpx

    source = {"model": names["small"], "cache_salt": "one"}
    target = {"model": names["large"], "extra_key": "lossy:x:1", "cache_salt": "two"}
    with pytest.raises(httpx.HTTPStatusError) as refused:
        transfer(real_stack, [1] * 64, source, target)
    assert refused.value.response.status_code == 422


def spoil(stack, ids, namespace):
    """Flips a byte in a lineage's pages, save the first two: those hold the system prompt,
    and may be exact pages that other conversations share."""
    for key in page_keys(ids, PAGE, namespace)[2:]:
        for path in stack.config.store_folder.rglob(f"{key}.*.kv"):
            _flip(path)


def _flip(path):
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0xFF]))


def test_a_bad_page_aborts_at_the_worker_and_is_gone(real_stack, names, document):
    messages, salt, answer = lossy_pages(real_stack, names, f"Bad page. {document[:2500]}")
    ids = token_ids(real_stack, "large", messages)
    spoil(real_stack, ids, Namespace("lossy:direct:1", salt))
    namespace = {"cache_salt": salt, "extra_key": "lossy:direct:1"}
    first = ask_worker(real_stack, "large", messages, **namespace)
    assert first.status_code == 503 and "load failed" in first.text
    again = ask_worker(real_stack, "large", messages, **namespace)
    assert again.status_code == 200 and cached(again) < answer["tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_gateway_answers_natively_after_a_bad_page(real_stack, document, stream):
    talk = Conversation(real_stack, f"Repaired {stream}. {document[:2500]}")
    talk.turn("When was the line opened?", "small")
    talk.settle()
    applied = talk.turn("Which engine was first?", "large")
    assert applied.headers["x-baton-kv"] == "applied"
    talk.settle()
    flush(real_stack, "large")
    ids = token_ids(real_stack, "large", talk.messages)
    spoil(real_stack, ids, Namespace(lineage(real_stack, talk.session), "default"))
    before = metric(real_stack, "gateway", "baton_kv_transfer_total", reason="load_failed")
    reply = talk.turn("Who drove it?", "large", stream=stream)
    assert reply.headers["x-baton-kv"] == "native"
    assert reply.headers["x-baton-kv-reason"] == "load_failed"
    assert reply.text
    after = metric(real_stack, "gateway", "baton_kv_transfer_total", reason="load_failed")
    assert after == before + 1


QUESTIONS = [
    "Name three birds.", "What is a railway?", "Why is the sky blue?", "Tell me about cats.",
    "How do I boil an egg?", "What is salt made of?", "Describe a harbour.", "Who writes letters?",
    "What is granite?", "Explain a whistle.", "Give a recipe for soup.", "What do sheep eat?",
    "What is a schoolteacher?", "Name a month.", "What is coal?", "How long is a mile?",
    "What is a lobster?", "Describe a velvet seat.", "What is a signal box?", "Why do people sing?",
]  # fmt: skip


def test_identity_map_answers_token_for_token(real_stack, names, document):
    """With source and target the same model, mapped KV must give what native prefill gives."""
    differing = []
    for number, question in enumerate(QUESTIONS):
        start = 120 * number
        messages = [{"role": "user", "content": f"{document[start : start + 700]}\n{question}"}]
        native = ask_worker(
            real_stack, "large", messages,
            cache_salt="identity", extra_key="lossy:source:1", max_tokens=16, logprobs=True,
        ).raise_for_status()  # fmt: skip
        ids = token_ids(real_stack, "large", messages)
        where = {"model": names["large"], "cache_salt": "identity"}
        mapped_tokens = 0
        for _ in range(50):
            answer = transfer(
                real_stack,
                ids,
                where | {"extra_key": "lossy:source:1"},
                where | {"extra_key": "lossy:target:1"},
            )
            # A call finds what the worker has written so far, the next one goes on from there.
            mapped_tokens += answer["mapped_tokens"]
            if answer["tokens"] >= len(ids) - 3 * PAGE:
                break
            time.sleep(0.1)
        assert answer["status"] == "applied", answer
        # All but the page of the system prompt, which the lineage has since the first question.
        assert mapped_tokens >= answer["tokens"] - PAGE
        mapped = ask_worker(
            real_stack, "large", messages,
            cache_salt="identity", extra_key="lossy:target:1", max_tokens=16, logprobs=True,
        ).raise_for_status()  # fmt: skip
        assert cached(mapped) == answer["tokens"]
        if _tokens(native) != _tokens(mapped):
            differing.append(question)
    assert differing == []


def _tokens(response):
    return [token["token"] for token in response.json()["choices"][0]["logprobs"]["content"]]
