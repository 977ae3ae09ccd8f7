"""Batched sampling from a causal model: finished rows leave the batch, so that a batch ends as its longest answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int
    temperature: float = 0.8
    top_k: int = 40
    # Shrinking the cache copies it, so it waits until this share of the batch has finished.
    compact_at: float = 0.15


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    how: Sampling,
    generator: torch.Generator,
) -> list[tuple[str, bool]]:
    """For each rendered text its continuation, and whether the model ended it itself (rather than the token limit)."""
    encoded = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
    )
    tokens, mask = encoded.input_ids, encoded.attention_mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = Cache(layers=[RoomyLayer() for _ in range(model.config.num_hidden_layers)])
    rows = torch.arange(len(texts))
    answers: list[list[int]] = [[] for _ in texts]
    ended = [False] * len(texts)
    for _ in range(how.max_new_tokens):
        hidden = model.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        tokens = _draw(model.lm_head(hidden[:, -1]).float(), how, generator)
        for row, token in zip(rows.tolist(), tokens[:, 0].tolist(), strict=True):
            if not ended[row]:
                ended[row] = token == tokenizer.eos_token_id
                if not ended[row]:
                    answers[row].append(token)
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        positions = positions[:, -1:] + 1
        going = torch.tensor([not ended[row] for row in rows.tolist()])
        if not going.any():
            break
        if (~going).float().mean() > how.compact_at:
            cache.batch_select_indices(going.nonzero()[:, 0])
            rows, tokens, mask, positions = (
                rows[going],
                tokens[going],
                mask[going],
                positions[going],
            )
    return [(tokenizer.decode(answer), end) for answer, end in zip(answers, ended, strict=True)]


class RoomyLayer(DynamicLayer):
    """A layer's cache with room for the next tokens: the usual one copies itself for each, a third of all time.

    Attention reads the room as well, masked: a part of the tensors would be copied before it is multiplied.
    """

    ROOM = 64

    def __init__(self) -> None:
        super().__init__()
        self.held = 0

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.held + key_states.shape[2]
        self.keys = self._filled(self.keys, key_states, end)
        self.values = self._filled(self.values, value_states, end)
        self.held = end
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.held

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._capacity(self.held + query_length), 0

    def _filled(self, states: torch.Tensor, new: torch.Tensor, end: int) -> torch.Tensor:
        rows, heads, _, size = new.shape
        if not self.held or end > states.shape[2]:
            roomier = new.new_zeros(rows, heads, self._capacity(end), size)
            if self.held:
                roomier[:, :, : self.held] = states[:, :, : self.held]
            states = roomier
        states[:, :, self.held : end] = new
        return states

    def _capacity(self, tokens: int) -> int:
        return -(-tokens // self.ROOM) * self.ROOM


def _draw(logits: torch.Tensor, how: Sampling, generator: torch.Generator) -> torch.Tensor:
    best, ids = logits.topk(how.top_k)
    picked = torch.multinomial((best / how.temperature).softmax(-1), 1, generator=generator)
    return ids.gather(1, picked)
