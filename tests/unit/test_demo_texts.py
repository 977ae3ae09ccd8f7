"""The demo's own text: how it is sampled, collected, and mixed for training."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache

from mapper.capture.grouped import GROUPED_ATTENTION
from mapper.demo import dialogues, prompts, texts
from mapper.demo.sampling import RoomyLayer
from tests.tiny_demo import IDS, tiny


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


def test_a_cache_with_room_gives_the_usual_logits_beyond_its_room_and_after_rows_left(tmp_path):
    tiny().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=GROUPED_ATTENTION)
    ids = torch.randint(
        0, 40, (3, 12 + RoomyLayer.ROOM), generator=torch.Generator().manual_seed(1)
    )
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    roomy = Cache(layers=[RoomyLayer() for _ in range(model.config.num_hidden_layers)])
    found = []
    for cache in (DynamicCache(config=model.config), roomy):
        rows, steps = torch.arange(3), []
        with torch.no_grad():
            model(ids[:, :10], attention_mask=mask[:, :10], past_key_values=cache)
            for at in range(10, ids.shape[1]):
                if at == 30:
                    rows = torch.tensor([0, 2])
                    cache.batch_select_indices(rows)
                seen = mask[rows, : at + 1]
                steps.append(
                    model(ids[rows, at, None], attention_mask=seen, past_key_values=cache).logits
                )
        found.append(torch.cat(steps))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "question",
    [
        *prompts.JUDGED_PROMPTS,
        "What color is the sky?",
        "What is 2 + 2?",
        "Tell me which ocean is the largest.",
        "How many days does a week have?",
    ],
)
def test_what_asks_the_same_as_a_judged_prompt_is_known(question):
    assert prompts.is_judged(question)


def test_questions_of_the_same_kind_as_the_judged_ones_remain():
    simple = prompts.simple_questions()
    assert not [question for question in simple if prompts.is_judged(question)]
    assert not prompts.is_judged("What is 42 plus 2?")


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


def test_dialogues_file_is_small_alternates_and_never_asks_a_judged_prompt():
    assert dialogues.DIALOGUES_FILE.stat().st_size <= dialogues.MAX_BYTES
    rows = [json.loads(line) for line in dialogues.DIALOGUES_FILE.read_text().splitlines()]
    asked = [row["messages"][0]["content"].lower() for row in rows]
    answers = [row["messages"][1]["content"] for row in rows]
    assert len(rows) >= 300 and len(set(zip(asked, answers, strict=True))) == len(asked)
    heldout = [first for first, row in zip(asked, rows, strict=True) if row["split"] == "heldout"]
    assert len(set(heldout)) == len(heldout)
    assert not [question for question in asked if prompts.is_judged(question)]
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
        row("France has which capital?", "Paris."),
        json.dumps({"text": "Tea is a drink.", "split": "train"}),
    ]
    (tmp_path / "batch").write_text("\n".join(lines))
    dialogues.collect([tmp_path / "batch"], tmp_path / "dialogues", tmp_path / "prose")
    kept = dialogues.load_dialogues("train", tmp_path / "dialogues")
    assert [messages[1]["content"] for messages in kept] == ["A drink.", "Leaves in water."]
    heldout = dialogues.load_dialogues("heldout", tmp_path / "dialogues")
    assert [messages[1]["content"] for messages in heldout] == ["A mineral."]
    assert dialogues.load_prose("train", tmp_path / "prose") == ["Tea is a drink."]


def test_conversations_are_told_apart_by_the_temperature_of_their_answers(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": str(at)}], "split": "train"} | more
        for at, more in enumerate(({}, {"temperature": 0.7}, {"temperature": 0.4}))
    ]
    (tmp_path / "file").write_text("\n".join(map(json.dumps, rows)))

    def asked(temperature: float | None) -> str:
        found = dialogues.load_dialogues("train", tmp_path / "file", temperature)
        return "".join(messages[0]["content"] for messages in found)

    assert (asked(None), asked(0.7), asked(0.4)) == ("012", "01", "2")


def test_easy_questions_are_the_whole_lines_of_lists_that_the_model_went_on_with(monkeypatch):
    text = " What is tin?\n- What do bees make?\nWhat is tin?\n- Say no.\n- What is a quay?\n- What is a"
    monkeypatch.setattr(dialogues, "sample", lambda model, tokenizer, lists, *how: [(text, False)])
    chooser = random.Random(0)
    found = dialogues._easy_questions(None, None, 2, chooser, torch.Generator())
    assert sorted(found) == ["What is a quay?", "What is tin?"]


def test_own_answers_are_to_short_training_questions_alone(tmp_path, monkeypatch):
    def row(question: str, split: str = "train") -> str:
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "Words."},
        ]
        return json.dumps({"messages": messages, "split": split})

    lines = [row("What is tin?"), row("What is zinc?", "heldout"), row("What is lead? " * 9)]
    (tmp_path / "dialogues").write_text("\n".join(lines))
    model = tiny()
    for step in ("build_large", "build_small"):
        monkeypatch.setattr(dialogues, step, lambda: tmp_path)
    monkeypatch.setattr(dialogues.AutoTokenizer, "from_pretrained", lambda *args: _Template())
    monkeypatch.setattr(
        dialogues.AutoModelForCausalLM, "from_pretrained", lambda *args, **how: model
    )
    monkeypatch.setattr(
        dialogues, "sample", lambda model, tokenizer, asked, *how: [(asked[0] + " Tin.", True)]
    )
    dialogues.answer_as_small(tmp_path / "dialogues", 5, tmp_path / "out")
    (messages,) = dialogues.load_dialogues("train", tmp_path / "out")
    assert [message["content"] for message in messages] == ["What is tin?", "What is tin? Tin."]


class _Template:
    def apply_chat_template(self, messages, **how):
        return messages[-1]["content"]
