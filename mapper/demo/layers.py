"""Runs chosen decoder layers of a Llama model by hand, so that pruning and distillation can share a prefix."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import LlamaForCausalLM


def run_layers(
    model: LlamaForCausalLM, hidden: torch.Tensor, layers: Iterable[nn.Module]
) -> torch.Tensor:
    """The hidden states after `layers`, for whole sequences that start at position 0."""
    positions = torch.arange(hidden.shape[1])[None]
    rotary = model.model.rotary_emb(hidden, positions)
    for layer in layers:
        # without a mask and without a cache, attention is causal
        hidden = layer(hidden, position_ids=positions, position_embeddings=rotary)
    return hidden
