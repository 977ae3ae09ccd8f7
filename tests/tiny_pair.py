"""Tiny random Llama models that share a tokenizer of whole words, and text for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mapper import calibrate

VOCABULARY = 100
WORDS = [f"w{number}" for number in range(90)]
TEMPLATE = (
    "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)


def tiny_model(layers: int, seed: int, spread: float, **options: Any) -> LlamaForCausalLM:
    """`spread` is the weights': with the usual 0.02 a random model hardly looks at its context."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        initializer_range=spread,
        **options,
    )
    return LlamaForCausalLM(config)


def write_model(folder: Path, layers: int, seed: int, spread: float = 0.4) -> Path:
    """A `tiny_model` with its tokenizer and chat template."""
    tiny_model(layers, seed, spread).save_pretrained(folder)
    specials = ["<unk>", "<s>", "</s>", "user", "assistant", ":", "."]
    vocabulary = {word: i for i, word in enumerate([*specials, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def say(generator: torch.Generator, words: int) -> str:
    chosen = torch.randint(0, len(WORDS), (words,), generator=generator).tolist()
    return " ".join(WORDS[index] for index in chosen)


def write_dialogues(path: Path, count: int = 60) -> Path:
    """Every sixth dialogue is of the split heldout."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        {
            "messages": [
                {"role": "user", "content": say(generator, 30)},
                {"role": "assistant", "content": say(generator, 20)},
            ],
            "split": "heldout" if number % 6 == 0 else "train",
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_prose(path: Path, texts: int = 12) -> Path:
    generator = torch.Generator().manual_seed(1)
    path.write_text("\n\n\n".join(say(generator, 60) for _ in range(texts)))
    return path


def write_pair(root: Path) -> Path:
    write_model(root / "small", 2, 0, spread=0.02)
    write_model(root / "large", 3, 1, spread=0.02)
    write_dialogues(root / "talks.jsonl")
    write_prose(root / "prose.txt", 48)
    return root


def calibrated(
    root: Path, out: str, texts: Sequence[str] = ("talks.jsonl", "prose.txt"), **options: Any
) -> Path:
    """The artifact `root / out` of a pair as `write_pair` leaves it."""
    paths = [root / name for name in texts]
    options = {"length": 200, "held_out": 0.25} | options
    return calibrate.run(root / "small", root / "large", paths, root / out, **options)
