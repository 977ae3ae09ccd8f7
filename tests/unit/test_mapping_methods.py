"""Fits beyond ridge: blocks, attention repair, attention-aware values, networks, native tails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from mapper.capture.model import Prefill
from mapper.capture.pairs import Pair
from mapper.methods.attended import AttendedSums, Weighted, felt, mixtures, repair_share
from mapper.methods.base import CacheMap, by_head
from mapper.methods.blocks import BlockSearch, fit_blocks
from mapper.methods.mlp import fit_mlp
from mapper.methods.ridge import fit_layer
from mapper.methods.tail import TailPoint, choose_tail
from mapper.moments import Moments, PairShape

HEADS, WIDTH, LAYERS = 2, 4, 3
SHAPE = PairShape(source_layers=LAYERS, target_layers=1, kv_heads=HEADS, head_dim=WIDTH)


def paired(rows: int, *, seed: int = 0, noise: float = 0.01, bend: bool = False) -> Pair:
    """A target layer whose head h follows head 1 - h of source layer 2 and head h of layer 0."""
    draw = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(7)
    source = {kind: torch.randn(LAYERS, rows, HEADS, WIDTH, generator=draw) + 1 for kind in "kv"}
    target = {}
    for kind in "kv":
        turn, own = (torch.randn(HEADS, WIDTH, WIDTH, generator=fixed) for _ in range(2))
        x, z = source[kind][2].flip(1), source[kind][0]
        y = torch.einsum("nhd,hde->nhe", x, turn) + 0.3 * torch.einsum("nhd,hde->nhe", z, own)
        y = y.relu() if bend else y
        target[kind] = (y + noise * torch.randn(y.shape, generator=draw) - 2)[None]
    queries = torch.randn(1, 6, 2 * HEADS, WIDTH, generator=draw)
    positions = torch.arange(rows)
    asked = torch.linspace(4, rows - 1, 6).long()
    return Pair(
        f"{seed:08x}", source, target, positions, Prefill(target["k"], target["v"], queries, asked)
    )


def moments_of(*pairs: Pair) -> Moments:
    moments = Moments.empty(SHAPE, "a->b")
    for pair in pairs:
        moments.add(pair.digest, *pair.rows(1, wide=False), tokens=len(pair.positions))
    return moments


def error(layer_map, pair: Pair, kind: str) -> float:
    features = {kind: by_head(side) for kind, side in pair.source.items()}
    mapped = layer_map(features, kind).transpose(0, 1)
    return float((mapped - pair.target[kind][0])[1:].square().mean())


def test_block_search_finds_the_heads_that_were_used() -> None:
    moments = moments_of(paired(400))
    for kind in ("k", "v"):
        search = BlockSearch(moments, kind, 1e-6)
        for head in range(HEADS):
            path = search.path(0, head, 99)
            assert path[:2] == [(2, 1 - head), (0, head)]
            assert sorted(path) == sorted(search.names)


def test_blocks_reach_what_head_local_maps_of_the_same_size_cannot() -> None:
    moments, other = moments_of(paired(400)), paired(100, seed=1)
    search = BlockSearch(moments, "v", 1e-6)
    blocks = fit_blocks(moments, "v", [search.path(0, h, 2) for h in range(HEADS)], 0, ridge=1e-6)
    local = fit_layer(moments, "v", (0, 2), 0, head_local=True, ridge=1e-6)
    assert blocks.parameters == local.parameters
    assert error(blocks, other, "v") < 1e-3
    assert error(local, other, "v") > 0.3


def test_repair_weights_follow_their_formula() -> None:
    pair = paired(30)
    weights, attention = felt(pair, 0)
    native = pair.native
    for kind in ("k", "v"):
        for head in range(HEADS):
            expected = torch.zeros(30)
            for index, at in enumerate(native.query_positions):
                mass = torch.zeros(30)
                for query in native.queries[0, index, 2 * head : 2 * head + 2]:
                    a = (native.k[0, : at + 1, head] @ query).softmax(0)
                    values = native.v[0, : at + 1, head]
                    share = a.square()
                    if kind == "k":
                        distance = (values - a @ values).square().sum(1)
                        share = share * distance * query.square().sum() / WIDTH
                    mass[: at + 1] += share
                mass[0] = 0
                expected += mass / mass.sum()
            expected = expected[1:] / expected[1:].mean()
            assert torch.allclose(weights[kind][head], expected, rtol=1e-3, atol=1e-5)
    assert attention.shape == (HEADS, 12, 29)
    assert float(attention.sum(-1).max()) <= 1 + 1e-5


@pytest.mark.parametrize("head_local", [True, False])
def test_a_repair_is_ridge_with_sample_weights(head_local: bool) -> None:
    pair, ridge = paired(300, noise=1.0), 1e-3
    moments = moments_of(pair)
    base = fit_layer(moments, "k", (0, 2), 0, head_local=head_local, ridge=ridge)
    sums = AttendedSums(CacheMap([base], [base]), "repair")
    sums.add([pair], wide=False)
    refitted = sums.solve(moments, ridge=ridge).k[0]
    weights, _ = felt(pair, 0)
    columns = base.weight.shape[1]
    for head in range(HEADS):
        share = repair_share(sums.sums["k", 0, head], columns)
        assert 0 < share <= 1
        sample = (1 + share * (weights["k"][head] - 1)).double().numpy()
        assert sample.sum() ** 2 / np.square(sample).sum() >= 2 * columns - 0.01
        inputs = base.inputs({"k": by_head(pair.source["k"])}, "k")
        x = inputs[min(head, len(inputs) - 1), 1:].double().numpy()
        centred = x - np.average(x, axis=0, weights=sample)
        penalty = ridge * (sample @ np.square(centred)).mean()
        y = pair.target["k"][0, 1:, head].double().numpy()
        expected = Ridge(alpha=penalty).fit(x, y, sample_weight=sample)
        part = slice(head * WIDTH, head * WIDTH + WIDTH)
        ours = refitted.weight[head] if head_local else refitted.weight[0][:, part]
        assert np.allclose(ours.numpy(), expected.coef_.T, atol=1e-4)
        assert np.allclose(refitted.bias[head].numpy(), expected.intercept_, atol=1e-3)


def test_attention_aware_values_lower_the_error_of_mixtures() -> None:
    """Of the mixtures that attention makes of fitted rows, at the cost of the rows themselves."""
    pair = paired(200, noise=2.0, bend=True)
    moments = moments_of(pair)
    plain = fit_layer(moments, "v", (1, 2), 0, head_local=True, ridge=1e-4)
    sums = AttendedSums(CacheMap([plain], [plain]), "attention")
    sums.add([pair], wide=False)
    aware = sums.solve(moments, ridge=1e-4).v[0]
    _, attention = felt(pair, 0)

    def mixture_error(layer_map) -> float:
        mapped = layer_map({"v": by_head(pair.source["v"])}, "v")
        return sum(
            float((attention[head] @ (mapped[head] - pair.target["v"][0, :, head])[1:]).square().sum())
            for head in range(HEADS)
        )  # fmt: skip

    assert mixture_error(aware) < 0.95 * mixture_error(plain)
    assert error(aware, pair, "v") > error(plain, pair, "v")


def test_mixed_rows_keep_the_attention_that_position_0_leaves() -> None:
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    attention = torch.rand(4, 5) * 0.1
    mixed_x, mixed_y, weights = mixtures(x, y, attention)
    scale = weights.sqrt()[:, None]
    assert torch.allclose(mixed_x * scale, attention @ x, atol=1e-6)
    assert torch.allclose(mixed_y * scale, attention @ y, atol=1e-6)


def test_even_weights_are_repaired_fully_and_too_few_rows_not_at_all() -> None:
    sums = Weighted.zeros(2, 1)
    sums.add(torch.randn(40, 2), torch.randn(40, 1), torch.ones(40))
    assert repair_share(sums, 4) == 1.0
    assert repair_share(sums, 20) == 0.0


def test_a_network_fits_what_bends() -> None:
    pairs = [paired(400, seed=seed, bend=True) for seed in range(2)]
    other = paired(100, seed=9, bend=True)
    moments = moments_of(*pairs)
    linear = fit_layer(moments, "v", (0, 1, 2), 0, head_local=True, ridge=1e-6)
    network = fit_mlp(pairs, "v", (2, 0, 1), 0, hidden=64, steps=300)
    assert network.layers == (0, 1, 2)
    assert network.parameters == HEADS * (12 * 64 + 64 + 64 * WIDTH + WIDTH)
    assert error(network, pairs[0], "v") < error(linear, pairs[0], "v")
    assert error(network, other, "v") < 1.2 * error(linear, other, "v")


@pytest.mark.parametrize(
    ("kls", "tail"),
    [
        ((0.02, 0.01, 0.01, 0.01, 0.01), 0),
        ((0.11, 0.08, 0.06, 0.03, 0.02), 64),
        ((0.50, 0.40, 0.30, 0.29, 0.10), 32),
        ((0.50, 0.49, 0.10, 0.05, 0.04), 0),
    ],
)
def test_the_tail_is_the_shortest_that_is_good_or_pays(kls, tail: int) -> None:
    curve = [
        TailPoint(length, kl, 1.0) for length, kl in zip((0, 16, 32, 64, 128), kls, strict=True)
    ]
    assert choose_tail(curve) == tail
