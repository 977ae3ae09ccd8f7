"""The published method, refitted from a baseline's moments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from mapper.artifact import Artifact
from mapper.calibrate import checkpoint_path
from mapper.methods.base import AffineMap, CacheMap
from mapper.methods.ridge import system
from mapper.moments import Moments
from mapper.quality.arms import Arm, published

# The paper's penalty is absolute, on the sums over all rows; its size is not given.
ABSOLUTE_RIDGE = 1.0


def published_arm(folder: Path, baseline: Artifact) -> Arm:
    """arXiv 2608.03893 as published: all heads, absolute ridge, position 0 mapped, no tail.

    Reads the same source layers as the baseline. Without the baseline's moments beside it
    (`FOLDER.moments`) its own maps are used, and the ridge is then the baseline's relative one.
    """
    name = "published: position 0 mapped"
    moments, maps = checkpoint_path(folder), baseline.maps
    all_heads = maps is not None and all(
        isinstance(one, AffineMap) and not one.head_local for one in (*maps.k, *maps.v)
    )
    if not all_heads or not moments.is_file():
        return published(name, baseline)
    sums = Moments.load(moments)
    maps = CacheMap(
        *([_absolute(sums, kind, layer, one) for layer, one in enumerate(getattr(baseline.maps, kind))]
          for kind in ("k", "v")),
        baseline.maps.key_norms,
    )  # fmt: skip
    empty = torch.empty(0)
    return published(f"{name}, absolute ridge", Artifact(baseline.manifest, maps, (empty, empty)))


def _absolute(sums: Moments, kind: str, layer: int, like: AffineMap) -> AffineMap:
    equations = system(sums, kind, like.layers, layer, None)
    weight, bias = equations.solve(ABSOLUTE_RIDGE / float(equations.xx.diagonal().mean()))
    return replace(like, weight=weight[None].float(), bias=bias.view_as(like.bias).float())
