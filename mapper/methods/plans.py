"""How a layer's map is described in a manifest, and made again from its tensors."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from mapper.errors import BadArtifact
from mapper.methods.base import AffineMap, LayerMap
from mapper.methods.blocks import BlockMap
from mapper.methods.mlp import MlpMap
from mapper.moments import PARTS
from mapper.spec import ModelSpec


class LayerPlan(BaseModel):
    """How one target layer's keys or values are made."""

    model_config = ConfigDict(extra="forbid")

    form: Literal["all-head", "head-local", "blocks", "mlp"]
    # Source layers read, but for blocks: there (source layer, source head) of each target head; both
    # count on from the source's own in the order of `wide_inputs`.
    layers: list[int] = Field(default_factory=list)
    blocks: list[list[tuple[int, int]]] = Field(default_factory=list)
    ridge: float | None = None

    @classmethod
    def of(cls, layer_map: LayerMap, ridge: float) -> LayerPlan:
        if isinstance(layer_map, BlockMap):
            blocks = [list(head) for head in layer_map.blocks]
            return cls(form="blocks", blocks=blocks, ridge=ridge)
        if isinstance(layer_map, MlpMap):
            return cls(form="mlp", layers=list(layer_map.layers))
        form = "head-local" if layer_map.head_local else "all-head"
        return cls(form=form, layers=list(layer_map.layers), ridge=ridge)

    def __str__(self) -> str:
        read = self.layers or [f"{layer}.{head}" for part in self.blocks for layer, head in part]
        return f"{self.form} {','.join(map(str, read))}"


def layer_map(
    source: ModelSpec, plan: LayerPlan, tensors: dict[str, torch.Tensor], prefix: str
) -> LayerMap:
    """The map that `plan` describes, from the tensors whose names begin with `prefix`.

    Raises:
        BadArtifact: it reads what the source does not have, or its tensors have other shapes.
    """
    heads, width = source.kv_heads, source.head_dim
    blocks = [block for part in plan.blocks for block in part]
    read = {layer for layer, _ in blocks} | set(plan.layers)
    heads_read = {head for _, head in blocks}
    there = source.layers * PARTS[prefix[0]]
    if not read <= set(range(there)) or not heads_read <= set(range(heads)):
        raise BadArtifact(f"{prefix} reads {plan} of {source.layers} source layers")
    own = {
        name.removeprefix(f"{prefix}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}.")
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    mismatched = (plan.form == "blocks") != bool(plan.blocks)
    if mismatched or not read or shapes != _shapes(plan, heads, width, own):
        raise BadArtifact(f"{prefix} reads {plan} with the shapes {shapes}")
    if plan.form == "blocks":
        return BlockMap(tuple(tuple(part) for part in plan.blocks), own["weight"], own["bias"])
    kind = MlpMap if plan.form == "mlp" else AffineMap
    return kind(tuple(plan.layers), **own)


def _shapes(plan: LayerPlan, heads: int, width: int, own: dict[str, torch.Tensor]):
    """What a plan's tensors must be; of a network, the hidden width is its own."""
    inputs = len(plan.blocks[0] if plan.blocks else plan.layers) * width
    shapes = {"weight": (heads, inputs, width), "bias": (heads, width)}
    if plan.form == "all-head":
        shapes["weight"] = (1, heads * inputs, heads * width)
    if (
        plan.form == "blocks"
        and [len(part) for part in plan.blocks] != [len(plan.blocks[0])] * heads
    ):
        return None
    if plan.form == "mlp" and "bias_hidden" in own:
        hidden = own["bias_hidden"].shape[-1]
        shapes |= {
            "hidden": (heads, inputs, hidden),
            "bias_hidden": (heads, hidden),
            "weight": (heads, hidden, width),
        }
    return shapes
