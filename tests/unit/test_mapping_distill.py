"""Distillation: what is taught, where documents are handed over, what a step is judged by."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from mapper import calibrate
from mapper.artifact import Artifact
from mapper.capture.model import CapturedModel, build_cache
from mapper.capture.texts import Document, read_documents
from mapper.methods import distill
from tests.tiny_pair import calibrated, say


def test_kinds_of_text_with_a_small_kl_are_not_drowned() -> None:
    """Thirty times the loss, five times the part in the gradient; what has fallen counts more than before."""
    balance = distill.Balance()
    loud, quiet = (("recall", 0), 0.36), (("chat", 64), 0.012)
    parts = [one[1] * balance.weight(*one) for one in (loud, quiet)]
    assert parts == pytest.approx([0.36**0.5, 0.012**0.5])
    once = balance.weight(("recall", 0), 0.36)
    for _ in range(200):
        later = balance.weight(("recall", 0), 0.09)
    assert later == pytest.approx(2 * once, rel=0.01)
    assert balance.weight(*quiet) == pytest.approx(0.012**-0.5)
    assert balance.weight(("prose", 0), 0.0) == 100


@pytest.mark.usefixtures("short_exam")
def test_distillation_rehearses_quotes_where_the_text_has_sentences(pair) -> None:
    generator = torch.Generator().manual_seed(5)
    texts = (" ".join(f"{say(generator, 9)} ." for _ in range(18)) for _ in range(24))
    (pair / "sentences.txt").write_text("\n\n\n".join(texts))
    out = calibrated(
        pair, "quotes", texts=("sentences.txt",), method="head-local", k=1,
        distill_seconds=1, native_tail=0,
    )  # fmt: skip
    distilled = Artifact.load(out).manifest.selection["distilled"]
    kinds = {name.split(",")[0] for name in distilled["held_out_kl_before"]}
    assert kinds == {"prose", "recall"}


def test_all_kinds_of_documents_are_taught_however_few_there_are() -> None:
    def some(kind: str, count: int) -> list[Document]:
        return [Document(f"{kind}{at}", kind, torch.arange(4), kind) for at in range(count)]

    generator = torch.Generator().manual_seed(0)
    mixed = distill._mixed(some("chat", 40) + some("prose", 2), generator)
    drawn = list(itertools.islice(mixed, 60))
    assert [document.kind for document in drawn[:10]] == [*["chat"] * 4, "prose"] * 2
    assert len({document.digest for document in drawn if document.kind == "chat"}) == 40
    assert {document.digest for document in drawn[:10] if document.kind == "prose"} == {
        "prose0",
        "prose1",
    }


def test_hand_overs_of_one_batch_equal_separate_continuations(pair, monkeypatch) -> None:
    """Positions, masks and tails of the shared pass, against a plain cache for each hand-over."""
    monkeypatch.setattr(distill, "fastest_dtype", lambda: torch.float32)
    monkeypatch.setattr(distill, "WINDOW", 12)
    artifact = Artifact.load(calibrated(pair, "plain", method="head-local", k=2, native_tail=0))
    models = [CapturedModel(pair / name) for name in ("small", "large")]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")
    documents, _ = read_documents([pair / "talks.jsonl"], tokenizer, length=200, seed=0)
    classroom = distill.Classroom(*models, wide=False)
    lesson = classroom.lesson(documents[0])
    ids = lesson.document.ids
    pupils = {kind: list(map(distill.Pupil, getattr(artifact.maps, kind))) for kind in "kv"}
    theirs, native = (model.prefill(ids) for model in models)
    mapped = artifact.compile().apply(theirs.k, theirs.v, torch.arange(len(ids)))
    k, v = (tensor.clone() for tensor in mapped)
    k[:, 0], v[:, 0] = native.k[:, 0], native.v[:, 0]
    places = [40, 97, len(ids) - 5]
    with torch.no_grad():
        wanted = models[1].model(input_ids=ids[None]).logits[0].log_softmax(-1)
        for tail in (0, 8):
            divergences = []
            for place in places:
                start = place - tail
                cache = build_cache(k[:, :start], v[:, :start])
                rest = ids[None, start : place + 12]
                found = models[1].model(input_ids=rest, past_key_values=cache).logits[0, tail:]
                native_part = wanted[place : place + 12]
                difference = native_part - found.log_softmax(-1)
                divergences.append((native_part.exp() * difference).sum(-1))
            ours = classroom.loss(pupils, None, lesson, places, tail=tail)
            assert float(ours) == pytest.approx(float(torch.cat(divergences).mean()), rel=1e-3)
        judged = distill.evaluate(artifact.maps, classroom, documents[:3], (8, 0))
        for tail in (0, 8):
            each = [
                float(classroom.loss(pupils, None, classroom.lesson(one), places, tail=tail))
                for one in documents[:3]
                for places in [distill.exam_places(one)]
            ]
            assert judged["chat", tail] == pytest.approx(sum(each) / 3, rel=1e-4)


def test_hand_overs_are_first_of_all_where_a_question_follows_up() -> None:
    answers, follow_ups = (40, 60, 80, 100, 120, 140), (80, 140)
    chat = Document("chat", "chat", torch.arange(300), "chat", answers, follow_ups)
    generator = torch.Generator().manual_seed(0)
    others = set()
    for _ in range(40):
        one, other, *random_ones = distill._hand_overs(chat, 4, generator)
        assert {one, other} == set(follow_ups) and len(random_ones) == 2
        places = distill._hand_overs(chat, 8, generator)
        assert set(places[:2]) == set(follow_ups) and set(places[2:4]) <= set(answers)
        others |= set(places[2:4])
    assert others == set(answers) - set(follow_ups)


def test_a_distilled_map_is_judged_by_more_text_than_is_kept_in_memory(pair, monkeypatch) -> None:
    monkeypatch.setattr(calibrate, "HELD_OUT_TOKENS", 400)
    monkeypatch.setattr(calibrate, "EXAM_TOKENS", 1000)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")
    paths = [pair / "talks.jsonl", pair / "prose.txt"]
    text = calibrate._read_text(paths, tokenizer, 4000, 200, 0.4)
    assert len(text.exam) > len(text.held_out)
    assert {one.kind for one in text.exam} == {"chat", "prose"}
    learned = {one.origin for one in (*text.fit, *text.lessons)}
    assert not learned & {one.origin for one in (*text.held_out, *text.exam)}
