"""The demo's small model: the low-rank update, building, pruning, and its card."""

from __future__ import annotations

import json

import pytest
import torch

from mapper.demo import card, evaluate, models, prune, update
from tests.tiny_demo import IDS, REMOVED, model_from, tiny, weights_of


def test_merged_update_equals_running_it_beside_the_weights(trained, tmp_path):
    teacher, student = trained
    path = tmp_path / "update.safetensors"
    update.save_update(student.parameters(), REMOVED, path)
    stored = update.load_update(update.Recipe(REMOVED, models.file_sha256(path)), path)
    for name, value in student.parameters().items():
        value.data.copy_(stored[name])  # both sides with what the file kept
    kept = update.Recipe(REMOVED, None).kept(6)
    merged = model_from(update.merge(update.pruned_weights(weights_of(teacher), kept), stored), 4)
    lesson = student.teach(IDS)
    with torch.no_grad():
        expected, _ = student.follow(lesson.parting)
        found = merged.model(IDS).last_hidden_state
        plain = (
            model_from(update.pruned_weights(weights_of(teacher), kept), 4)
            .model(IDS)
            .last_hidden_state
        )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (plain - expected).abs().max() > 0.1


def test_stored_update_is_within_half_a_step_of_the_trained_one(trained, tmp_path):
    path = tmp_path / "update.safetensors"
    parameters = trained[1].parameters()
    parameters["model.layers.1.mlp.up_proj.up"].data[0] = 0  # a row of zeros has a scale too
    update.save_update(parameters, REMOVED, path)
    stored = update.load_update(update.Recipe(REMOVED, models.file_sha256(path)), path)
    assert set(stored) == set(parameters)
    for name, value in parameters.items():
        if name.endswith(update.LOW_RANK):
            step = value.detach().abs().amax(1, keepdim=True) / 127
            assert ((stored[name] - value).abs() <= 0.51 * step + 1e-3 * value.abs() + 1e-4).all()
        else:
            assert torch.equal(stored[name], value.detach().bfloat16().float())


def test_update_of_other_bytes_or_other_layers_is_refused(trained, tmp_path):
    path = tmp_path / "update.safetensors"
    update.save_update(trained[1].parameters(), REMOVED, path)
    with pytest.raises(update.UpdateRefused, match="SHA-256"):
        update.load_update(update.Recipe(REMOVED, "0" * 64), path)
    with pytest.raises(update.UpdateRefused, match="trained without layers"):
        update.load_update(update.Recipe((1, 4), models.file_sha256(path)), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.0.mlp.up_proj.down": torch.zeros(3, 32)}, "matching half"),
        (
            {
                "model.layers.0.mlp.up_proj.down": torch.zeros(3, 8),
                "model.layers.0.mlp.up_proj.up": torch.zeros(48, 3),
            },
            "shape",
        ),
        ({"model.layers.9.input_layernorm.weight": torch.zeros(32)}, "nothing"),
    ],
)
def test_update_of_the_wrong_shape_is_refused(change, message):
    with pytest.raises(update.UpdateRefused, match=message):
        update.merge(weights_of(tiny()), change)


def test_content_key_changes_with_every_input_and_their_borders():
    keys = {
        models.content_key(*inputs)
        for inputs in (("a", "b"), ("a", "c"), ("ab", ""), ("a",), ("", "ab"))
    }
    assert len(keys) == 5
    assert models.content_key("a", "b") in keys


def test_damaged_model_folder_is_built_again_and_a_whole_one_reused(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    built = []

    def write(folder):
        built.append(folder)
        (folder / "config.json").write_text("{}")

    folder = models._cached(models.cache_folder() / "large-x", write)
    assert models._cached(models.cache_folder() / "large-x", write) == folder and len(built) == 1
    (folder / "config.json").write_text("{ }")
    models._cached(models.cache_folder() / "large-x", write)
    assert len(built) == 2 and (folder / "config.json").read_text() == "{}"
    (folder / models.MANIFEST).unlink()
    models._cached(models.cache_folder() / "large-x", write)
    assert len(built) == 3
    assert sorted(path.name for path in folder.parent.iterdir()) == ["large-x", "large-x.lock"]


def test_failed_build_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))

    def fail(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        models._cached(models.cache_folder() / "large-y", fail)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["large-y.lock"]


def test_committed_recipe_update_and_prune_report_agree():
    recipe = update.Recipe.read()
    report = json.loads(prune.REPORT_FILE.read_text())
    assert recipe.layers_removed == tuple(sorted(step["layer"] for step in report["order"]))
    assert len(recipe.kept(30)) / 30 <= 0.70
    stored = update.load_update(recipe)
    layers = {int(name.split(".")[2]) for name in stored if name.startswith("model.layers.")}
    assert max(layers) == len(recipe.kept(30)) - 1
    assert update.UPDATE_FILE.stat().st_size <= 12_000_000


def test_greedy_pruning_takes_the_layer_whose_absence_costs_least():
    model = tiny()
    for name in ("self_attn.o_proj", "mlp.down_proj"):  # a layer that adds nothing costs nothing
        model.model.layers[3].get_submodule(name).weight.data.zero_()
    base, steps = prune.greedy(model, IDS, 2, pool=4)
    assert len(steps[0]["losses"]) == 6 and len(steps[1]["losses"]) == 3
    assert set(steps[1]["losses"]) < set(sorted(steps[0]["losses"], key=steps[0]["losses"].get)[:4])
    assert steps[0]["losses"][3] == pytest.approx(base, abs=1e-5)
    removed = [step["layer"] for step in steps]
    for done, step in enumerate(steps):
        for layer, loss in step["losses"].items():
            kept = [other for other in range(6) if other not in (*removed[:done], layer)]
            pruned = model_from(update.pruned_weights(weights_of(model), kept), len(kept))
            with torch.no_grad():
                assert loss == pytest.approx(pruned(IDS, labels=IDS).loss.item(), abs=1e-4)
        assert step["losses"][step["layer"]] == min(step["losses"].values())


def test_log_likelihoods_are_those_of_each_text_alone():
    model = tiny()
    examples = [
        evaluate.Scored([5, 6, 7, 8, 9], [False, False, True, True, True]),
        evaluate.Scored([1, 2, 3], [True, True, True]),
    ]
    found = evaluate.log_likelihoods(model, examples, "test")
    for example, value in zip(examples, found, strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([example.ids])).logits[0].log_softmax(-1)
        expected = sum(
            scores[place - 1, token].item()
            for place, token in enumerate(example.ids)
            if place and example.counts[place]
        )
        assert value == pytest.approx(expected, abs=1e-4)


def test_committed_card_is_of_the_committed_update_and_names_what_was_missed():
    found = json.loads(card.CARD_JSON.read_text())
    recipe = update.Recipe.read()
    assert found["update"]["sha256"] == recipe.update_sha256
    assert found["layers_removed"] == list(recipe.layers_removed)
    page = card.CARD_MARKDOWN.read_text()
    assert page == card.markdown(found)
    missed = (
        (found["dialogue_ppl_ratio"] > card.DIALOGUE_LIMIT)
        + (found["prose_ppl_ratio"] > card.PROSE_LIMIT)
        + (found["flops_share"] > card.FLOPS_LIMIT)
        + (found["judged_good"] < card.JUDGED_LIMIT)
    )
    assert page.count("**missed**") == missed
