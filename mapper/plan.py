"""What a map of a pair will take, from shapes alone: parameters, bytes, text and time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from mapper import presets
from mapper.methods.fit import WIDE
from mapper.moments import PairShape
from mapper.presets import Preset

_FP32 = 4
METHODS = ("all-head", "head-local", "blocks")


@dataclass(frozen=True)
class MethodPlan:
    """One way to map the pair.

    Bytes are of fp32 tensors; `narrow_moments_bytes` those of the sums of a calibration with `--narrow`; `rows` is what the
    fit needs at least, `share_of_prefill` the map's arithmetic over that of prefilling the same tokens.
    """

    method: str
    k: int
    parameters: int
    bytes: int
    moments_bytes: int
    narrow_moments_bytes: int
    rows: int
    share_of_prefill: float


def run(pair: str) -> dict[str, Any]:
    """The plan of a preset pair: the paper's all-head map, and the smaller ones beside it.

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
        "methods": [asdict(plan_method(preset, method)) for method in METHODS],
    }


def plan_method(preset: Preset, method: str) -> MethodPlan:
    """Sizes by counting: an all-head output reads k * kv_heads * head_dim inputs, the others
    k * head_dim. Only head-local maps do without the sums between different heads."""
    source, target = preset.source, preset.target
    width = target.kv_heads * target.head_dim
    inputs = preset.k * (width if method == "all-head" else target.head_dim)
    parameters = 2 * target.layers * (inputs + 1) * width
    shape = PairShape(
        source.layers,
        target.layers,
        target.kv_heads,
        target.head_dim,
    )
    local = method == "head-local"
    return MethodPlan(
        method=method,
        k=preset.k,
        parameters=parameters,
        bytes=_FP32 * parameters,
        moments_bytes=replace(shape, wide=method in WIDE).bytes(head_local=local),
        narrow_moments_bytes=shape.bytes(head_local=local),
        rows=2 * inputs,
        share_of_prefill=2 * parameters / target.prefill_flops,
    )
