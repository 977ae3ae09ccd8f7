"""The operators' view of sessions, and what turns at once make of one."""

import threading

import httpx

from tests.contract.lossy import KEY, admin, last, session, switched
from tests.stack import Talk, eventually


def test_sessions_are_listed_latest_first_in_pages(make):
    stack = make({"audit_rate": 0.0})
    for number in range(5):
        Talk(f"s{number}").turn(stack, model="small")
    Talk("s1").turn(stack, model="small")
    whole = admin(stack).json()
    assert [one["id"] for one in whole["sessions"]] == ["s1", "s4", "s3", "s2", "s0"]
    assert whole["next"] is None
    first = admin(stack, limit=2).json()
    second = admin(stack, limit=2, before=first["next"]).json()
    assert [one["id"] for one in first["sessions"] + second["sessions"]] == ["s1", "s4", "s3", "s2"]
    for bad in ({"limit": 0}, {"limit": "x"}, {"before": "nan"}, {"before": "x"}):
        assert admin(stack, **bad).status_code == 400


def test_the_timeline_says_what_each_turn_ran_on(make):
    stack = make({"audit_rate": 0.0})
    talk = switched(stack)
    talk.turn(stack, model="large")
    seen = session(stack)
    assert [(t["number"], t["tier"], t["kv"]) for t in seen["timeline"]] == [
        (1, "small", "none"), (2, "large", "applied"), (3, "large", "continued"),
    ]  # fmt: skip
    assert seen["turns"] == 3 and seen["switches_up"] == 1 and seen["kv"] == "lossy"
    assert seen["timeline"][1]["mapped_tokens"] > 40
    assert seen["lineages"]["small-model"]["kv"] == "exact"
    # Nothing that was said is in it.
    assert "word" not in admin(stack, "/s").text


def test_an_operator_reanchors(make):
    stack = make({"audit_rate": 0.0})
    talk = switched(stack)
    answer = admin(stack, "/s/reanchor", "post").json()
    assert answer["lineages"]["large-model"]["kv"] != "lossy"
    headers = talk.turn(stack, model="large")
    assert headers["x-baton-kv"] == "none"
    assert "extra_key" not in last(stack.large[0])
    assert admin(stack, "/nosuch/reanchor", "post").status_code == 404


def test_a_deleted_session_starts_anew_in_a_namespace_of_its_own(make):
    stack = make({"audit_rate": 0.0})
    switched(stack)
    first = last(stack.large[0])["extra_key"]
    assert admin(stack, "/s", "delete").status_code == 204
    assert admin(stack, "/s").status_code == 404
    switched(stack)
    assert last(stack.large[0])["extra_key"] != first


def test_a_session_named_like_a_path(make):
    stack = make({"audit_rate": 0.0})
    Talk("a/b c/reanchor").turn(stack, model="small")
    url = f"{stack.url}/admin/sessions/a%2Fb%20c%2Freanchor"
    assert httpx.get(url, headers=KEY).json()["id"] == "a/b c/reanchor"


def test_a_worker_that_was_away_leaves_its_lineage_unconfirmed(make):
    stack = make({"audit_rate": 0.0})
    talk = switched(stack)
    assert session(stack)["lineages"]["large-model"]["confirmed"]
    stack.large[0].healthy = False
    eventually(lambda: stack.metric("baton_worker_up", worker="large-0") == 0)
    stack.large[0].healthy = True
    eventually(lambda: stack.metric("baton_worker_up", worker="large-0") == 1)
    lineages = session(stack)["lineages"]
    assert not lineages["large-model"]["confirmed"] and lineages["small-model"]["confirmed"]
    talk.turn(stack, model="large")
    assert session(stack)["lineages"]["large-model"]["confirmed"]


def test_two_turns_of_a_session_at_once(make):
    stack = make({"audit_rate": 0.0})
    talk = Talk("s")
    talk.turn(stack, model="small")
    stack.large[0].seconds_per_word = 0.02
    copies = [Talk("s") for _ in range(4)]
    for copy in copies:
        copy.messages = list(talk.messages)
    threads = [
        threading.Thread(target=copy.turn, args=(stack,), kwargs={"model": "large"})
        for copy in copies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    seen = session(stack)
    assert seen["turns"] == 5
    assert [turn["number"] for turn in seen["timeline"]] == [1, 2, 3, 4, 5]
    epochs = {turn["epoch"] for turn in seen["timeline"][1:]}
    assert len(epochs) == 4, "each began a lineage of its own"
    assert seen["lineages"]["large-model"]["epoch"] in epochs
