"""Rotary embeddings as each model's own code computes them, applied to cached keys and undone."""

from __future__ import annotations

import importlib
from functools import cached_property
from types import ModuleType

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from mapper.errors import UnsupportedModel
from mapper.spec import ModelSpec

# Frequencies of these kinds change with the length of the sequence, so that a key
# in the cache does not say by which angle it was rotated.
_LENGTH_DEPENDENT = {"dynamic", "longrope"}


class Rotary:
    """The rotation of one model, in fp32, with its frequency and attention scaling.

    Keys have the shape [..., tokens, heads, head_dim] and `positions` [tokens]. A partial
    rotation leaves the remaining dimensions of a head alone.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        """
        Raises:
            UnsupportedModel: the rotation depends on the sequence length, or pairs the
                dimensions of a head otherwise than by halves.
        """
        kind = config.rope_parameters.get("rope_type", "default")
        if kind in _LENGTH_DEPENDENT:
            raise UnsupportedModel("rope", f"{kind!r} rotates by angles that depend on the length")
        self._module = _modeling_module(config)
        self._embedding = _rotary_class(self._module)(config)
        self.attention_scaling = float(self._embedding.attention_scaling)
        self._refuse_other_pairing()

    @classmethod
    def from_spec(cls, spec: ModelSpec) -> Rotary:
        """The rotation of the model that `spec` describes, without its files."""
        rope = dict(spec.rope)
        # Only silences Transformers' consistency warning; no frequency depends on it here.
        length = int(rope.get("original_max_position_embeddings", 1024) * rope.get("factor", 8))
        config = AutoConfig.for_model(
            spec.architecture,
            max_position_embeddings=length,
            hidden_size=spec.hidden_size,
            num_attention_heads=spec.attention_heads,
            num_key_value_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            rope_parameters=rope,
        )
        return cls(config)

    def apply(self, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Un-rotated keys -> keys as the model caches them (scaled by the attention scaling)."""
        cos, sin = self._tables(positions, k.device)
        return _rotate(k, cos, sin)

    def undo(self, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Cached keys -> un-rotated keys; the exact inverse of `apply`."""
        cos, sin = self._tables(positions, k.device)
        # Both tables carry the attention scaling s: turning back by them gives s^2 k.
        square = self.attention_scaling**2
        return _rotate(k, cos / square, -sin / square)

    def _tables(self, positions: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, ...]:
        """cos and sin [tokens, 1, rotary_dim / 2] in fp32, the attention scaling included."""
        embedding = self._embedding.to(device)
        cos, sin = embedding(
            torch.empty(0, dtype=torch.float32, device=device), positions.to(device)[None]
        )
        half = cos.shape[-1] // 2
        return cos[0, :, None, :half], sin[0, :, None, :half]

    @cached_property
    def rotary_dim(self) -> int:
        return 2 * self._tables(torch.zeros(1, dtype=torch.long), torch.device("cpu"))[0].shape[-1]

    def _refuse_other_pairing(self) -> None:
        """Compares `_rotate` with the model's own function on one random key."""
        width = self.rotary_dim
        generator = torch.Generator().manual_seed(0)
        key = torch.randn(1, 1, 2, width, generator=generator)
        positions = torch.tensor([3, 71])
        cos, sin = self._embedding(key, positions[None])
        own = self._module.apply_rotary_pos_emb(key, key, cos, sin)[1]
        ours = self.apply(key.transpose(1, 2), positions).transpose(1, 2)
        if not torch.allclose(own, ours, atol=1e-5):
            raise UnsupportedModel("rope", "the model pairs head dimensions in another order")


def _rotate(k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second = k[..., :half].float(), k[..., half : 2 * half].float()
    turned = (first * cos - second * sin, second * cos + first * sin, k[..., 2 * half :].float())
    return torch.cat(turned, dim=-1).to(k.dtype)


def _modeling_module(config: PretrainedConfig) -> ModuleType:
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        raise UnsupportedModel("architecture", f"{config.model_type!r} is no causal language model")
    return importlib.import_module(model_class.__module__)


def _rotary_class(module: ModuleType) -> type:
    classes = [
        value
        for name, value in vars(module).items()
        if name.endswith("RotaryEmbedding") and value.__module__ == module.__name__
    ]
    if len(classes) != 1 or not hasattr(module, "apply_rotary_pos_emb"):
        raise UnsupportedModel("architecture", f"no single rotary embedding in {module.__name__}")
    return classes[0]
