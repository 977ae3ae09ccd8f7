"""Answers to task questions on top of a cache: option log-likelihoods and greedy spans."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedTokenizerBase

from mapper.capture.model import CapturedModel, Prefill, build_cache, stack_cache
from mapper.quality.tasks import Question, normalise

# Longest span that a greedy answer may have; longer answers are counted as cut.
ANSWER_TOKENS = 24


class Reader:
    """One model that answers questions which share the beginning of their prompts."""

    def __init__(self, model: CapturedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._shared: tuple[torch.Tensor, Prefill] | None = None

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor, shared: int) -> Prefill:
        """The cache of `ids`; the first `shared` tokens are computed once for all questions."""
        if self._shared is None or not torch.equal(self._shared[0], ids[:shared]):
            self._shared = ids[:shared], self.model.prefill(ids[:shared])
        start = self._shared[1]
        cache = build_cache(start.k, start.v)
        self.model.model.base_model(input_ids=ids[None, shared:], past_key_values=cache)
        return Prefill(*stack_cache(cache))

    @torch.inference_mode()
    def answer(
        self,
        question: Question,
        ids: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        tail: int,
    ) -> bool:
        """Whether the model answers rightly, computing the last `tail` prompt tokens itself."""
        start = len(ids) - max(tail, 1)
        past = build_cache(*(part[:, :start] for part in cache))
        logits = self.model.model(input_ids=ids[None, start:], past_key_values=past).logits[0, -1]
        if question.options:
            return self._best_option(question, past, logits) == question.label
        spoken = normalise(self._greedy(past, logits))
        return spoken in {normalise(answer) for answer in question.answers}

    def _best_option(self, question: Question, past: DynamicCache, logits: torch.Tensor) -> int:
        """By log-likelihood per character, so that long options are not at a disadvantage."""
        scores = []
        length = past.get_seq_length()
        for option in question.options:
            ids = torch.tensor(self.tokenizer.encode(option, add_special_tokens=False))
            rows = [logits[None]]
            if len(ids) > 1:
                rows.append(
                    self.model.model(input_ids=ids[None, :-1], past_key_values=past).logits[0]
                )
                past.crop(length)
            chosen = torch.cat(rows).log_softmax(-1).gather(1, ids[:, None]).sum()
            scores.append(float(chosen) / len(option))
        return max(range(len(scores)), key=scores.__getitem__)

    def _greedy(self, past: DynamicCache, logits: torch.Tensor) -> str:
        """Up to the end of the line."""
        spoken: list[int] = []
        for _ in range(ANSWER_TOKENS):
            spoken.append(int(logits.argmax()))
            text = self.tokenizer.decode(spoken)
            if "\n" in text.lstrip() or spoken[-1] == self.tokenizer.eos_token_id:
                return text.strip().split("\n")[0]
            step = torch.tensor([[spoken[-1]]])
            logits = self.model.model(input_ids=step, past_key_values=past).logits[0, -1]
        return self.tokenizer.decode(spoken)
