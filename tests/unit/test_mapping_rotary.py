"""RoPE: undone exactly, relative in its scores, and equal to what the models themselves do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPTNeoXConfig, LlamaConfig, Ministral3Config, Qwen3Config

from mapper.errors import UnsupportedModel
from mapper.rotary import Rotary

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.1,
}
SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
CONFIGS = {
    "llama3": LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "qwen3": Qwen3Config(**SMALL),
    "ministral3": Ministral3Config(**SMALL, rope_parameters=YARN),
}
ROTARIES = {name: Rotary(config) for name, config in CONFIGS.items()}


def keys(seed: int, tokens: int) -> torch.Tensor:
    return torch.randn(2, tokens, 3, 16, generator=torch.Generator().manual_seed(seed))


def test_yarn_scales_attention() -> None:
    assert ROTARIES["ministral3"].attention_scaling == pytest.approx(1.2773, abs=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), start=st.integers(0, 100_000))
def test_undo_inverts_apply(name: str, seed: int, start: int) -> None:
    rotary, k, positions = ROTARIES[name], keys(seed, 5), torch.arange(start, start + 5)
    assert torch.allclose(rotary.undo(rotary.apply(k, positions), positions), k, atol=1e-5)
    if start:
        assert not torch.allclose(rotary.apply(k, positions), k, atol=1e-2)


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), gap=st.integers(0, 500), shift=st.integers(0, 2000))
def test_scores_depend_on_the_distance_only(name: str, seed: int, gap: int, shift: int) -> None:
    rotary = ROTARIES[name]
    q, k = keys(seed, 1)[:1], keys(seed + 1, 1)[:1]

    def score(query_at: int, key_at: int) -> torch.Tensor:
        turned = rotary.apply(q, torch.tensor([query_at])) * rotary.apply(k, torch.tensor([key_at]))
        return turned.sum(-1)

    assert torch.allclose(score(gap, 0), score(gap + shift, shift), atol=5e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_apply_equals_the_models_own(name: str) -> None:
    rotary, k, positions = ROTARIES[name], keys(0, 7), torch.arange(300, 307)
    cos, sin = rotary._embedding(k, positions[None])
    own = rotary._module.apply_rotary_pos_emb(k.transpose(1, 2), k.transpose(1, 2), cos, sin)[1]
    assert torch.allclose(rotary.apply(k, positions), own.transpose(1, 2), atol=1e-6)


def test_partial_rotation_leaves_the_rest() -> None:
    rotary = Rotary(
        GPTNeoXConfig(
            hidden_size=64,
            num_attention_heads=4,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        )
    )
    k, positions = keys(0, 4), torch.arange(9, 13)
    turned = rotary.apply(k, positions)
    assert rotary.rotary_dim == 8
    assert torch.equal(turned[..., 8:], k[..., 8:])
    assert not torch.allclose(turned[..., :8], k[..., :8])
    assert torch.allclose(rotary.undo(turned, positions), k, atol=1e-5)


def test_length_dependent_frequencies_are_refused() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="depend on the length"):
        Rotary(LlamaConfig(**SMALL, rope_parameters=dynamic))
