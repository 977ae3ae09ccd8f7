"""Healing the demo's small model: its loss, its targets, checkpoints and earlier updates, on tiny random models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mapper.demo import dialogues, texts, update
from mapper.demo.distill import (
    TEMPERATURES,
    Trainer,
    Training,
    temperatures,
    train_step,
    training_sources,
)
from mapper.demo.student import Student, stream_error
from mapper.methods.forward_kl import Candidates, forward_kl
from mapper.methods.parallel import item_threads
from tests.tiny_demo import IDS, REMOVED, model_from, tiny, weights_of
from tests.tiny_pair import VOCABULARY


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
        with item_threads(len(batch)) as threads:
            for _ in range(steps):
                plain = torch.ones(batch.shape)
                losses.append(train_step(student, candidates, batch, plain, threads, 0.5))
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


def test_a_truncated_target_has_the_gradient_of_the_plain_formula():
    generator = torch.Generator().manual_seed(5)
    student, teacher = torch.randn(2, 70, 8, generator=generator)
    student.requires_grad_()
    head = torch.randn(50, 8, generator=generator)
    among = torch.tensor([0, 3, 60]).repeat(24)[:70]
    forward_kl(student, teacher, head, torch.zeros(50), among).backward()
    gradient, student.grad = student.grad, None
    wanted = teacher @ head.T
    for row, count in enumerate(among.tolist()):
        if 0 < count < 50:
            wanted[row] = wanted[row].masked_fill(
                wanted[row] < wanted[row].topk(count).values[-1], -1e4
            )
    wanted = wanted.log_softmax(-1)
    found = (student @ head.T).log_softmax(-1)
    (wanted.exp() * (wanted - found)).sum(-1).mean().backward()
    torch.testing.assert_close(gradient, student.grad, atol=1e-6, rtol=1e-4)


def test_learning_rate_warms_up_and_ends_at_its_final_share():
    training = Training(steps=100, warmup=10, learning_rate=1.0, final_rate=0.1)
    assert training.rate(0) == pytest.approx(0.1)
    assert training.rate(10) == pytest.approx(1.0)
    assert training.rate(100) == pytest.approx(0.1)
    assert training.rate(30) > training.rate(60) > training.rate(99)


class ChatMarks:
    """Stands for a tokenizer whose marks are 1 and 2 and whose word for the assistant is 50 51."""

    def convert_tokens_to_ids(self, tokens):
        return [1, 2]

    def __call__(self, text, add_special_tokens):
        return SimpleNamespace(input_ids=[50, 51])


def test_only_tokens_that_were_sampled_as_answers_are_taught_as_they_were_sampled():
    #    ... in a turn  user ......... end  \n  assistant .... end \n  user
    row = [60, 50, 2, 9, 1, 40, 9, 61, 62, 2, 9, 1, 50, 51, 9, 63, 64, 2, 9, 1, 40]
    names = ["dialogues", "easy", "own", "prose"]
    drawn_at = temperatures(ChatMarks(), torch.tensor([row] * 4), names)
    for name, found in zip(names, drawn_at, strict=True):
        # those that predict 63, 64 and the end mark
        wanted = torch.ones(len(row))
        wanted[14:17] = TEMPERATURES.get(name, 1.0)
        assert torch.equal(found, wanted)
    assert drawn_at[1, 14] < drawn_at[0, 14] < 1


def test_what_the_student_learns_is_what_the_teacher_drew_from():
    teacher = tiny()
    student = Student(teacher, update.Recipe(REMOVED, None).kept(6), rank=3, seed=0)
    candidates = Candidates(torch.ones(VOCABULARY), VOCABULARY, 0, 0)
    drawn_at = torch.tensor([1.0, 0.7, 0.4, 1.0]).repeat(5).expand_as(IDS)
    with torch.no_grad():
        lesson = student.teach(IDS)
        logits = lesson.last @ teacher.lm_head.weight.T
        drawn = logits / drawn_at[..., None]
        lowest = drawn.topk(dialogues.ANSWER.top_k).values[..., -1:]
        assert dialogues.ANSWER.top_k < VOCABULARY
        target = torch.where(
            drawn_at[..., None] < 1, drawn.masked_fill(drawn < lowest, -1e4), logits
        ).log_softmax(-1)
        found = (student.follow(lesson.parting)[0] @ teacher.lm_head.weight.T).log_softmax(-1)
        expected = (target.exp() * (target - found)).sum(-1).mean().item()
    with item_threads(len(IDS)) as threads:
        loss = train_step(student, candidates, IDS, drawn_at, threads, 0.5)
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
    with item_threads(len(IDS)) as threads:
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


def test_a_mean_update_is_refused_for_updates_of_different_ranks(tmp_path):
    def saved(name: str, rank: int, value: float) -> Path:
        tensors = {
            "linear.down": torch.full((rank, 4), value),
            "linear.up": torch.full((3, rank), 2 * value),
            "norm.weight": torch.full((4,), value),
        }
        update.save_update(tensors, REMOVED, tmp_path / name)
        return tmp_path / name

    recipe = update.Recipe(REMOVED, None)
    mean = update.mean_update(recipe, [saved("a", 2, 1.0), saved("b", 2, 2.0)])
    for name, value in {"linear.down": 1.5, "linear.up": 3.0, "norm.weight": 1.5}.items():
        torch.testing.assert_close(
            mean[name], torch.full_like(mean[name], value), rtol=1e-2, atol=0
        )
    with pytest.raises(update.UpdateRefused, match="different shapes"):
        update.mean_update(recipe, [tmp_path / "a", saved("c", 3, 1.0)])


def test_easy_and_own_answers_get_their_shares_where_there_are_any(monkeypatch):
    rows = torch.zeros(3, 8, dtype=torch.long)
    monkeypatch.setattr(texts, "prose_rows", lambda *args: rows)
    training = Training(prose_share=0.1, easy_share=0.2, own_share=0.3)

    def shares(own: Path | None, easy: int) -> dict[str, float]:
        def dialogue_rows(tokenizer, split, length, temperature=None, path=None):
            return rows[:easy] if temperature == dialogues.EASY_ANSWER.temperature else rows

        monkeypatch.setattr(texts, "dialogue_rows", dialogue_rows)
        sources = training_sources(None, training, None, own)
        return {name: share for name, (_, share) in sources.items()}

    assert shares(None, 0) == pytest.approx({"dialogues": 0.9, "prose": 0.1})
    assert shares(Path("own"), 3) == pytest.approx(
        {"dialogues": 0.45, "easy": 0.18, "own": 0.27, "prose": 0.1}
    )
