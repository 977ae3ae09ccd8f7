"""Keys, and two tenants that try to see each other."""

import threading
import time
from datetime import UTC, datetime, timedelta

import httpx
import openai
import pytest

from router.auth import keys
from tests.fakes.faults import Fault
from tests.stack import Stack, Talk, eventually, user

BODY = {"model": "auto", "messages": [user()]}


def secret_of(key: str) -> str:
    """The part of `bt-ID-SECRET` that nobody may read; it may hold dashes of its own."""
    return key.split("-", 2)[2]


class Tenants:
    def __init__(self, folder, **limits):
        self.path = folder / "keys.yaml"
        self.a = keys.create(self.path, "tenant-a")
        self.b = keys.create(self.path, "tenant-b")
        admin = folder / "admin.key"
        admin.write_text("the-admin-key")
        auth = {"keys_file": str(self.path), "admin_key_file": str(admin)}
        self.stack = Stack(
            auth=auth, limits=limits, policies={"premium": {"kind": "pinned", "tier": "large"}}
        )

    def post(self, key, body=BODY, headers=None):
        return self.stack.post(body, {"authorization": f"Bearer {key}", **(headers or {})})


@pytest.fixture
def tenants(tmp_path):
    tenants = Tenants(tmp_path)
    yield tenants
    tenants.stack.stop()


@pytest.mark.parametrize("key", ["", "x", "bt-0-x", "bt-000000000000-" + "A" * 43])
def test_wrong_keys(tenants, key):
    with pytest.raises(openai.AuthenticationError) as error:
        tenants.stack.client(key or "none").chat.completions.create(**BODY)
    assert error.value.code == "invalid_api_key"
    assert not tenants.stack.small[0].seen


def test_a_right_id_with_a_wrong_secret(tenants):
    assert tenants.post(tenants.a[:-1] + ("A" if tenants.a[-1] != "A" else "B")).status_code == 401


def test_no_key_at_all(tenants):
    assert tenants.stack.post(BODY).status_code == 401
    assert httpx.get(f"{tenants.stack.url}/v1/models").status_code == 401
    assert httpx.get(f"{tenants.stack.url}/v1/nosuch").status_code == 401
    for path in ("/health", "/ready", "/metrics"):
        assert httpx.get(f"{tenants.stack.url}{path}").status_code == 200


def test_preflight_needs_no_key(tenants):
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    answer = httpx.options(f"{tenants.stack.url}/v1/chat/completions", headers=headers)
    assert answer.status_code == 200


def test_keys_are_hashed_and_private(tenants):
    text = tenants.path.read_text()
    for key in (tenants.a, tenants.b):
        assert len(secret_of(key)) == 43
        assert secret_of(key) not in text
    assert tenants.path.stat().st_mode & 0o077 == 0


def test_rotation_without_restart(tenants):
    assert tenants.post(tenants.a).status_code == 200
    fresh = keys.create(tenants.path, "tenant-a")
    key_id = tenants.a.split("-")[1]
    assert keys.revoke(tenants.path, key_id)
    assert not keys.revoke(tenants.path, key_id)
    eventually(lambda: tenants.post(tenants.a).status_code == 401)
    assert tenants.post(fresh).status_code == 200
    assert tenants.post(tenants.b).status_code == 200


def test_a_broken_key_file_leaves_the_last_good_keys(tenants):
    tenants.path.write_text("keys: [{tenant: broken")
    time.sleep(1.1)
    assert tenants.post(tenants.a).status_code == 200


def test_expiry(tenants):
    now = datetime.now(UTC)
    soon = keys.create(tenants.path, "tenant-a", expires=now + timedelta(seconds=2.5))
    past = keys.create(tenants.path, "tenant-a", expires=now - timedelta(seconds=1))
    eventually(lambda: tenants.post(soon).status_code == 200)
    assert tenants.post(past).status_code == 401
    eventually(lambda: tenants.post(soon).status_code == 401)


def test_allowed_models_and_policies(tenants):
    narrow = keys.create(tenants.path, "tenant-c", models=["auto", "small"], policies=[])
    eventually(lambda: tenants.post(narrow).status_code == 200)
    assert tenants.post(narrow, {**BODY, "model": "large"}).status_code == 403
    assert tenants.post(narrow, headers={"x-baton-tier": "large"}).status_code == 403
    assert tenants.post(narrow, headers={"x-baton-policy": "premium"}).status_code == 403
    listed = httpx.get(
        f"{tenants.stack.url}/v1/models", headers={"authorization": f"Bearer {narrow}"}
    ).json()
    assert [model["id"] for model in listed["data"]] == ["auto", "small"]
    wide = tenants.post(tenants.a, headers={"x-baton-policy": "premium"})
    assert wide.headers["x-baton-tier"] == "large"
    assert tenants.post(tenants.a, headers={"x-baton-policy": "nosuch"}).status_code == 400


