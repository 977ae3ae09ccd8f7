"""CPU attention that pays only for new tokens after a prefix hit.

SGLang's `torch_native` backend pads an extend's queries to the full sequence, so that ten
new tokens behind 6,000 cached ones cost as much as prefilling all 6,010. With it, no cache
hit of any kind would show on a CPU. This backend computes the new rows alone.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

# Rows of queries a call: bounds the mask (rows x sequence) for long prompts, and lets
# each block stop at its own last key instead of the sequence's.
_ROWS = 512


class NewRowsAttnBackend(TorchNativeAttnBackend):
    """`torch_native` whose extend computes attention for the new tokens only."""

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        windowed = sliding_window_size is not None and sliding_window_size > -1
        if not causal or is_cross_attn or encoder_lens is not None or windowed:
            return super()._run_sdpa_forward_extend(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                scaling=scaling,
                enable_gqa=enable_gqa,
                causal=causal,
                is_cross_attn=is_cross_attn,
                sliding_window_size=sliding_window_size,
            )

        start = 0
        for slot, total, prefix, new in zip(
            req_pool_indices.tolist(),
            seq_lens.tolist(),
            extend_prefix_lens.tolist(),
            extend_seq_lens.tolist(),
            strict=True,
        ):
            tokens = req_to_token[slot, :total]
            # [heads, tokens, head_dim]; float8 caches are widened to the query's dtype.
            keys = k_cache[tokens].transpose(0, 1).to(query.dtype)
            values = v_cache[tokens].transpose(0, 1).to(query.dtype)
            rows = query[start : start + new].transpose(0, 1)
            for first in range(0, new, _ROWS):
                last = min(first + _ROWS, new)
                visible = prefix + last
                # A fresh prompt's first block is plainly causal, which needs no mask.
                square = prefix + first == 0
                mask = None
                if last - first > 1 and not square:
                    positions = torch.arange(prefix + first, visible)
                    mask = torch.arange(visible)[None, :] <= positions[:, None]
                attended = scaled_dot_product_attention(
                    rows[None, :, first:last],
                    keys[None, :, :visible],
                    values[None, :, :visible],
                    attn_mask=mask,
                    is_causal=square,
                    enable_gqa=enable_gqa,
                    scale=scaling,
                )
                output[start + first : start + last] = attended[0].transpose(0, 1)
            start += new
        return output


def register() -> None:
    """Puts the backend in `torch_native`'s place in SGLang's registry."""

    @register_attention_backend("torch_native")
    def create(runner: Any) -> NewRowsAttnBackend:
        return NewRowsAttnBackend(runner)
