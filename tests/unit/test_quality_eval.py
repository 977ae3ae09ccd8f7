"""`baton eval` from folders to report, plots and quality card on a tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from mapper import calibrate
from mapper.artifact import Artifact, read_manifest
from mapper.cli import app
from mapper.errors import BadTask, CalibrationError, UnsupportedModel
from mapper.quality import evaluate
from mapper.quality.card import FEWEST_ITEMS
from mapper.quality.conversations import read_conversations
from mapper.quality.evaluation import _named
from router.transfer.pairs import by_class
from tests.tiny_pair import say, write_dialogues, write_model, write_prose

ROWS = 120


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    for name, layers, seed in (("small", 2, 0), ("large", 3, 1), ("sibling", 3, 2)):
        write_model(root / name, layers, seed)
    texts = [write_dialogues(root / "talks.jsonl"), write_prose(root / "prose.txt")]
    write_tasks(root / "tasks")
    for name, options in {
        "ridge": {"method": "all-head", "k": 2},
        "local": {"method": "head-local", "k": 1},
    }.items():
        options |= {"length": 128, "native_tail": 64}
        calibrate.run(root / "small", root / "large", texts, root / name, **options)
    large = root / "large"
    calibrate.run(large, large, [], root / "exact", method="identity", native_tail=64)
    return root


def write_tasks(folder: Path) -> None:
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)

    def words(count: int) -> str:
        return say(generator, count)

    turns = [{"question": words(3), "answer": words(1), "answers": [words(1)]} for _ in range(10)]
    tasks = {
        "arc_easy": lambda: {"question": words(12), "choices": [words(1), words(3)], "label": 1},
        "winogrande": lambda: {
            "sentence": f"{words(5)} _ {words(4)}",
            "option1": words(1),
            "option2": words(1),
            "label": 0,
        },
        "squad": lambda: {"context": words(40), "question": words(4), "answers": [words(1)]},
        "coqa": lambda: {"story": words(470), "turns": turns},
        "gsm8k": lambda: {"question": words(9), "answer": f"{words(8)} #### 5", "final": "5"},
        "lambada": lambda: {"text": f"{words(30)} w7", "target": "w7"},
    }
    for name, row in tasks.items():
        lines = [json.dumps(row()) for _ in range(12 if name == "coqa" else ROWS)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    text = "\n\n\n".join(words(1100) for _ in range(3))
    (folder / "text_heldout.txt").write_text(text)


@pytest.fixture(scope="module")
def report(pair) -> dict:
    return evaluate.run(
        pair / "small", pair / "large", [pair / "local"], pair / "talks.jsonl", pair / "report",
        data=pair / "tasks", baseline=pair / "ridge", conversations=8, items=8, minutes=0,
    )  # fmt: skip


def test_every_arm_is_measured_on_dialogues(report) -> None:
    dialogues = report["dialogues"]
    assert report["conversations"] == 8
    assert set(dialogues["local"]) == {"tail 1", "tail 16", "tail 32", "tail 64", "tail 128"}
    assert set(dialogues["ridge"]) == {"tail 1", "tail 64"}
    assert dialogues["floor: identity"]["tail 1"]["kl"] == pytest.approx(0, abs=1e-6)
    assert dialogues["floor: native splice"]["tail 1"]["kl"] == pytest.approx(0, abs=1e-4)
    assert 0 < dialogues["floor: bf16 round trip"]["tail 1"]["kl"] < 0.1
    # Random models cannot be mapped onto each other: all but the floors are far from native.
    for name in (
        "ridge",
        "control: raw",
        "control: zero",
        "control: wrong document",
        "control: random map",
        "published: position 0 mapped, absolute ridge",
        "source alone",
    ):
        assert dialogues[name]["tail 1"]["kl"] > 1, name
    assert "layers: " in report["left_out"]["selective layer reuse"]


def test_ratios_are_of_one_run(report) -> None:
    dialogues, ratios = report["dialogues"], report["ratios"]
    expected = dialogues["local"]["tail 1"]["kl"] / dialogues["ridge"]["tail 1"]["kl"]
    assert ratios["over ridge, no tail"]["local"]["value"] == pytest.approx(expected)
    low, high = ratios["over ridge, no tail"]["local"]["interval"]
    assert low <= expected <= high
    assert set(ratios["raw over mapped, no tail"]) == {"local", "ridge"}


def test_every_task_has_native_source_variants_and_controls(report) -> None:
    assert set(report["tasks"]) == {
        "arc_easy", "winogrande", "squad", "coqa", "gsm8k", "lambada", "perplexity",
    }  # fmt: skip
    for name, task in report["tasks"].items():
        arms = task["arms"]
        assert {"native", "source alone", "local", "ridge", "control: zero"} < set(arms), name
        assert arms["local"]["items"] == task["items"] >= 1
        assert task["shortest_prompt"] >= 512
        # Of a likelihood there is no same or other answer.
        same = None if name in ("perplexity", "lambada") else 1.0
        assert arms["native"].get("same_as_native") == same
        identity = arms["floor: identity"]
        if name == "perplexity":
            assert identity["retention"]["value"] == pytest.approx(1, abs=1e-4)
        else:
            assert identity.get("same_as_native") == same
    assert report["tasks"]["perplexity"]["arms"]["local"]["score"]["value"] < 0
    # The sixth turns come too early for a long prompt, and stand apart.
    assert report["tasks"]["coqa"]["short"]["items"] > 0


def test_classes_claim_what_policies_gate_on(pair, report) -> None:
    assert set(report["classes"]) == {"choice", "exact", "passage", "math", "cloze", "text"}
    # A random model solves no sums: its likelihood of the worked solutions is claimed instead.
    assert report["classes"]["math"]["basis"] == "likelihood of worked solutions"
    assert report["classes"]["choice"]["tasks"] == ["arc_easy", "winogrande"]
    claims = report["claims"]["local"]
    assert claims["choice"]["items"] == 16 >= FEWEST_ITEMS
    # Of sixteen questions a random model has fewer than ten right; there are eight dialogues.
    assert claims["choice"]["met"] is claims["chat"]["met"] is False
    kept = report["policy_retention"]["local"]
    assert 0 < kept["chat"] < 1
    # What a gateway reads of the card is what the run says of it.
    card = read_manifest(pair / "local").quality
    assert by_class(card) == {task: min(value, 1.0) for task, value in kept.items()}


def test_layers_are_plotted_with_the_rest(pair, report) -> None:
    layers = report["layers"]["ridge"]
    assert [len(layers[name]) for name in ("r2_k", "r2_v", "attention_cosine")] == [3, 3, 3]
    # The first layer's values are linear in the token's embedding, later ones are not.
    assert 1 >= layers["r2_v"][0] > max(layers["r2_v"][1:])
    written = {path.name for path in (pair / "report").iterdir()}
    assert written == {
        "report.json", "kl_by_tail.png", "kl_by_k.png", "layers.png", "retention_by_task.png",
    }  # fmt: skip
    assert json.loads((pair / "report" / "report.json").read_text()) == report


def test_manifests_get_their_own_part_as_card(pair, report) -> None:
    card = read_manifest(pair / "ridge").quality
    assert card["conversations"] == 8 and card["retention"] == report["policy_retention"]["ridge"]
    assert "local" not in card["dialogues"] and "control: zero" in card["dialogues"]
    assert set(card["tasks"]["squad"]["arms"]) >= {"native", "ridge", "source alone"}
    assert Artifact.load(pair / "local").manifest.quality["claims"] == report["claims"]["local"]


def test_a_later_run_of_one_task_keeps_what_is_known_of_the_others(pair, report) -> None:
    first = read_manifest(pair / "local").quality
    again = evaluate.run(
        pair / "small", pair / "large", [pair / "local"], pair / "talks.jsonl", pair / "later",
        data=pair / "tasks", conversations=2, items=12, minutes=0, tasks=("arc_easy",),
    )  # fmt: skip
    then = read_manifest(pair / "local").quality
    assert then["claims"]["choice"] == first["claims"]["choice"]
    assert then["retention"] == first["retention"] and then["conversations"] == 8
    assert set(then["tasks"]) == set(first["tasks"])
    # At another native tail than the map's own there is nothing to say of it.
    evaluate.run(
        pair / "small", pair / "large", [pair / "local"], pair / "talks.jsonl", pair / "later",
        conversations=2, tail=32,
    )  # fmt: skip
    assert read_manifest(pair / "local").quality == then
    assert again["settings"]["tail"] == 64


def test_an_exact_map_keeps_every_answer(pair) -> None:
    """Identity through the whole path: the target's answers, whatever they are."""
    large = pair / "large"
    found = evaluate.run(
        large, large, [pair / "exact"], pair / "talks.jsonl", pair / "exact-report",
        data=pair / "tasks", conversations=2, items=6, minutes=0, tasks=("arc_easy", "squad"),
    )  # fmt: skip
    for task in found["tasks"].values():
        arms = task["arms"]
        assert arms["exact"]["score"] == arms["native"]["score"] == arms["source alone"]["score"]
        assert arms["exact"]["same_as_native"] == 1.0
    assert found["dialogues"]["exact"]["tail 64"]["kl"] == pytest.approx(0, abs=1e-6)
    assert found["dialogues"]["source alone"]["tail 1"]["kl"] == pytest.approx(0, abs=1e-6)
    for figures in found["layers"]["exact"].values():
        assert figures == pytest.approx([1.0] * 3, abs=1e-5)
    assert "control: random map" not in found["dialogues"]
    # The same weights: whatever is recomputed, reuse is exact.
    assert found["dialogues"]["selective layer reuse (1 of 3)"]["tail 1"]["kl"] < 1e-6


