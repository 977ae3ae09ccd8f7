"""`auto`: for each target layer's keys and values the form and size of map that pay most.

What a candidate is worth is what it does to held-out attention outputs after W_O, in the
currency of the target's next-token distribution (`select.Score.felt`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from mapper.errors import CalibrationError
from mapper.methods.base import CacheMap, LayerMap
from mapper.methods.blocks import BlockSearch, fit_blocks
from mapper.methods.ridge import fit_layer, rank_layers
from mapper.methods.select import HeldOut
from mapper.moments import KINDS, Moments

# Source layers read by head-local and all-head candidates, by all-head ones of wide inputs, and blocks a head of block
# maps.
HEAD_LOCAL, ALL_HEAD, ALL_HEAD_WIDE, BLOCKS = (3, 8), (3, 6, 10), (3, 6), (2, 4, 6, 9, 14, 20, 30)
# Parts of wide inputs that all-head candidates read of their layers: of keys those of both tokens, and everything; of
# values everything.
WIDE_PARTS = {"k": ((0, 1), (0, 1, 2, 3)), "v": ((0, 1),)}
# With fewer rows a coefficient, the choice is one of noise.
ROWS_PER_COLUMN = 2


@dataclass(frozen=True)
class Candidate:
    """A fitted map and the harm it does in held-out attention outputs after W_O."""

    layer_map: LayerMap
    harm: float


Options = dict[tuple[str, int], list[Candidate]]


def choose(
    moments: Moments,
    held: HeldOut,
    *,
    budget: int,
    ridge: float,
    report: Callable[[], None] = lambda: None,
) -> CacheMap:
    """Starts from the smallest maps and spends the budget where an upgrade lowers the harm most
    per parameter.

    Raises:
        CalibrationError: too little text for even the smallest candidate, or a budget below it.
    """
    return spend(candidates(moments, held, ridge=ridge, report=report), budget)


def candidates(
    moments: Moments, held: HeldOut, *, ridge: float, report: Callable[[], None]
) -> Options:
    """Every candidate of every target layer's keys and values, smallest first."""
    ranks = {flag: rank_layers(moments, head_local=flag) for flag in (True, False)}
    options: Options = {}
    for kind in KINDS:
        search = BlockSearch(moments, kind, ridge)
        for layer in range(moments.shape.target_layers):
            options[kind, layer] = [
                Candidate(fitted, held.score(layer, **{f"{kind}_map": fitted}).felt)
                for fitted in _candidates(moments, search, kind, layer, ranks, ridge)
            ]
            report()
    return options


def spend(options: Options, budget: int) -> CacheMap:
    """The choice from `options`, by kind and target layer, that `choose` describes."""
    chosen = {key: found[0] for key, found in options.items()}
    spent = sum(one.layer_map.parameters for one in chosen.values())
    if spent > budget:
        raise CalibrationError(f"the smallest maps have {spent} parameters, the budget is {budget}")
    while True:
        upgrades = [
            (gain / cost, key, better, cost)
            for key, now in chosen.items()
            for better in options[key]
            if (gain := now.harm - better.harm) > 0
            and (cost := better.layer_map.parameters - now.layer_map.parameters) > 0
            and spent + cost <= budget
        ]
        if not upgrades:
            break
        _, key, better, cost = max(upgrades, key=lambda upgrade: upgrade[0])
        chosen[key], spent = better, spent + cost
    layers = range(len(options) // len(KINDS))
    return CacheMap(*([chosen[kind, layer].layer_map for layer in layers] for kind in KINDS))


def _candidates(
    moments: Moments, search: BlockSearch, kind: str, layer: int, ranks, ridge: float
) -> list[LayerMap]:
    """Those that the text suffices for, smallest first."""
    shape = moments.shape
    most = moments.rows // ROWS_PER_COLUMN

    def fits(count: int, width: int, available: int) -> bool:
        return count <= available and count * width <= most

    found: list[LayerMap] = [
        fit_layer(moments, kind, ranks[local][layer][:k], layer, head_local=local, ridge=ridge)
        for local, sizes in ((True, HEAD_LOCAL), (False, ALL_HEAD))
        for k in sorted({min(k, shape.source_layers) for k in sizes})
        if fits(k, shape.head_dim if local else shape.layer_width, shape.source_layers)
    ]
    sizes = sorted({min(k, shape.source_layers) for k in ALL_HEAD_WIDE})
    for k, parts in itertools.product(sizes, WIDE_PARTS[kind]):
        own = ranks[False][layer][:k]
        read = [part * shape.source_layers + one for part in parts for one in own]
        there = max(read) < shape.inputs(kind)
        if there and fits(len(read), shape.layer_width, shape.inputs(kind)):
            found.append(fit_layer(moments, kind, read, layer, head_local=False, ridge=ridge))
    sizes = [m for m in BLOCKS if fits(m, shape.head_dim, len(search.names))]
    if sizes:
        paths = [search.path(layer, head, max(sizes)) for head in range(shape.kv_heads)]
        found += [
            fit_blocks(moments, kind, [path[:m] for path in paths], layer, ridge=ridge)
            for m in sizes
        ]
    if not found:
        raise CalibrationError(
            f"{moments.rows} rows are too few for any map; give at least "
            f"{ROWS_PER_COLUMN * min(BLOCKS) * shape.head_dim} tokens"
        )
    return sorted(found, key=lambda one: one.parameters)
