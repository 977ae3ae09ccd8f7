"""One real stack for all end-to-end tests: redis-server, two SGLang workers, mapper, gateway."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.demo import POLICIES, POLICY
from deploy.local import LocalConfig, LocalStack
from mapper import calibrate
from mapper.demo import model_name
from mapper.demo.artifacts import KV_DTYPE, PAGE_SIZE, demo_artifacts
from mapper.demo.models import demo_models
from tests.e2e.talk import ADMIN_KEY

UNSURE = {
    "kind": "adaptive",
    "threshold": 1.0,
    "cascade": {"mode": "early", "tokens": 4, "below": {"low_logprob": 0.0}, "quantile": 0.0},
}


@pytest.fixture(scope="session")
def real_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("stack")
    models = demo_models()
    identity = folder / "identity"
    calibrate.run(
        models["large"], models["large"], [], identity,
        method="identity", page_size=PAGE_SIZE, kv_dtype=KV_DTYPE,
    )  # fmt: skip
    admin_key = folder / "admin.key"
    admin_key.write_text(ADMIN_KEY)
    config = LocalConfig(
        folder=folder,
        models=models,
        artifacts=[*demo_artifacts().values(), identity],
        policy=POLICY,
        base_port=_free_ports(5),
        gateway={
            # Whatever the small model says, it is not sure enough.
            "policies": {**POLICIES, "unsure": UNSURE, "audited": POLICY},
            # Audits change what the next turn runs on: only where a test asks for them.
            "drift": {
                "audit_rate": 0.0,
                "audit_rates": {"audited": 1.0},
                "audit_above_tokens": None,
                "audit_wait_seconds": 60,
                "audit_share": 1.0,
                "budget_nats": 100,
            },
            "auth": {"admin_key_file": str(admin_key)},
            # The machine that runs tests is shared: a transfer may be slow, not late.
            "transfers": {"deadline_ms": 60_000},
            "timeouts": {"tokenize_seconds": 30, "drain_seconds": 5},
        },
    )
    with LocalStack(config) as stack:
        yield stack


@pytest.fixture(scope="session")
def names() -> dict[str, str]:
    return {tier: model_name(tier) for tier in ("small", "large")}


@pytest.fixture(scope="session")
def document() -> str:
    return (Path(__file__).parents[2] / "deploy" / "demo_document.txt").read_text()


def _free_ports(count: int) -> int:
    """The first of `count` consecutive ports that are free now."""
    for base in range(21000, 30000, count):
        sockets = []
        try:
            for port in range(base, base + count):
                sockets.append(socket.create_server(("127.0.0.1", port)))
            return base
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise RuntimeError("no free ports on loopback")
