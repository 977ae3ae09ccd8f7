"""Sessions on mapped KV and what operators see of them, for the tests of drift."""

import httpx

from tests.stack import Talk, eventually

ALWAYS = {"audit_rate": 1.0, "audit_wait_seconds": 60.0, "audit_piece_tokens": 64}
KEY = {"authorization": "Bearer the-admin-key"}


def admin(stack, path="", method="get", **params):
    return httpx.request(
        method, f"{stack.url}/admin/sessions{path}", params=params, headers=KEY, timeout=30
    )


def session(stack, id="s"):
    return admin(stack, f"/{id}").json()


def audited(stack, count=1):
    """Waits until so many audits have ended."""
    eventually(lambda: stack.metric("baton_audits_total") >= count)


def last(worker):
    return worker.seen[-1].body


def switched(stack, talk=None):
    talk = talk or Talk("s")
    talk.turn(stack, model="small")
    headers = talk.turn(stack, model="large")
    assert headers["x-baton-kv"] == "applied"
    return talk
