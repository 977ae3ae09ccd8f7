"""Settings: one file and the environment, and errors that say what to mend."""

import pytest
import yaml

from router import settings
from router.settings import ConfigError

WORKER = {"name": "w", "tier": "small", "url": "http://127.0.0.1:1", "model": "m"}


@pytest.fixture
def load(tmp_path):
    def load(data):
        path = tmp_path / "baton.yaml"
        path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
        return settings.load(path)

    return load


def test_defaults_are_safe(load):
    loaded = load({"workers": [WORKER]})
    assert loaded.host == "127.0.0.1"
    assert settings.is_loopback(loaded.host)


def test_environment_goes_before_the_file(load, monkeypatch):
    monkeypatch.setenv("BATON_PORT", "9999")
    monkeypatch.setenv("BATON_LIMITS__BODY_BYTES", "5000")
    loaded = load({"workers": [WORKER], "port": 1, "limits": {"queue_per_tier": 7}})
    assert loaded.port == 9999
    assert (loaded.limits.body_bytes, loaded.limits.queue_per_tier) == (5000, 7)


def test_relative_paths_are_beside_the_file(load, tmp_path):
    (tmp_path / "p.yaml").write_text("kind: pinned\ntier: large\n")
    (tmp_path / "secret").write_text("s\n")
    worker = {**WORKER, "api_key_file": "secret"}
    decisions = {"log_file": "decisions.jsonl"}
    loaded = load({"workers": [worker], "policy": "p.yaml", "decisions": decisions})
    assert loaded.decisions.log_file == tmp_path / "decisions.jsonl"
    assert settings.load_policy(loaded.policy).tier == "large"
    assert settings.read_secret(loaded.workers[0].api_key_file) == "s"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("a: [", []),
        ("- 1", ["mapping", "list"]),
        ({}, ["workers"]),
        ({"workers": []}, ["workers"]),
        ({"workers": [{**WORKER, "tier": "medium"}]}, ["workers.0.tier", "small", "large"]),
        ({"workers": [{**WORKER, "url": "ftp://x"}]}, ["workers.0.url", "http"]),
        ({"workers": [{**WORKER, "device": "a b"}]}, ["workers.0.device"]),
        ({"workers": [{**WORKER, "extra": 1}]}, ["workers.0.extra", "api_key_file"]),
        ({"workers": [WORKER, WORKER]}, ["same name"]),
        ({"workers": [{**WORKER, "model": "auto"}]}, ["alias"]),
        ({"workers": [WORKER, {**WORKER, "name": "x", "tier": "large"}]}, ["both tiers"]),
        ({"workers": [WORKER, {**WORKER, "name": "x", "model": "n"}]}, ["more than one model"]),
        ({"workers": [WORKER], "host": "0.0.0.0"}, ["host", "keys_file"]),
        ({"workers": [WORKER], "redis_url": "http://x"}, ["redis_url", "memory://"]),
        ({"workers": [WORKER], "mapper_url": "x"}, ["mapper_url", "unix:///"]),
        ({"workers": [WORKER], "processes": 2}, ["redis_url"]),
        ({"workers": [WORKER], "limits": {"nosuch": 1}}, ["limits.nosuch", "body_bytes"]),
        (
            {"workers": [WORKER], "prices": {"small": {"prompt": 1, "completion": 1, "x": 1}}},
            ["prices.small.x", "cached"],
        ),
        ({"workers": [WORKER], "prices": {"large": {"prompt": 1}}}, ["prices.large.completion"]),
        ({"workers": [WORKER], "decisions": {"file": "x"}}, ["decisions.file", "log_file"]),
        ({"workers": [WORKER], "nosuch": 1}, ["nosuch", "redis_url"]),
        ({"workers": [WORKER], "policy": {"kind": "x"}}, ["kind", "pinned", "turns"]),
        ({"workers": [WORKER], "policy": "missing.yaml"}, ["missing.yaml"]),
        ({"workers": [WORKER], "auth": {"admin_key_file": "missing"}}, ["missing", "secret"]),
        ({"workers": [WORKER], "limits": {"requests_per_tenant": "x"}}, ["requests_per_tenant"]),
        ({"workers": [WORKER], "port": 99999}, ["port"]),
    ],
)
def test_bad_settings(load, data, words):
    with pytest.raises(ConfigError) as error:
        load(data)
    assert all(
        word in str(error.value) for word in ["baton.yaml" if "secret" not in words else "", *words]
    )


@pytest.mark.parametrize(
    ("url", "device", "computes_on"),
    [
        ("http://127.0.0.1:1", None, "localhost"),
        ("http://localhost:2", None, "localhost"),
        ("http://[::1]:3/", None, "localhost"),
        ("https://Worker-1.example:443", None, "worker-1.example"),
        ("http://worker-1.example:80", "node1/gpu0", "node1/gpu0"),
    ],
)
def test_a_worker_computes_on_its_host_unless_a_device_is_named(load, url, device, computes_on):
    (worker,) = load({"workers": [{**WORKER, "url": url, "device": device}]}).workers
    assert worker.computes_on == computes_on


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="nosuch"):
        settings.load(tmp_path / "nosuch.yaml")


def test_bad_environment_is_a_config_error(load, monkeypatch):
    monkeypatch.setenv("BATON_LIMITS", "{not json")
    with pytest.raises(ConfigError):
        load({"workers": [WORKER]})


def test_an_empty_secret_is_refused(load, tmp_path):
    (tmp_path / "secret").write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        load({"workers": [{**WORKER, "api_key_file": "secret"}]})


def test_the_schema_is_published():
    schema = settings.json_schema()
    assert "workers" in schema["required"]
    assert schema["properties"]["port"]["maximum"] == 65535
