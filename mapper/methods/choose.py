"""Per-layer choice of k and of all-head or head-local, within a budget of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mapper.errors import CalibrationError
from mapper.methods.base import AffineMap, CacheMap
from mapper.methods.ridge import fit_layer, rank_layers
from mapper.methods.select import HeldOut
from mapper.moments import KINDS, Moments

# (head_local, k) tried for each target layer's keys and for its values.
CANDIDATES = ((True, 3), (True, 8), (False, 3), (False, 6), (False, 10))


@dataclass(frozen=True)
class Candidate:
    """A fitted map and the error it causes in held-out attention outputs after W_O."""

    layer_map: AffineMap
    error: float


def choose(
    moments: Moments,
    held: HeldOut,
    *,
    budget: int,
    ridge: float,
    report: Callable[[], None] = lambda: None,
) -> CacheMap:
    """Starts from the smallest maps and spends the budget where an upgrade lowers the error most
    per parameter.

    Raises:
        CalibrationError: too little text for even the smallest candidate, or a budget below it.
    """
    ranks = {flag: rank_layers(moments, head_local=flag) for flag in (True, False)}
    options: dict[tuple[str, int], list[Candidate]] = {}
    for layer in range(moments.shape.target_layers):
        for kind in KINDS:
            options[kind, layer] = _candidates(moments, held, kind, layer, ranks, ridge)
            report()
    chosen = {key: candidates[0] for key, candidates in options.items()}
    spent = sum(one.layer_map.parameters for one in chosen.values())
    if spent > budget:
        raise CalibrationError(f"the smallest maps have {spent} parameters, the budget is {budget}")
    while True:
        upgrades = [
            (gain / cost, key, better, cost)
            for key, now in chosen.items()
            for better in options[key]
            if (gain := now.error - better.error) > 0
            and (cost := better.layer_map.parameters - now.layer_map.parameters) > 0
            and spent + cost <= budget
        ]
        if not upgrades:
            break
        _, key, better, cost = max(upgrades, key=lambda upgrade: upgrade[0])
        chosen[key], spent = better, spent + cost
    layers = range(moments.shape.target_layers)
    return CacheMap(*([chosen[kind, layer].layer_map for layer in layers] for kind in KINDS))


def _candidates(moments, held, kind: str, layer: int, ranks, ridge: float) -> list[Candidate]:
    """The candidates that the text suffices for, smallest first."""
    shape, found = moments.shape, []
    for head_local, k in CANDIDATES:
        k = min(k, shape.source_layers)
        columns = k * (shape.head_dim if head_local else shape.layer_width)
        # Below twice as many rows as columns, the choice of k is one of noise.
        if moments.rows < 2 * columns:
            continue
        fitted = fit_layer(
            moments, kind, ranks[head_local][layer][:k], layer, head_local=head_local, ridge=ridge
        )
        found.append(Candidate(fitted, held.score(layer, **{f"{kind}_map": fitted}).error))
    if not found:
        raise CalibrationError(
            f"{moments.rows} rows are too few for any map; give at least "
            f"{2 * CANDIDATES[0][1] * shape.head_dim} tokens"
        )
    return sorted(found, key=lambda candidate: candidate.layer_map.parameters)
