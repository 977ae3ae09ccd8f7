"""Selective layer reuse in the manner of DroidSpeak (arXiv 2411.02820), for comparison.

Two models of one architecture can share caches layer by layer: most layers of the source's
cache are used as they are, and one contiguous group of layers, where reuse hurts most, is
recomputed by the target from the source's hidden states at the group's first layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import DynamicCache

from mapper.capture.model import CapturedModel, stack_cache
from mapper.errors import UnsupportedModel
from mapper.quality.arms import KV, Arm, Span

# Share of the layers that is recomputed, and places that are tried for the group.
RECOMPUTED = 0.25
PLACES = 8
NAME = "selective layer reuse"


def require_same_architecture(source: CapturedModel, target: CapturedModel) -> None:
    """
    Raises:
        UnsupportedModel: the models differ in more than their weights; `field` names where.
    """
    for field in ("architecture", "layers", "hidden_size", "attention_heads", "kv_heads",
                  "head_dim", "rope"):  # fmt: skip
        mine, other = getattr(source.spec, field), getattr(target.spec, field)
        if mine != other:
            raise UnsupportedModel(
                field, f"{NAME} needs models of one architecture, but {mine!r} is not {other!r}"
            )


def recomputing(source: CapturedModel, target: CapturedModel, group: range) -> Arm:
    """The source's cache with the layers of `group` recomputed by the target.

    Raises:
        UnsupportedModel: the architectures differ.
    """
    require_same_architecture(source, target)

    def convert(span: Span) -> KV:
        k, v = (part.clone() for part in span.source)
        if len(group):
            own = recompute(source, target, span.ids, group)
            for part, fresh in zip((k, v), own, strict=True):
                part[group.start : group.stop] = fresh[:, span.start :]
        return k, v

    return Arm(f"{NAME} ({len(group)} of {len(target.model.base_model.layers)})",
               "comparator", convert)  # fmt: skip


@torch.inference_mode()
def recompute(source: CapturedModel, target: CapturedModel, ids: torch.Tensor, group: range) -> KV:
    """k, v [len(group), tokens, kv_heads, head_dim] of `ids`, from the source's hidden states."""
    hidden = _hidden_states(source, ids, group.start)
    base = target.model.base_model
    positions = torch.arange(len(ids))[None]
    rotation = base.rotary_emb(hidden, positions)
    cache = DynamicCache()
    for index in group:
        hidden = base.layers[index](
            hidden,
            position_ids=positions,
            past_key_values=cache,
            position_embeddings=rotation,
        )
    cache.layers = cache.layers[group.start : group.stop]
    return stack_cache(cache)


def best_group(
    source: CapturedModel, target: CapturedModel, divergence: Callable[[Arm], float]
) -> range:
    """The place of the recomputed group with the lowest `divergence`, among evenly spread ones."""
    layers = target.spec.layers
    size = max(1, round(RECOMPUTED * layers))
    starts = torch.linspace(0, layers - size, min(PLACES, layers - size + 1)).round().long()
    groups = [range(start, start + size) for start in starts.unique().tolist()]
    return min(groups, key=lambda group: divergence(recomputing(source, target, group)))


def _hidden_states(model: CapturedModel, ids: torch.Tensor, layer: int) -> torch.Tensor:
    """What enters a layer, [1, tokens, hidden_size]; the layers after it are not computed."""

    class Enough(Exception):
        pass

    found = []

    def stop(module, args, kwargs) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])
        raise Enough

    hook = model.model.base_model.layers[layer].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model.model.base_model(input_ids=ids[None], use_cache=False)
    except Enough:
        pass
    finally:
        hook.remove()
    return found[0]
