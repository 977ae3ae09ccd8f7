"""Ridge from streamed moments: equal to a solver that sees all rows, and additive."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge

from mapper.errors import CalibrationError
from mapper.methods.base import CacheMap, by_head, select
from mapper.methods.ridge import fit_layer, rank_layers, system
from mapper.moments import Moments, PairShape

SHAPE = PairShape(source_layers=3, target_layers=2, kv_heads=2, head_dim=4)


def caches(seed: int, rows: int) -> tuple[dict, dict]:
    """A target whose layer 1 follows source layers 0 and 2, each head itself, plus noise."""
    generator = torch.Generator().manual_seed(seed)
    source = {kind: torch.randn(3, rows, 2, 4, generator=generator) + 1.5 for kind in "kv"}
    fixed = torch.Generator().manual_seed(7)
    target = {}
    for kind in "kv":
        weight = torch.randn(2, 2, 4, 4, generator=fixed)
        y = torch.randn(2, rows, 2, 4, generator=generator)
        mixed = torch.einsum("lnhd,lhde->nhe", source[kind][[0, 2]], weight)
        y[1] = mixed + 0.01 * y[1] - 2
        target[kind] = y
    return source, target


def moments_of(*parts: tuple[str, dict, dict], **layout: bool) -> Moments:
    moments = Moments.empty(SHAPE, "a->b", **layout)
    for name, source, target in parts:
        moments.add(name, source, target, tokens=source["k"].shape[1])
    return moments


@pytest.mark.parametrize("head_local", [True, False])
def test_equals_sklearn(head_local: bool) -> None:
    source, target = caches(0, 200)
    moments = moments_of(("a", source, target))
    layers, ridge = (0, 2), 1e-2
    fitted = fit_layer(moments, "k", layers, 1, head_local=head_local, ridge=ridge)
    x = select(by_head(source["k"]), layers)
    for head in range(2):
        rows = x[head] if head_local else x.transpose(0, 1).flatten(1)
        rows = rows.double().numpy()
        penalty = ridge * (rows - rows.mean(0)).__pow__(2).sum(0).mean()
        expected = Ridge(alpha=penalty).fit(rows, target["k"][1][:, head].double().numpy())
        ours = fitted.weight[head] if head_local else fitted.weight[0][:, head * 4 : head * 4 + 4]
        assert np.allclose(ours.numpy(), expected.coef_.T, atol=1e-5)
        assert np.allclose(fitted.bias[head].numpy(), expected.intercept_, atol=1e-4)


def test_r2_is_that_of_the_residuals() -> None:
    source, target = caches(1, 300)
    equations = system(moments_of(("a", source, target)), "v", [0, 2], 1, None)
    weight, bias = equations.solve(1e-6)
    x = select(by_head(source["v"]), (0, 2)).transpose(0, 1).flatten(1).double()
    y = target["v"][1].flatten(1).double()
    residual = (x @ weight + bias - y).square().sum(0)
    expected = 1 - residual / (y - y.mean(0)).square().sum(0)
    assert torch.allclose(equations.r2(weight), expected, atol=1e-8)
    assert expected.min() > 0.999


@settings(max_examples=20, deadline=None)
@given(rows=st.lists(st.integers(1, 30), min_size=2, max_size=5), seed=st.integers(0, 999))
def test_merged_moments_are_those_of_the_union(rows: list[int], seed: int) -> None:
    parts = [(f"d{i}", *caches(seed + i, n)) for i, n in enumerate(rows)]
    whole, merged = moments_of(*parts), moments_of(parts[0])
    merged.merge(moments_of(*parts[1:]))
    assert merged.rows == whole.rows == sum(rows)
    assert merged.documents == whole.documents
    for kind in "kv":
        for name, value in whole.sums[kind].parts.items():
            assert torch.allclose(merged.sums[kind].parts[name], value)


def test_sums_for_head_local_maps_are_enough_for_them_and_for_nothing_else() -> None:
    part = ("d", *caches(0, 60))
    whole, local = moments_of(part), moments_of(part, head_local=True)
    assert SHAPE.bytes(head_local=True) < SHAPE.bytes() / 1.8
    stored = sum(t.numel() * 8 for one in local.sums.values() for t in one.parts.values())
    assert stored == SHAPE.bytes(head_local=True)
    both = (fit_layer(m, "v", (0, 2), 1, head_local=True, ridge=1e-4) for m in (whole, local))
    first, second = both
    assert torch.allclose(first.weight, second.weight, atol=1e-5)
    assert rank_layers(whole, head_local=True) == rank_layers(local, head_local=True)
    with pytest.raises(CalibrationError, match="head-local"):
        fit_layer(local, "v", (0,), 1, head_local=False, ridge=1e-4)
    with pytest.raises(CalibrationError, match="cannot join"):
        whole.merge(moments_of(("e", *caches(1, 20)), head_local=True))


@pytest.mark.parametrize("head_local", [True, False])
def test_one_pass_gives_both_directions(head_local: bool, tmp_path) -> None:
    source, target = caches(0, 60)
    moments = moments_of(("d", source, target), head_local=head_local, both=True)
    moments.save(tmp_path / "m")
    backward = Moments.load(tmp_path / "m").reverse("b->a")
    expected = Moments.empty(SHAPE.reverse, "b->a", head_local=head_local)
    expected.add("d", target, source, tokens=60)
    options = {"head_local": head_local, "ridge": 1e-4}
    ours, theirs = (fit_layer(m, "k", (0, 1), 2, **options) for m in (backward, expected))
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-5)
    ranks = (rank_layers(m, head_local=head_local) for m in (backward, expected))
    assert next(ranks) == next(ranks)
    with pytest.raises(CalibrationError, match="one direction"):
        moments_of(("d", source, target)).reverse("b->a")


def test_a_document_counts_once() -> None:
    part = ("d", *caches(0, 20))
    twice = moments_of(part, part)
    assert twice.rows == 20
    with pytest.raises(CalibrationError, match="in both"):
        twice.merge(moments_of(part))


def test_checkpoint_round_trip_and_damage(tmp_path) -> None:
    moments = moments_of(("d", *caches(0, 20)))
    path = tmp_path / "m"
    moments.save(path)
    loaded = Moments.load(path)
    assert (loaded.rows, loaded.documents, loaded.shape) == (20, {"d": 20}, SHAPE)
    assert torch.equal(loaded.sums["v"].xy, moments.sums["v"].xy)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CalibrationError, match="cannot be read"):
        Moments.load(path)


def test_ranking_finds_the_layers_that_were_used() -> None:
    moments = moments_of(("d", *caches(3, 400)))
    for head_local in (True, False):
        assert set(rank_layers(moments, head_local=head_local)[1][:2]) == {0, 2}


def test_too_few_rows_are_refused_with_the_remedy() -> None:
    moments = moments_of(("d", *caches(0, 16)))
    with pytest.raises(CalibrationError, match="more text"):
        fit_layer(moments, "k", (0, 2), 1, head_local=False, ridge=1e-4)
    assert fit_layer(moments, "k", (0, 2), 1, head_local=True, ridge=1e-4).weight.shape == (2, 8, 4)


def test_non_finite_rows_are_refused() -> None:
    source, target = caches(0, 16)
    target["v"][1, 3, 0, 2] = float("inf")
    with pytest.raises(CalibrationError, match="non-finite v"):
        moments_of(("d", source, target))


def test_parameters_counts_weights_and_biases() -> None:
    moments = moments_of(("d", *caches(0, 60)))
    local, full = (
        fit_layer(moments, "k", (0, 2), 1, head_local=flag, ridge=1e-4) for flag in (True, False)
    )
    assert CacheMap([local], [full]).parameters == (2 * 8 * 4 + 8) + (16 * 8 + 8)