def test_the_time_limit_leaves_items_out(pair, monkeypatch) -> None:
    monkeypatch.setattr("mapper.quality.evaluation.stopwatch", lambda part, end: lambda: False)
    found = evaluate.run(
        pair / "small", pair / "large", [pair / "local"], pair / "talks.jsonl", pair / "brief",
        data=pair / "tasks", items=8, minutes=0, tasks=("arc_easy",),
    )  # fmt: skip
    assert found["conversations"] == 1 and found["tasks"]["arc_easy"]["items"] == 1


def test_bad_input_is_refused_before_anything_is_measured(pair, tmp_path) -> None:
    models = pair / "small", pair / "large"
    talks = pair / "talks.jsonl"
    bad = tmp_path / "tasks"
    bad.mkdir()
    (bad / "arc_easy.jsonl").write_text('{"question": 1}\n')
    with pytest.raises(BadTask, match=r"arc_easy\.jsonl:1: "):
        evaluate.run(*models, [pair / "local"], talks, tmp_path / "out", data=bad)
    with pytest.raises(BadTask, match="dtype"):
        evaluate.run(*models, [pair / "local"], talks, tmp_path / "out", dtype="float8")
    with pytest.raises(BadTask, match="harness"):
        evaluate.run(*models, [pair / "local"], talks, tmp_path / "out", harness_tasks=bad)
    with pytest.raises(BadTask, match="tail"):
        evaluate.run(*models, [pair / "local"], talks, tmp_path / "out", tail=0)
    with pytest.raises(UnsupportedModel, match="source"):
        evaluate.run(*reversed(models), [pair / "local"], talks, tmp_path / "out")
    broken = tmp_path / "talks.jsonl"
    broken.write_text('{"messages": []}\n')
    with pytest.raises(CalibrationError, match=r"talks\.jsonl:1: no dialogue"):
        evaluate.run(*models, [pair / "local"], broken, tmp_path / "out")
    lines = talks.read_text().splitlines()[:20]
    broken.write_text("\n".join(lines))
    with pytest.raises(CalibrationError, match=r"all 4 dialogues of the split 'heldout'.* 512"):
        evaluate.run(*models, [pair / "local"], broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folders_of_one_name_stay_apart(tmp_path) -> None:
    folders = [tmp_path / name for name in ("a/maps/map", "b/maps/map", "b/map", "c/base")]
    named = _named(folders[:3], folders[3])
    assert list(named) == ["a/maps/map", "b/maps/map", "b/map", "base"]
    assert list(named.values()) == folders


def test_dialogues_are_drawn_from_all_of_the_file(pair, tmp_path) -> None:
    """The order of a file says nothing: theirs has all short ones first."""
    tokenizer = AutoTokenizer.from_pretrained(pair / "large")
    rows = [
        {"messages": [{"role": "user", "content": f"w{size}"},
                      {"role": "assistant", "content": "w1 " * size}]}
        for size in range(1, 61)
    ]  # fmt: skip
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = {"split": "heldout", "shortest_prompt": 512}
    some, more = (
        read_conversations(tmp_path / "talks.jsonl", tokenizer, count=count, **read)
        for count in (12, 30)
    )
    sizes = [len(talk.ids) - talk.prompt for talk in some]
    assert min(sizes) < 20 and max(sizes) > 40 and min(talk.prompt for talk in more) >= 512
    assert all(torch.equal(one.ids, other.ids) for one, other in zip(some, more, strict=False))


def test_a_task_without_a_prompt_that_fits_is_said_to_be_left_out(pair, tmp_path) -> None:
    row = {"context": "w1 " * 1600, "question": "w2", "answers": ["w3"]}
    (tmp_path / "squad.jsonl").write_text("\n".join([json.dumps(row)] * 3))
    found = evaluate.run(
        pair / "small", pair / "large", [pair / "local"], pair / "talks.jsonl", tmp_path / "out",
        data=tmp_path, conversations=2,
    )  # fmt: skip
    assert not found["tasks"] and "1536 tokens; 2 are longer" in found["left_out"]["squad"]


def test_the_command_line(pair, tmp_path) -> None:
    arguments = [
        "eval", *(str(pair / name) for name in ("small", "large")), str(tmp_path / "out"),
        "--variant", str(pair / "local"), "--artifact", str(pair / "ridge"),
        "--dialogues", str(pair / "talks.jsonl"), "--conversations", "2",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "about" in result.output and "raw over mapped" in result.output
    wrong = CliRunner().invoke(app, [*arguments, "--data", str(pair / "tasks"), "--task", "arc"])
    assert wrong.exit_code == 1 and "there are arc_easy" in wrong.output.replace("\n", " ")
