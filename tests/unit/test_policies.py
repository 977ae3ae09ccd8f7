"""Policies: pure decisions, and YAML that says what is wrong with it."""

from pathlib import Path

import pytest
from pydantic import ValidationError

import policies
from policies import Decision, Economics, PolicyError, SessionView, Turn
from policies.check import check

PRESETS = Path(policies.__file__).parent / "presets"


def decide(policy, number):
    turn = Turn(number=number, messages=1, prompt_chars=10)
    return policy.decide(turn, SessionView(), Economics())


def test_turns():
    policy = policies.from_dict({"kind": "turns", "escalate_at": 3, "downgrade_at": 5})
    decisions = [decide(policy, number) for number in range(1, 7)]
    assert [d.tier for d in decisions] == ["small", "small", "large", "large", "small", "small"]
    assert [d.reason for d in decisions[1:5:1]] == [
        "turns_initial", "turns_escalated", "turns_escalated", "turns_downgraded",
    ]  # fmt: skip


def test_turns_without_a_way_back():
    policy = policies.from_dict({"kind": "turns", "escalate_at": 2})
    assert {decide(policy, number).tier for number in range(2, 50)} == {"large"}


def test_pinned():
    assert decide(policies.from_dict({"kind": "pinned", "tier": "large"}), 1).tier == "large"


@pytest.mark.parametrize("preset", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_are_short_and_do_what_their_probes_say(preset):
    policy = policies.from_file(preset)
    assert decide(policy, 1).tier in ("small", "large")
    assert len(preset.read_text().splitlines()) < 40
    assert [one.differences for one in check(policy) if one.differences] == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"kind": "nosuch"}, ["kind", "nosuch", "pinned", "turns"]),
        ({}, ["kind"]),
        ([], ["mapping", "list"]),
        ({"kind": ["turns"]}, ["kind"]),
        ({"kind": "turns", "escalate": 3}, ["escalate", "unknown key", "escalate_at"]),
        ({"kind": "turns", "escalate_at": 0}, ["escalate_at"]),
        ({"kind": "turns", "escalate_at": 5, "downgrade_at": 4}, ["downgrade_at"]),
        ({"kind": "pinned", "tier": "medium"}, ["tier", "small", "large"]),
        ({"kind": "pinned", "kv": "maybe"}, ["kv", "map", "native", "hybrid"]),
        ({"kind": "pinned", 5: "x"}, []),
    ],
)
def test_bad_policies_say_what_is_wrong(data, words):
    with pytest.raises(PolicyError) as error:
        policies.from_dict(data, where="here.yaml")
    assert all(word in str(error.value) for word in ["here.yaml", *words])


def test_a_bad_file_is_named(tmp_path):
    path = tmp_path / "policy.yaml"
    for content in (b"kind: [", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(PolicyError, match=r"policy\.yaml"):
            policies.from_file(path)
    with pytest.raises(PolicyError, match=r"missing\.yaml"):
        policies.from_file(tmp_path / "missing.yaml")


def test_reasons_are_words():
    with pytest.raises(ValidationError):
        Decision(tier="small", stage="x", reason="free text, of any length")


def test_what_a_policy_sees_cannot_be_changed():
    turn = Turn(number=1, messages=1, prompt_chars=1, text="secret")
    with pytest.raises(ValidationError):
        turn.number = 2
    assert "secret" not in repr(turn)
