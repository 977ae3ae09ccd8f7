"""Policy files: errors with file, line, key and choices; parts in other files; rollouts; probes."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

import policies
from policies import Economics, PolicyError, SessionView, Turn
from policies.check import check
from policies.logistic import Calibrated
from policies.rollout import share

TURN = Turn(number=1, messages=1, prompt_chars=2, text="hi")


def write(path, text):
    path.write_text(text)
    return path


def decide(policy, turn=TURN, session=None):
    return policy.decide(turn, session or SessionView(), Economics())


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("kind: adaptive\nthreshold: 0\nkv:\n  by_task:\n    math: maybe\n", 5,
         ["kv.by_task.math", "'map'", "'native'", "'hybrid'"]),
        ("kind: adaptive\nthreshold: 0\nrules:\n  tols: large\n", 4,
         ["rules.tols", "unknown key", "tools", "schema", "pin_tool_loops"]),
        ("kind: adaptive\nswitching: {value: 1}\nthreshold: 7\n", 3, ["threshold", "less than"]),
        ("kind: adaptive\n\nthresh: 1\n", 3, ["thresh", "unknown key", "threshold", "cascade"]),
        ("# a\nkind: adaptiv\n", 2, ["adaptiv", "adaptive", "pinned", "rollout", "turns"]),
        ("kind: adaptive\nthreshold: 0\ncascade: {mode: early, self_check: true, below: {margin: 1}}\n",
         3, ["cascade", "self_check", "buffer"]),
        ("kind: adaptive\nthreshold: 0\ncascade:\n  below: {marign: 1}\n", 4,
         ["marign", "margin", "low_logprob"]),
        ("kind: adaptive\n", 1, ["threshold", "switching"]),
        ("kind: pinned\nprobes:\n  - {text: a}\n  - {text: b, teir: large}\n", 4,
         ["probes.1.teir", "tier"]),
        ("kind: rollout\nmode: canary\ncurrent: {kind: pinned}\ncandidate: {kind: pinned}\n", 1,
         ["percent"]),
        ("kind: rollout\nmode: ab\ncurrent: {kind: pinned}\ncandidate:\n  kind: pinned\n  teir: small\n",
         4, ["candidate", "teir", "unknown key", "fail_open"]),
    ],
)  # fmt: skip
def test_errors_name_line_key_and_choices(tmp_path, text, line, words):
    path = write(tmp_path / "p.yaml", text)
    with pytest.raises(PolicyError) as error:
        policies.from_file(path)
    lines = str(error.value).splitlines()
    assert any(
        one.startswith(f"{path}:{line}: ") and all(word in one for word in words) for one in lines
    )


def test_every_fault_is_reported(tmp_path):
    path = write(tmp_path / "p.yaml", "kind: turns\nescalate_at: 0\nfoo: 1\n")
    with pytest.raises(PolicyError) as error:
        policies.from_file(path)
    assert [line.split(":")[1] for line in str(error.value).splitlines()] == ["2", "3"]


CLASSIFIER = {"bias": -1.0, "weights": {"chars": 1.0}, "points": [[0.1, 0.2], [0.9, 0.8]]}


def test_files_are_found_beside_the_policy(tmp_path):
    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts/model.json", json.dumps(CLASSIFIER))
    part = write(
        tmp_path / "parts/new.yaml",
        "kind: adaptive\nthreshold: 0\nclassifier: {model: model.json}\n",
    )
    path = write(
        tmp_path / "p.yaml",
        "kind: rollout\nmode: shadow\ncurrent: {kind: pinned}\ncandidate: parts/new.yaml\n",
    )
    first = policies.from_file(path)
    assert policies.watched_files(path) == {path, part, tmp_path / "parts/model.json"}
    write(tmp_path / "parts/model.json", json.dumps({**CLASSIFIER, "bias": -2.0}))
    assert policies.from_file(path).version != first.version
    write(tmp_path / "parts/model.json", json.dumps(CLASSIFIER))
    assert policies.from_file(path).version == first.version
    write(tmp_path / "parts/model.json", "{")
    with pytest.raises(PolicyError, match=r"p\.yaml:4: candidate: .*new\.yaml:3: .*model\.json"):
        policies.from_file(path)
    assert tmp_path / "parts/model.json" in policies.watched_files(path)


def test_a_rollout_cannot_hold_itself(tmp_path):
    path = write(
        tmp_path / "p.yaml", "kind: rollout\nmode: shadow\ncurrent: p.yaml\ncandidate: p.yaml\n"
    )
    with pytest.raises(PolicyError, match="part of a rollout"):
        policies.from_file(path)


def test_the_version_is_of_the_content(tmp_path):
    a = write(tmp_path / "a.yaml", "kind: turns\nescalate_at: 4\n")
    b = write(tmp_path / "b.yaml", "# other words, same policy\nescalate_at: 4\nkind: turns\n")
    c = write(tmp_path / "c.yaml", "kind: turns\nescalate_at: 5\n")
    versions = [policies.from_file(path).version for path in (a, b, c)]
    assert versions[0] == versions[1] != versions[2] and len(versions[0]) == 12


def rollout(**fields):
    parts = {"current": {"kind": "pinned"}, "candidate": {"kind": "pinned", "tier": "large"}}
    return policies.from_dict({"kind": "rollout", **parts, **fields})


def test_shadow_decides_but_does_not_route():
    decision = decide(rollout(mode="shadow"))
    assert (decision.tier, decision.arm, decision.shadow.tier) == ("small", "current", "large")


def test_canary_keeps_a_session_on_its_side():
    policy = rollout(mode="canary", percent=20)
    arms = {}
    for number in range(2000):
        decision = decide(policy, session=SessionView(id=f"s{number}"))
        assert decision.tier == {"candidate": "large", "current": "small"}[decision.arm]
        assert decision.shadow is None
        arms[number] = decision.arm
    assert 0.17 < list(arms.values()).count("candidate") / 2000 < 0.23
    for number in range(0, 2000, 97):
        again = decide(policy, TURN.model_copy(update={"number": 7}), SessionView(id=f"s{number}"))
        assert again.arm == arms[number]
    assert share("s1") == share("s1") != share("s2")


def test_ab_goes_by_tenant():
    policy = rollout(mode="ab", tenants=["b"])
    tiers = [decide(policy, TURN.model_copy(update={"tenant": t})).tier for t in ("a", "b")]
    assert tiers == ["small", "large"]


def test_probes_are_regression_tests():
    policy = policies.from_dict(
        {
            "kind": "turns",
            "escalate_at": 2,
            "probes": [
                {"text": "hi", "tier": "small", "reason": "turns_initial"},
                {"text": "hi", "tier": "large", "turn": {"number": 2}, "session": {"turns": 1}},
                {"text": "hi", "tier": "large", "kv": "native"},
            ],
        }
    )
    assert [one.differences for one in check(policy)] == [
        [],
        [],
        ["tier is small, expected large", "kv is map, expected native"],
    ]


def test_a_probe_that_makes_no_sense_is_named():
    for fields in ({"turn": {"nr": 1}}, {"session": {"tier": "medium"}}):
        with pytest.raises(PolicyError, match=r"probes\.0.*(nr|tier)"):
            policies.from_dict({"kind": "pinned", "probes": [{"text": "", **fields}]})


def test_schema_takes_what_loads():
    schema = policies.json_schema()
    good = yaml.safe_load("kind: adaptive\nthreshold: 0.1\nclassifier: {model: a.json}\n")
    jsonschema.validate(good, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**good, "kv": {"default": "maybe"}}, schema)


def test_calibration_curve():
    model = Calibrated(weights={"x": 1.0}, points=((0.2, 0.1), (0.5, 0.4), (0.8, 0.9)))
    assert model.probability({"x": 0.0}) == pytest.approx(0.4)
    assert model.probability({"x": 99.0}) == 0.9
    assert model.probability({"x": -999.0}) == 0.1
    assert 0.4 < model.probability({"x": 0.5}) < 0.9
    assert Calibrated(weights={"x": 1.0}).probability({"x": 0.0, "unknown": 5.0}) == 0.5
    for points in ([[0.5, 0.5], [0.4, 0.6]], [[0.1, 0.5], [0.2, 0.4]], [[0.1, 1.5]]):
        with pytest.raises(ValueError):
            Calibrated(weights={}, points=points)