def test_the_admin_key_is_another_key(tenants):
    session = tenants.post(tenants.a, headers={"x-session-id": "s"}).headers["x-baton-session"]
    url = f"{tenants.stack.url}/admin/sessions/{session}?tenant=tenant-a"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"authorization": f"Bearer {tenants.a}"}).status_code == 401
    admin = {"authorization": "Bearer the-admin-key"}
    assert httpx.get(url, headers=admin).json()["turns"] == 1
    other = url.replace("tenant-a", "tenant-b")
    assert httpx.get(other, headers=admin).status_code == 404
    assert httpx.delete(other, headers=admin).status_code == 404
    assert httpx.post(other.replace("?", "/reanchor?"), headers=admin).status_code == 404
    listed = f"{tenants.stack.url}/admin/sessions"
    assert [
        len(httpx.get(listed, params={"tenant": name}, headers=admin).json()["sessions"])
        for name in ("tenant-a", "tenant-b", "default")
    ] == [1, 0, 0]
    assert tenants.post("the-admin-key").status_code == 401
    assert httpx.delete(url, headers=admin).status_code == 204
    assert httpx.get(url, headers=admin).status_code == 404


def test_no_admin_api_without_an_admin_key(tmp_path):
    stack = Stack()
    try:
        assert httpx.get(f"{stack.url}/admin/sessions/s").status_code == 403
    finally:
        stack.stop()


# One tenant tries to see the other


def test_the_same_session_id_is_another_session(tenants):
    for _ in range(3):
        tenants.post(tenants.a, {**BODY, "model": "small"}, {"x-session-id": "shared"})
    answer = tenants.post(tenants.b, {**BODY, "model": "large"}, {"x-session-id": "shared"})
    # For B it is a first turn: there is nothing to carry over, and no transfer is asked for.
    assert answer.headers["x-baton-kv"] == "none"
    assert not tenants.stack.mapper.seen


def test_the_same_conversation_is_another_session(tenants):
    a, b = Talk(model="small"), Talk(model="small")
    first = a.turn(tenants.stack, key=tenants.a)
    b.messages = list(a.messages)
    second = b.turn(tenants.stack, key=tenants.b)
    assert second["x-baton-session"] != first["x-baton-session"]
    assert second["x-baton-kv"] == "none"


def test_no_cache_is_shared(tenants):
    text = {"model": "small", "messages": [user("a long and secret text " * 20)]}
    for key in (tenants.a, tenants.a, tenants.b):
        answer = tenants.post(key, {**text, "cache_salt": "tenant-a", "extra_key": None})
        details = answer.json()["usage"]["prompt_tokens_details"]
        cached = (details or {}).get("cached_tokens", 0)
    assert cached == 0
    salts = [seen.body["cache_salt"] for seen in tenants.stack.small[0].seen]
    assert salts == ["tenant-a", "tenant-a", "tenant-b"]


def test_metrics_and_logs_hold_no_secrets(tmp_path, capsys):
    tenants = Tenants(tmp_path)
    secret = "my-secret-prompt-words"
    body = {"model": "auto", "messages": [user(secret)], "user": "secret-user"}
    tenants.post(tenants.a, body, {"x-session-id": "session-of-a"})
    tenants.post(tenants.a, {**body, "temperature": secret})
    tenants.post(tenants.a, {**body, "messages": [{"role": secret, "content": secret}]})
    tenants.stack.small[0].faults.append(Fault("die"))
    tenants.post(tenants.a, {**body, "stream": True})
    metrics = httpx.get(f"{tenants.stack.url}/metrics").text
    for name in ("tenant-a", "tenant-b", "session-of-a", secret):
        assert name not in metrics
    tenants.stack.stop()
    log = "".join(capsys.readouterr())
    assert "request" in log
    for name in (secret, "secret-user", tenants.a, secret_of(tenants.a), "the-admin-key"):
        assert name not in log


def test_errors_for_one_tenant_do_not_speak_of_the_other(tenants):
    tenants.post(tenants.a, headers={"x-session-id": "session-of-a"})
    for body in ({}, {**BODY, "model": "nosuch"}, {**BODY, "temperature": 99}):
        text = tenants.post(tenants.b, body).text
        assert "tenant-a" not in text
        assert "session-of-a" not in text


def test_one_tenant_cannot_keep_the_other_out(tmp_path):
    tenants = Tenants(tmp_path, concurrency_per_tier=2, queue_per_tier=8)
    stack = tenants.stack
    try:
        stack.small[0].seconds_per_word = 0.05
        results = {"a": [], "b": []}

        def send(name, key):
            body = {**BODY, "model": "small"}
            started = time.monotonic()
            results[name].append((tenants.post(key, body).status_code, time.monotonic() - started))

        threads = [threading.Thread(target=send, args=("a", tenants.a)) for _ in range(9)]
        for thread in threads:
            thread.start()
        eventually(lambda: stack.gateway.gates["small"].queued >= 6)
        other = threading.Thread(target=send, args=("b", tenants.b))
        other.start()
        for thread in [*threads, other]:
            thread.join(60)
        assert results["b"][0][0] == 200
        # B came last and did not wait for all of A.
        assert results["b"][0][1] < max(seconds for _, seconds in results["a"])
    finally:
        stack.stop()
