"""The demo's own text: how it is sampled, collected, and mixed for training."""

from __future__ import annotations

import json

import torch
from transformers import AutoModelForCausalLM

from mapper.demo import dialogues, prompts, texts
from mapper.demo.sampling import GROUPED_ATTENTION
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
