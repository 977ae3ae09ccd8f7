"""The demo's model recipe, on tiny random models: pruning, the low-rank update, distillation, sampling, dialogues."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from mapper.demo import card, dialogues, evaluate, models, prompts, prune, texts, update
from mapper.demo.distill import Trainer, Training, row_threads, target_sharpness, train_step
from mapper.demo.sampling import GROUPED_ATTENTION
from mapper.demo.student import Student, stream_error
from mapper.methods.forward_kl import Candidates, forward_kl
from tests.tiny_pair import VOCABULARY, tiny_model

REMOVED = (2, 4)


def tiny(layers: int = 6) -> LlamaForCausalLM:
    return tiny_model(layers, seed=0, spread=0.2, tie_word_embeddings=True).eval()


def weights_of(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}


def model_from(weights: dict[str, torch.Tensor], layers: int) -> LlamaForCausalLM:
    model = tiny(layers)
    missing = model.load_state_dict(weights, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]) and not missing.unexpected_keys
    model.tie_weights()
    return model


@pytest.fixture
def trained() -> tuple[LlamaForCausalLM, Student]:
    """A student whose low-rank additions and norms are no longer at their start."""
    teacher = tiny()
    student = Student(teacher, update.Recipe(REMOVED, None).kept(6), rank=3, seed=0)
    generator = torch.Generator().manual_seed(1)
    for value in student.parameters().values():
        value.data += 0.1 * torch.randn(value.shape, generator=generator)
    return teacher, student


IDS = torch.arange(40).reshape(2, 20)


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


def test_forward_kl_and_its_gradient_match_the_plain_formula():
    torch.manual_seed(0)
    head, teacher = torch.randn(96, 32), torch.randn(150, 32)
    student = torch.randn(150, 32, requires_grad=True)
    counts = torch.ones(96, dtype=torch.long)
    chosen, log_weight = Candidates(counts, frequent=96, sampled=0, seed=0).draw(IDS)
    found = forward_kl(student, teacher, head[chosen], log_weight)
    (gradient,) = torch.autograd.grad(found, student)
    wanted, ours = (teacher @ head.T).log_softmax(-1), (student @ head.T).log_softmax(-1)
    expected = (wanted.exp() * (wanted - ours)).sum(-1).mean()
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(
        gradient, torch.autograd.grad(expected, student)[0], atol=1e-6, rtol=1e-3
    )


def test_sampled_candidates_stand_for_the_whole_vocabulary():
    counts = torch.zeros(1000, dtype=torch.long)
    counts[:100] = 5
    chosen, log_weight = Candidates(counts, frequent=100, sampled=50, seed=0).draw(
        torch.tensor([[998, 999]])
    )
    assert len(set(chosen.tolist())) == len(chosen) == 152
    assert {998, 999} <= set(chosen.tolist())
    assert log_weight.exp().sum().item() == pytest.approx(1000)


def test_training_lowers_the_divergence_and_a_resumed_run_ends_the_same(tmp_path):
    training = Training(steps=30, rank=4, warmup=2, learning_rate=1e-2)
    batch = torch.randint(0, VOCABULARY, (4, 20), generator=torch.Generator().manual_seed(3))

    def fresh() -> tuple[Student, Trainer, Candidates]:
        student = Student(tiny(), update.Recipe(REMOVED, None).kept(6), training.rank, seed=0)
        return (
            student,
            Trainer(student, training),
            Candidates(torch.ones(VOCABULARY, dtype=torch.long), VOCABULARY, 0, 0),
        )

    def advance(
        student: Student, trainer: Trainer, candidates: Candidates, steps: int
    ) -> list[float]:
        losses = []
        with row_threads(len(batch)) as threads:
            for _ in range(steps):
                even = torch.ones(batch.shape)
                losses.append(train_step(student, candidates, batch, even, threads, 0.5))
                trainer.update()
        return losses

    student, trainer, candidates = fresh()
    first = advance(student, trainer, candidates, 10)
    trainer.save(tmp_path / "checkpoint.safetensors")
    rest = advance(student, trainer, candidates, 10)
    assert rest[-1] < 0.7 * first[0]
    student, trainer, candidates = fresh()
    trainer.load(tmp_path / "checkpoint.safetensors")
    assert advance(student, trainer, candidates, 10) == pytest.approx(rest, rel=1e-4)
    assert trainer.step == 20


def test_learning_rate_warms_up_and_ends_at_its_final_share():
    training = Training(steps=100, warmup=10, learning_rate=1.0, final_rate=0.1)
    assert training.rate(0) == pytest.approx(0.1)
    assert training.rate(10) == pytest.approx(1.0)
    assert training.rate(100) == pytest.approx(0.1)
    assert training.rate(30) > training.rate(60) > training.rate(99)


def test_grouped_attention_gives_the_usual_logits(tmp_path):
    tiny().save_pretrained(tmp_path)
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    found = []
    for attention in ("sdpa", GROUPED_ATTENTION):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).eval()
        with torch.no_grad():
            before = model(IDS[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
            last = model(IDS[:, -1:], attention_mask=mask, past_key_values=before.past_key_values)
        found.append(last.logits)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_mixture_keeps_shares_and_sees_every_row_before_any_returns():
    sources = {
        "a": (torch.zeros(5, 4, dtype=torch.long), 0.25),
        "b": (torch.arange(1, 41).reshape(10, 4), 0.75),
    }
    batches = iter(texts.Mixture(sources, rows=20, seed=0))
    drawn_with_names = [next(batches) for _ in range(50)]
    drawn = torch.cat([rows for rows, _ in drawn_with_names])
    names = [name for _, names in drawn_with_names for name in names]
    assert [name == "b" for name in names] == (drawn[:, 0] > 0).tolist()
    from_b = drawn[drawn[:, 0] > 0]
    assert 0.70 < len(from_b) / len(drawn) < 0.80
    assert len({row[0].item() for row in from_b[:10]}) == 10
    again = iter(texts.Mixture(sources, rows=20, seed=0))
    assert torch.equal(next(again)[0], drawn[:20])


class ChatMarks:
    """Stands for a tokenizer whose marks are 1 and 2 and whose word for the assistant is 50 51."""

    def convert_tokens_to_ids(self, tokens):
        return [1, 2]

    def __call__(self, text, add_special_tokens):
        return SimpleNamespace(input_ids=[50, 51])


def test_only_tokens_that_were_sampled_as_answers_are_taught_at_the_sampling_temperature():
    #    ... in a turn  user ......... end  \n  assistant .... end \n  user
    row = [60, 50, 2, 9, 1, 40, 9, 61, 62, 2, 9, 1, 50, 51, 9, 63, 64, 2, 9, 1, 40]
    ids = torch.tensor([row, row])
    sharpness = target_sharpness(ChatMarks(), ids, ["dialogues", "prose"])
    answers = torch.tensor([14, 15, 16])  # they predict 63, 64 and the end mark
    assert sharpness[0, answers].tolist() == pytest.approx([1 / dialogues.ANSWER.temperature] * 3)
    others = torch.ones(len(row), dtype=torch.bool).index_fill(0, answers, False)
    assert (sharpness[0, others] == 1).all() and (sharpness[1] == 1).all()


def test_a_sharper_target_is_what_the_student_learns():
    teacher = tiny()
    student = Student(teacher, update.Recipe(REMOVED, None).kept(6), rank=3, seed=0)
    candidates = Candidates(torch.ones(VOCABULARY), VOCABULARY, 0, 0)
    with torch.no_grad():
        lesson = student.teach(IDS)
        head = teacher.lm_head.weight
        target = (2 * (lesson.last @ head.T)).log_softmax(-1)
        found = (student.follow(lesson.parting)[0] @ head.T).log_softmax(-1)
        expected = (target.exp() * (target - found)).sum(-1).mean().item()
    with row_threads(len(IDS)) as threads:
        loss = train_step(student, candidates, IDS, torch.full(IDS.shape, 2.0), threads, 0.5)
    assert loss == pytest.approx(expected, rel=1e-3)


def test_streams_are_compared_where_the_student_rejoins_its_teacher():
    """The layers behind each gap: the student's input there, against the full model's at the same layer."""
    teacher = tiny()
    kept = update.Recipe(REMOVED, None).kept(6)
    student = Student(teacher, kept, rank=3, seed=0)
    lesson = student.teach(IDS)
    _, streams = student.follow(lesson.parting)
    states = teacher.model(IDS, output_hidden_states=True).hidden_states
    pruned = model_from(update.pruned_weights(weights_of(teacher), kept), 4)
    own = pruned.model(IDS, output_hidden_states=True).hidden_states
    behind = [place for place in range(1, 4) if kept[place] != kept[place - 1] + 1]
    assert len(streams) == len(lesson.streams) == len(behind) > 0
    for place, ours, theirs in zip(behind, streams, lesson.streams, strict=True):
        norm = teacher.model.layers[kept[place]].input_layernorm
        torch.testing.assert_close(theirs, norm(states[kept[place]]))
        torch.testing.assert_close(ours, norm(own[place]), atol=1e-5, rtol=1e-4)
    expected = [
        ((a - b)[:, 1:] ** 2).sum() / (b[:, 1:] ** 2).sum()
        for a, b in zip(streams, lesson.streams, strict=True)
    ]
    assert stream_error(streams, lesson.streams).item() == pytest.approx(
        sum(expected).item() / len(expected), rel=1e-4
    )


def test_gradient_is_that_of_all_rows_together():
    student = Student(tiny(), update.Recipe(REMOVED, None).kept(6), rank=3, seed=0)
    candidates = Candidates(torch.ones(VOCABULARY), VOCABULARY, 0, 0)
    head = student.teacher.lm_head.weight
    parameters = list(student.parameters().values())
    losses = []
    for row in IDS.split(1):
        lesson = student.teach(row)
        last, streams = student.follow(lesson.parting)
        divergence = forward_kl(last, lesson.last, head, torch.zeros(len(head)))
        losses.append(divergence + 0.5 * stream_error(streams, lesson.streams))
    together = torch.autograd.grad(sum(losses) / len(IDS), parameters)
    with row_threads(len(IDS)) as threads:
        train_step(student, candidates, IDS, torch.ones(IDS.shape), threads, 0.5)
    for parameter, gradient in zip(parameters, together, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-4)


def test_training_goes_on_from_an_earlier_update(trained):
    teacher, student = trained
    fresh = Student(teacher, update.Recipe(REMOVED, None).kept(6), rank=3, seed=0)
    trainer = Trainer(fresh, Training(rank=3))
    trainer.start_from(student.parameters())
    for name, value in student.parameters().items():
        assert torch.equal(fresh.parameters()[name], value)
        assert torch.equal(trainer.average[name], value)


def test_training_goes_on_with_more_rank_from_the_same_function(trained):
    teacher, student = trained
    wider = Student(teacher, update.Recipe(REMOVED, None).kept(6), rank=5, seed=3)
    Trainer(wider, Training(rank=5)).start_from(student.parameters())
    parting = student.teach(IDS).parting
    with torch.no_grad():
        torch.testing.assert_close(wider.follow(parting)[0], student.follow(parting)[0])
    # the added rank can learn: its half that is not zero is random
    assert all(
        (value != 0).any(1).all()
        for name, value in wider.parameters().items()
        if name.endswith("down")
    )


def test_dialogues_file_is_small_alternates_and_never_asks_a_judged_prompt():
    assert dialogues.DIALOGUES_FILE.stat().st_size <= dialogues.MAX_BYTES
    rows = [json.loads(line) for line in dialogues.DIALOGUES_FILE.read_text().splitlines()]
    asked = [row["messages"][0]["content"].lower() for row in rows]
    answers = [row["messages"][1]["content"] for row in rows]
    assert len(rows) >= 300 and len(set(zip(asked, answers, strict=True))) == len(asked)
    heldout = [first for first, row in zip(asked, rows, strict=True) if row["split"] == "heldout"]
    assert len(set(heldout)) == len(heldout)
    assert not {prompt.lower() for prompt in prompts.JUDGED_PROMPTS} & set(asked)
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and roles
        assert all(dialogues.is_sound(message["content"]) for message in row["messages"])
    assert {row["split"] for row in rows} == {"train", "heldout"}


def test_collecting_drops_loops_repeats_and_judged_prompts(tmp_path):
    def row(question: str, answer: str, split: str = "train") -> str:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return json.dumps({"messages": messages, "split": split})

    lines = [
        row("What is tea?", "A drink."),
        row("what is tea", "Leaves in water."),
        row("What is tea?", "A drink."),
        row("What is salt?", "A mineral.", "heldout"),
        row("What is salt?", "A spice.", "heldout"),
        row("Say it.", "again and again " * 20),
        row(prompts.JUDGED_PROMPTS[0], "Paris."),
        json.dumps({"text": "Tea is a drink.", "split": "train"}),
    ]
    (tmp_path / "batch").write_text("\n".join(lines))
    dialogues.collect([tmp_path / "batch"], tmp_path / "dialogues", tmp_path / "prose")
    kept = dialogues.load_dialogues("train", tmp_path / "dialogues")
    assert [messages[1]["content"] for messages in kept] == ["A drink.", "Leaves in water."]
    heldout = dialogues.load_dialogues("heldout", tmp_path / "dialogues")
    assert [messages[1]["content"] for messages in heldout] == ["A mineral."]
    assert dialogues.load_prose("train", tmp_path / "prose") == ["Tea is a drink."]


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
