"""A tiny model to prune and heal, for tests of the demo's recipe."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from tests.tiny_pair import tiny_model

REMOVED = (2, 4)
IDS = torch.arange(40).reshape(2, 20)


def tiny(layers: int = 6) -> LlamaForCausalLM:
    return tiny_model(layers, seed=0, spread=0.2, tie_word_embeddings=True).eval()


def weights_of(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}


def model_from(weights: dict[str, torch.Tensor], layers: int) -> LlamaForCausalLM:
    model = tiny(layers)
    missing = model.load_state_dict(weights, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]) and not missing.unexpected_keys
    model.tie_weights()
    return model
