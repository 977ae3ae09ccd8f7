"""Maps at run time: merged updates, gathered layers, and keys kept on a norm's sphere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapper import direction
from mapper.methods.base import AffineMap, CacheMap, LayerMap, by_head, on_norm_sphere, select
from mapper.methods.blocks import BlockMap
from mapper.methods.distill import Pupil, between
from mapper.methods.mlp import MlpMap

BLOCKS = (((0, 1), (2, 0)), ((1, 1), (2, 1)))


def maps() -> dict[str, LayerMap]:
    torch.manual_seed(0)
    bias = torch.randn(2, 4)
    hidden = torch.randn(2, 12, 6), torch.randn(2, 6), torch.randn(2, 6, 4)
    return {
        "head-local": AffineMap((0, 1, 2), torch.randn(2, 12, 4), bias),
        "all-head": AffineMap((0, 1, 2), torch.randn(1, 24, 8), bias),
        "blocks": BlockMap(BLOCKS, torch.randn(2, 8, 4), bias),
        "mlp": MlpMap((0, 1, 2), *hidden, bias),
    }


def features(rows: int = 5) -> dict[str, torch.Tensor]:
    return {kind: torch.randn(2, rows, 3, 4) for kind in ("k", "v")}


@pytest.mark.parametrize("form", ["head-local", "all-head", "blocks", "mlp"])
def test_every_tensor_of_a_map_is_trained_and_what_was_trained_runs(form: str) -> None:
    base, x = maps()[form], features()
    pupil = Pupil(base)
    assert torch.allclose(pupil(x, "v"), base(x, "v"), atol=1e-6)
    pupil(x, "v").square().sum().backward()
    assert all(value.grad.abs().sum() > 0 for value in pupil.values.values())
    with torch.no_grad():
        for value in pupil.values.values():
            value += torch.randn_like(value)
    trained = pupil.layer_map(torch.float32)
    assert torch.allclose(trained(x, "v"), pupil(x, "v"), atol=1e-5)
    assert not torch.allclose(base(x, "v"), trained(x, "v"), atol=0.1)
    assert trained.parameters == base.parameters == sum(v.numel() for v in base.tensors().values())


@pytest.mark.parametrize("form", ["head-local", "all-head", "blocks", "mlp"])
def test_each_row_is_mapped_by_itself_and_bfloat16_is_close(form: str) -> None:
    one, x = maps()[form], features(7)
    whole = one(x, "k")
    part = one({kind: value[:, 2:4] for kind, value in x.items()}, "k")
    assert torch.allclose(whole[:, 2:4], part, atol=1e-5)
    rounded = one.to("cpu", torch.bfloat16)({k: v.bfloat16() for k, v in x.items()}, "k")
    assert rounded.dtype == torch.float32
    assert torch.allclose(rounded, whole, atol=0.3, rtol=0.1)


def test_a_block_map_reads_the_heads_it_names() -> None:
    """Against a product written out by hand."""
    one, x = maps()["blocks"], features()
    for head, blocks in enumerate(BLOCKS):
        expected = one.bias[head].expand(5, 4).clone()
        for place, (layer, source) in enumerate(blocks):
            part = one.weight[head, 4 * place : 4 * place + 4]
            expected += x["v"][source, :, layer] @ part
        assert torch.allclose(one(x, "v")[head], expected, atol=1e-5)
        assert list(one.blocks_read(head)) == list(blocks)


@settings(deadline=None)
@given(layers=st.sets(st.integers(0, 6), min_size=1).map(lambda chosen: tuple(sorted(chosen))))
def test_selection_gathers_the_layers_in_order(layers: tuple[int, ...]) -> None:
    source = torch.arange(7 * 3 * 2 * 4.0).view(7, 3, 2, 4)
    rows = select(by_head(source), layers)
    assert rows.shape == (2, 3, 4 * len(layers))
    for place, layer in enumerate(layers):
        assert torch.equal(rows[:, :, 4 * place : 4 * place + 4], source[layer].transpose(0, 1))


def test_keys_are_put_back_on_the_sphere_of_their_norm() -> None:
    gains = torch.rand(3, 4) + 0.5
    exact = torch.randn(3, 5, 2, 4)
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True)) * gains[:, None, None]
    assert torch.allclose(on_norm_sphere(exact * 1.7, gains), exact, atol=1e-5)


@pytest.mark.parametrize("form", ["head-local", "all-head", "blocks"])
def test_half_of_the_way_between_two_maps_is_their_mean(form: str) -> None:
    start, x = maps()[form], features()
    end = replace(start, weight=torch.randn_like(start.weight), bias=torch.randn(2, 4))
    gains = torch.ones(1, 4)
    ends = CacheMap([start], [start], gains), CacheMap([end], [end], gains)
    for share, expected in ((0.0, start(x, "v")), (0.5, (start(x, "v") + end(x, "v")) / 2)):
        mixed = between(*ends, share)
        assert torch.allclose(mixed.v[0](x, "v"), expected, atol=1e-5)
        assert mixed.k[0].reads == start.reads and mixed.key_norms is gains


@pytest.mark.parametrize(
    ("best", "slope", "expected"),
    [(0.6, -0.01, 0.5), (2.0, -0.01, 1.0), (2.0, 0.003, 0.5), (0.6, 1.0, 0)],
)
def test_the_step_towards_a_distilled_map_is_the_one_that_helps_every_kind(
    monkeypatch, best: float, slope: float, expected: float
) -> None:
    """A map whose one coefficient goes from 0 to 1; KL is least at `best`, but for prose behind a tail."""

    def at(value: float) -> CacheMap:
        one = AffineMap((0,), torch.full((1, 1, 1), value), torch.zeros(1, 1))
        return CacheMap([one], [one])

    def kls(one: CacheMap, classroom, exam, tails) -> dict[tuple[str, int], float]:
        value = float(one.k[0].weight)
        prose = {("prose", tail): (slope if tail else -0.01) * value for tail in tails}
        return prose | {("chat", tail): (value - best) ** 2 for tail in tails}

    monkeypatch.setattr(direction, "distill", lambda *args, **kwargs: (at(1.0), 7))
    monkeypatch.setattr(direction, "evaluate", kls)
    found, record = direction._distill(at(0.0), None, direction.Text([], [], [], {}), 1)
    assert float(found.k[0].weight) == expected
    assert record["kept"] == bool(expected) and record["steps"] == 7
    if expected:
        assert record["share"] == expected
        assert record["held_out_kl_after"]["chat, tail 0"] == pytest.approx((expected - best) ** 2)
