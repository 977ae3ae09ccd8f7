"""Many caches of one prompt side by side: one forward pass continues all of them."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from mapper.capture.model import CapturedModel

ALL_ROWS = slice(None)


class CacheBatch:
    """Caches of a model, one a row, in buffers that are written in place.

    A span that stays the same from one prompt to the next (worked examples, a passage) stays
    where it is: only what differs is written again.
    """

    def __init__(self, model: CapturedModel, rows: int, capacity: int) -> None:
        """`capacity`: tokens of the longest prompt with its continuation."""
        self.model, self.rows, self.capacity = model, rows, capacity
        spec, self.dtype = model.spec, model.model.dtype
        shape = (rows, spec.kv_heads, capacity, spec.head_dim)
        self._layers = [_Layer(shape, self.dtype) for _ in range(spec.layers)]

    def write(self, row: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Puts k, v [layers, tokens, kv_heads, head_dim] at positions `start` and on."""
        stop = start + k.shape[1]
        for layer, keys, values in zip(self._layers, k, v, strict=True):
            layer.keys[row, :, start:stop] = keys.transpose(0, 1)
            layer.values[row, :, start:stop] = values.transpose(0, 1)

    def read(self, start: int, stop: int, row: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v [layers, tokens, kv_heads, head_dim] of one row, in fp32."""
        return tuple(
            torch.stack([getattr(layer, kind)[row, :, start:stop] for layer in self._layers])
            .transpose(1, 2)
            .float()
            for kind in ("keys", "values")
        )

    @torch.inference_mode()
    def run(
        self,
        ids: torch.Tensor,
        start: int,
        rows: slice = ALL_ROWS,
        *,
        positions: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes `ids` on top of the first `start` tokens of the rows `rows`.

        Args:
            ids: [tokens] for all rows alike, or [rows, tokens].
            positions: [tokens]; the next ones by default.
            visible: bool [tokens, tokens], which of `ids` each sees; causal by default.

        Returns:
            Last hidden states [rows, tokens, hidden_size].
        """
        count = len(range(*rows.indices(self.rows)))
        ids = ids.expand(count, -1)
        tokens = ids.shape[1]
        if start + tokens > self.capacity:
            raise ValueError(f"{start + tokens} tokens in caches of {self.capacity}")
        for layer in self._layers:
            layer.length, layer.rows = start, rows
        mask = None
        if start and tokens > 1:
            if visible is None:
                visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
            seen = torch.ones(tokens, start, dtype=torch.bool)
            mask = torch.cat((seen, visible), dim=1)[None, None]
        elif visible is not None:
            mask = visible[None, None]
        if positions is None:
            positions = torch.arange(start, start + tokens)
        return self.model.model.base_model(
            input_ids=ids,
            position_ids=positions[None],
            attention_mask=mask,
            past_key_values=Cache(layers=self._layers),
            use_cache=True,
        ).last_hidden_state

    @torch.inference_mode()
    def logprobs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [..., vocabulary] in fp32 of hidden states [..., hidden_size]."""
        return self.model.model.get_output_embeddings()(hidden).float().log_softmax(-1)


class _Layer(CacheLayerMixin):
    """One layer's buffers [rows, kv_heads, capacity, head_dim], of which `length` are in use."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.is_initialized = True
        self.length, self.rows = 0, ALL_ROWS

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The buffers exist from the start."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        stop = self.length + key_states.shape[2]
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer[self.rows, :, self.length : stop] = states
        self.length = stop
        return self.keys[self.rows, :, :stop], self.values[self.rows, :, :stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1
