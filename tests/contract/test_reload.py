"""Policy files that change while the gateway runs: taken up when good, named and left when bad."""

import json
import os

import httpx
import pytest

from router.routing import catalog
from tests.contract.routed import tier
from tests.stack import eventually

SMALL = "kind: pinned\ntier: small\n"
LARGE = "kind: pinned\ntier: large\n"


def ready(stack):
    return httpx.get(f"{stack.url}/ready")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize("bad", ["kind: [", "kind: nosuch", "kind: pinned\ntier: medium\n", None])
def test_a_bad_file_leaves_the_last_good_policy(make_stack, path, bad, capsys):
    stack = make_stack(policy=path)
    version = ready(stack).json()["policies"]["default"]["version"]
    if bad is None:
        path.unlink()
    else:
        path.write_text(bad)
    eventually(lambda: stack.metric("baton_policy_stale", policy="default") == 1)
    assert stack.metric("baton_policy_reloads_total", policy="default", outcome="refused") == 1
    assert tier(stack) == "small"
    answer = ready(stack)
    assert answer.status_code == 200
    assert answer.json()["policies"]["default"] == {"version": version, "stale": True}
    (line,) = [
        json.loads(text)
        for text in capsys.readouterr().err.splitlines()
        if "policy_refused" in text
    ]
    assert str(path) in line["error"] and line["running"] == version
    path.write_text(LARGE)
    eventually(lambda: stack.metric("baton_policy_stale", policy="default") == 0)
    assert tier(stack) == "large"
    assert ready(stack).json()["policies"]["default"]["stale"] is False


def test_files_are_looked_at_well_within_two_seconds():
    assert catalog.LOOK_MS + catalog.SETTLE_MS <= 1200


def test_a_file_that_is_replaced_by_another(make_stack, path, tmp_path):
    # As editors and Kubernetes do it: a new file takes the old one's place.
    stack = make_stack(policy=path)
    fresh = tmp_path / "fresh"
    fresh.write_text(LARGE)
    os.replace(fresh, path)
    eventually(lambda: tier(stack) == "large")


def test_a_part_in_another_folder(make_stack, path, tmp_path):
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "new.yaml").write_text(SMALL)
    path.write_text(
        "kind: rollout\nmode: canary\npercent: 100\ncurrent: {kind: pinned}\n"
        "candidate: parts/new.yaml\n"
    )
    stack = make_stack(policy=path)
    assert tier(stack) == "small"
    (parts / "new.yaml").write_text("kind: [")
    eventually(lambda: stack.metric("baton_policy_stale", policy="default") == 1)
    assert tier(stack) == "small"
    (parts / "new.yaml").write_text(LARGE)
    eventually(lambda: tier(stack) == "large")


def test_the_folder_goes_away_and_comes_back(make_stack, path, tmp_path):
    stack = make_stack(policies={"named": path})
    away = tmp_path.with_name("away")
    tmp_path.rename(away)
    eventually(lambda: stack.metric("baton_policy_stale", policy="named") == 1)
    away.rename(tmp_path)
    path.write_text(LARGE)
    eventually(lambda: stack.metric("baton_policy_stale", policy="named") == 0)
    assert tier(stack, **{"x-baton-policy": "named"}) == "large"
