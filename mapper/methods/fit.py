"""From moments to maps, by the name of a method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, get_args

from mapper.capture.pairs import Pair
from mapper.methods.attended import AttendedSums, Refit
from mapper.methods.base import CacheMap, LayerMap
from mapper.methods.blocks import BlockSearch, fit_blocks
from mapper.methods.choose import choose
from mapper.methods.mlp import fit_mlp
from mapper.methods.ridge import fit_layer, rank_layers
from mapper.methods.select import HeldOut
from mapper.moments import KINDS, Moments

Method = Literal["auto", "all-head", "head-local", "blocks", "mlp", "identity"]
METHODS = get_args(Method)
# Methods whose maps may read all of `wide_inputs`.
WIDE = ("auto", "blocks")
# Methods whose maps need no sums between different heads.
HEAD_LOCAL = ("head-local", "mlp")


def columns(method: Method, k: int, kv_heads: int, head_dim: int) -> int:
    """Inputs of each output; a fit needs more rows than that. `auto` finds out by itself."""
    return {"auto": 0, "all-head": k * kv_heads * head_dim}.get(method, k * head_dim)


def fit(
    method: Method,
    moments: Moments,
    held: HeldOut,
    *,
    k: int,
    ridge: float,
    budget: int,
    pairs: Callable[[], Iterable[Pair]],
    report: Callable[[], None],
) -> CacheMap:
    """The maps of all layers; `report` is called after each layer and kind.

    Args:
        budget: parameters that `auto` may spend.
        pairs: the fitted documents once more, for methods that need their rows.
    """
    if method == "auto":
        return choose(moments, held, budget=budget, ridge=ridge, report=report)
    fit_one = _fitter(method, moments, k, ridge, pairs)
    fitted: dict[str, list[LayerMap]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        one = fit_one(kind)
        for layer in range(moments.shape.target_layers):
            fitted[kind].append(one(layer))
            report()
    return CacheMap(fitted["k"], fitted["v"])


def refit(
    maps: CacheMap,
    method: Refit,
    moments: Moments,
    held: HeldOut,
    pairs: Iterable[Pair],
    ridge: float,
) -> CacheMap:
    """Attention repair, or repair of keys and attention-aware values, of linear maps: each layer's
    refit is taken where it lowers the error of held-out attention outputs."""
    sums = AttendedSums(maps, method)
    sums.add(pairs, wide=maps.wide(moments.shape.source_layers))
    refitted = sums.solve(moments, ridge=ridge)
    better = {
        kind: [
            min(both, key=lambda one: held.score(layer, **{f"{kind}_map": one}).error)
            for layer, both in enumerate(
                zip(getattr(maps, kind), getattr(refitted, kind), strict=True)
            )
        ]
        for kind in KINDS
    }
    return CacheMap(better["k"], better["v"], maps.key_norms)


def _fitter(
    method: Method, moments: Moments, k: int, ridge: float, pairs: Callable[[], Iterable[Pair]]
) -> Callable[[str], Callable[[int], LayerMap]]:
    layers, heads = moments.shape.source_layers, range(moments.shape.kv_heads)
    if method == "blocks":

        def by_blocks(kind: str) -> Callable[[int], LayerMap]:
            search = BlockSearch(moments, kind, ridge)
            return lambda layer: fit_blocks(
                moments, kind, [search.path(layer, head, k) for head in heads], layer, ridge=ridge
            )

        return by_blocks
    ranked = rank_layers(moments, head_local=method != "all-head")
    chosen: Sequence[Sequence[int]] = [order[: min(k, layers)] for order in ranked]
    if method == "mlp":
        rows = list(pairs())
        return lambda kind: lambda layer: fit_mlp(rows, kind, chosen[layer], layer)
    return lambda kind: (
        lambda layer: fit_layer(
            moments, kind, chosen[layer], layer, head_local=method == "head-local", ridge=ridge
        )
    )
