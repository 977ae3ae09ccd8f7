"""Measures a demo model: perplexity on held-out text, accuracy on multiple-choice tasks, and greedy answers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

BATCH_TOKENS = 4096
TASKS = ("hellaswag", "arc_easy", "piqa")


@dataclass(frozen=True)
class Scored:
    """Token ids and, for each, whether it counts: context tokens are read but not scored."""

    ids: list[int]
    counts: list[bool]


@torch.no_grad()
def log_likelihoods(model: LlamaForCausalLM, examples: list[Scored], what: str) -> list[float]:
    """The summed log-probability of the counted tokens of each example."""
    sums = [0.0] * len(examples)
    for batch in track(list(_batches(examples)), description=what):
        longest = max(len(examples[place].ids) for place in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        counted = torch.zeros(len(batch), longest, dtype=torch.bool)
        for row, place in enumerate(batch):
            size = len(examples[place].ids)
            ids[row, :size] = torch.tensor(examples[place].ids)
            counted[row, 1:size] = torch.tensor(examples[place].counts[1:])
        # padding stands on the right, where a causal model cannot see it; only the counted positions meet the head
        before = counted[:, 1:]
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][before]
        losses = cross_entropy(model.lm_head(hidden).float(), ids[:, 1:][before], reduction="none")
        rows = before.nonzero()[:, 0]
        for row, place in enumerate(batch):
            sums[place] = -losses[rows == row].sum().item()
    return sums


def _batches(examples: list[Scored]) -> Iterator[list[int]]:
    order = sorted(range(len(examples)), key=lambda place: len(examples[place].ids))
    batch: list[int] = []
    for place in order:
        if batch and len(examples[place].ids) * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def perplexity(model: LlamaForCausalLM, examples: list[Scored], what: str) -> float:
    tokens = sum(sum(example.counts[1:]) for example in examples)
    return math.exp(-sum(log_likelihoods(model, examples, what)) / tokens)


def dialogue_examples(
    tokenizer: PreTrainedTokenizerBase,
    dialogues: list[list[dict[str, str]]],
    roles: tuple[str, ...],
) -> list[Scored]:
    """Whole conversations of which the messages of `roles` count, each with its end mark."""
    examples = []
    for messages in dialogues:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        encoded = tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True)
        spans, start = [], 0
        for message in messages:
            # past the mark itself, so that the text of one message is not found inside an earlier one
            start = rendered.index(
                f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>", start
            )
            start += len(f"<|im_start|>{message['role']}\n")
            end = start + len(message["content"]) + len("<|im_end|>")
            if message["role"] in roles:
                spans.append((start, end))
        counts = [
            any(low <= left and right <= high for low, high in spans)
            for left, right in encoded.offset_mapping
        ]
        examples.append(Scored(encoded.input_ids, counts))
    return examples


def row_examples(rows: torch.Tensor) -> list[Scored]:
    return [Scored(row, [True] * len(row)) for row in rows.tolist()]


@dataclass(frozen=True)
class Question:
    context: str
    choices: list[str]
    label: int


def task_questions(task: str, folder: Path, count: int, seed: int) -> list[Question]:
    rows = [json.loads(line) for line in (folder / f"{task}.jsonl").read_text().splitlines()]
    chosen = random.Random(seed).sample(rows, min(count, len(rows)))
    return [_question(task, row) for row in chosen]


def _question(task: str, row: dict) -> Question:
    if task == "hellaswag":
        return Question(f"{row['activity_label']}: {row['ctx']}", row["endings"], row["label"])
    if task == "arc_easy":
        return Question(f"Question: {row['question']}\nAnswer:", row["choices"], row["label"])
    return Question(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"])


def accuracy(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[Question],
    what: str,
) -> float:
    """The share of questions whose right choice has the highest log-likelihood a character."""
    examples = []
    for question in questions:
        context = tokenizer(question.context, add_special_tokens=False).input_ids
        for choice in question.choices:
            ending = tokenizer(" " + choice, add_special_tokens=False).input_ids
            examples.append(Scored(context + ending, [False] * len(context) + [True] * len(ending)))
    sums = iter(log_likelihoods(model, examples, what))
    right = 0
    for question in questions:
        scores = [next(sums) / len(choice) for choice in question.choices]
        right += scores.index(max(scores)) == question.label
    return right / len(questions)


def chance(questions: list[Question]) -> float:
    return sum(1 / len(question.choices) for question in questions) / len(questions)


@torch.no_grad()
def answer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int = 96,
) -> str:
    """The greedy answer; one that reaches the token limit ends in a mark that says so."""
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**encoded, max_new_tokens=max_new_tokens, do_sample=False)
    new = output[0, encoded.input_ids.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True).strip()
    return text if new[-1] == tokenizer.eos_token_id else text + " [cut at the token limit]"
