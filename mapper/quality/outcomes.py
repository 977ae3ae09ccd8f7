"""Both models' answers to task questions, with what a cascade would have seen of the small one's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from mapper.errors import BadTask
from mapper.quality.tasks import FORMATS, Question, Task, read_tasks

# Low quantile of an answer's token log-probabilities, as policies take it by default.
QUANTILE = 0.1
# A last word that is still not at its end after so many tokens is cut.
_WORD_TOKENS = 6
_JUDGED = ("choice", "word")

console = Console(stderr=True)


@dataclass(frozen=True)
class Answer:
    """One model's answer: right (1) or wrong (0), and its tokens' log-probabilities (nats).

    `margin` is the distance from the answer to the runner-up, in nats a token of the answer:
    the runner-up is another option, or for a generated word each token's second likeliest.
    """

    quality: float
    logprobs: list[float]
    margin: float
    prompt_logprob: float | None

    def signals(self) -> dict[str, float]:
        ordered = sorted(self.logprobs)
        return {
            "tokens": len(ordered),
            "low_logprob": ordered[int(QUANTILE * (len(ordered) - 1))],
            "mean_logprob": sum(ordered) / len(ordered),
            "margin": self.margin,
        }


class Answerer:
    """A Hugging Face model folder that answers questions without worked examples."""

    def __init__(
        self, folder: Path, *, dtype: torch.dtype = torch.float32, reads_prompt: bool = True
    ) -> None:
        """With `reads_prompt` it says how likely the prompt is: a quarter more work."""
        self.reads_prompt = reads_prompt
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True
        ).eval()
        # In fp32 always: the steps of bf16 logits are wider than many a margin.
        self._head = self.model.get_output_embeddings().weight.detach().float()

    @torch.inference_mode()
    def answer(self, question: Question, task: Task) -> Answer:
        prompt = self._encode(question.prompt)
        if task.format.judge == "word":
            return self._word(question, prompt)
        return self._choose(question, prompt, task.format.per_character)

    def _choose(self, question: Question, prompt: list[int], per_character: bool) -> Answer:
        """All options in one pass: each sees the prompt and itself, none sees another."""
        heads = [self._encode(option) for option in question.options]
        tails = self._encode(question.suffix)
        options = [head + tails for head in heads]
        hidden, starts = self._side_by_side(prompt, options)
        scored = []
        for head, option, start in zip(heads, options, starts, strict=True):
            rows = [len(prompt) - 1, *range(start, start + len(option) - 1)]
            found = _chosen(self._logprobs(hidden[rows]), option)
            # With a suffix it alone is compared: the options differ in how likely they are.
            scored.append(found[len(head) :] if tails else found)
        weights = [len(option) if per_character else 1 for option in question.options]
        values = [sum(one) / weight for one, weight in zip(scored, weights, strict=True)]
        ordered = sorted(values, reverse=True)
        best = values.index(ordered[0])
        return Answer(
            quality=float(best == question.label),
            logprobs=scored[best],
            margin=(ordered[0] - ordered[1]) * weights[best] / len(scored[best]),
            prompt_logprob=self._mean_logprob(hidden, prompt),
        )

    def _word(self, question: Question, prompt: list[int]) -> Answer:
        """The word that greedy decoding goes on with, against the last word of the text."""
        cache = DynamicCache(config=self.model.config)
        hidden = self._hidden(torch.tensor([prompt]), past_key_values=cache)[0]
        prompt_logprob = self._mean_logprob(hidden, prompt)
        spoken: list[int] = []
        logprobs, margins = [], []
        row = hidden[-1:]
        while len(spoken) < _WORD_TOKENS:
            top = self._logprobs(row)[0].topk(2)
            token = int(top.indices[0])
            if spoken and not self.tokenizer.decode([token])[:1].isalnum():
                break
            spoken.append(token)
            logprobs.append(float(top.values[0]))
            margins.append(float(top.values[0] - top.values[1]))
            row = self._hidden(torch.tensor([[token]]), past_key_values=cache)[0]
        right = float(self.tokenizer.decode(spoken).strip() == question.reference.strip())
        margin = sum(margins) / len(margins)
        return Answer(right, logprobs, margin, prompt_logprob)

    def _side_by_side(
        self, prompt: list[int], options: Sequence[list[int]]
    ) -> tuple[torch.Tensor, list[int]]:
        """Hidden states [tokens, hidden_size] of the prompt and all options but their ends."""
        size = len(prompt) + sum(len(option) - 1 for option in options)
        visible = torch.zeros(size, size, dtype=torch.bool)
        visible[:, : len(prompt)] = True
        visible[: len(prompt), : len(prompt)] = torch.ones(len(prompt), len(prompt)).tril().bool()
        ids, positions, starts = list(prompt), list(range(len(prompt))), []
        for option in options:
            own = slice(len(ids), len(ids) + len(option) - 1)
            visible[own, own] = torch.ones(len(option) - 1, len(option) - 1).tril().bool()
            starts.append(len(ids))
            positions += range(len(prompt), len(prompt) + len(option) - 1)
            ids += option[:-1]
        hidden = self._hidden(
            torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            attention_mask=visible[None, None],
        )
        return hidden[0], starts

    def _hidden(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.model.base_model(input_ids=ids, **options).last_hidden_state

    def _logprobs(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden.float() @ self._head.T).log_softmax(-1)

    def _mean_logprob(self, hidden: torch.Tensor, prompt: list[int]) -> float | None:
        if len(prompt) < 2 or not self.reads_prompt:
            return None
        # A mean over many tokens: here the model's own precision will do, and is faster.
        logits = self.model.get_output_embeddings()(hidden[: len(prompt) - 1])
        found = _chosen(logits.float().log_softmax(-1), prompt[1:])
        return sum(found) / len(found)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def run(
    small: Path,
    large: Path,
    data: Path,
    out: Path,
    *,
    items: int,
    only: list[str] | None = None,
    dtype: str = "float32",
) -> int:
    """Writes one JSON object a question to `out`, as `baton tune` reads them; returns how many.

    Questions already in `out` are not asked again, so that an interrupted run goes on.

    Raises:
        BadTask: `data` has no task of those, or a file is malformed.
    """
    tasks = [
        task for task in read_tasks(data, items=items, only=only) if task.format.judge in _JUDGED
    ]
    if not tasks:
        raise BadTask(f"name a task of these: {', '.join(_askable())}")
    done = _done(out)
    kind = getattr(torch, dtype)
    models = {
        "small": Answerer(small, dtype=kind),
        "large": Answerer(large, dtype=kind, reads_prompt=False),
    }
    with out.open("a", encoding="utf-8") as file:
        for task in tasks:
            questions = list(enumerate(task.questions))
            for number, question in track(questions, description=task.name, console=console):
                name = f"{task.name}-{number}"
                if name in done:
                    continue
                answers = {tier: one.answer(question, task) for tier, one in models.items()}
                file.write(json.dumps(_line(name, task.name, question, answers)) + "\n")
                file.flush()
                done.add(name)
    return len(done)


def _askable() -> list[str]:
    return [name for name, one in FORMATS.items() if one.judge in _JUDGED]


def _done(out: Path) -> set[str]:
    if not out.exists():
        return set()
    return {json.loads(line)["id"] for line in out.read_text(encoding="utf-8").splitlines()}


def _line(name: str, task: str, question: Question, answers: dict[str, Answer]) -> dict[str, Any]:
    small = answers["small"]
    return {
        "id": name,
        "task": task,
        "text": question.prompt,
        "prompt_logprob": small.prompt_logprob and round(small.prompt_logprob, 4),
        "signals": {key: round(value, 4) for key, value in small.signals().items()},
        **{tier: {"quality": one.quality} for tier, one in answers.items()},
    }


def _chosen(logprobs: torch.Tensor, ids: Sequence[int]) -> list[float]:
    return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
