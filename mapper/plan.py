"""What a map of a pair will take, from shapes alone: parameters, bytes, text and time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mapper import presets
from mapper.moments import PairShape
from mapper.presets import Preset

_FP32 = 4


@dataclass(frozen=True)
class MethodPlan:
    """One way to map the pair. Bytes are of fp32 tensors; `rows` is what the fit needs at least,
    `share_of_prefill` the map's arithmetic over that of prefilling the same tokens."""

    method: str
    k: int
    parameters: int
    bytes: int
    moments_bytes: int
    rows: int
    share_of_prefill: float


def run(pair: str) -> dict[str, Any]:
    """The plan of a preset pair: the paper's all-head map, and the head-local one beside it.

    Raises:
        UnsupportedModel: no such preset.
    """
    preset = presets.read(pair)
    target = preset.target
    kv_bytes = 2 * 2 * target.layers * target.kv_heads * target.head_dim
    return {
        "pair": pair,
        "source": preset.source.name,
        "target": target.name,
        "kv_bytes_per_token_bf16": kv_bytes,
        "published": preset.published,
        "methods": [
            asdict(plan_method(preset, head_local=head_local)) for head_local in (False, True)
        ],
    }


def plan_method(preset: Preset, *, head_local: bool) -> MethodPlan:
    """Sizes by counting: an all-head output reads k * kv_heads * head_dim inputs, a head-local
    one k * head_dim."""
    source, target = preset.source, preset.target
    width = target.kv_heads * target.head_dim
    inputs = preset.k * (target.head_dim if head_local else width)
    parameters = 2 * target.layers * (inputs + 1) * width
    shape = PairShape(source.layers, target.layers, target.kv_heads, target.head_dim)
    return MethodPlan(
        method="head-local" if head_local else "all-head",
        k=preset.k,
        parameters=parameters,
        bytes=_FP32 * parameters,
        moments_bytes=shape.bytes,
        rows=2 * inputs,
        share_of_prefill=2 * parameters / target.prefill_flops,
    )
