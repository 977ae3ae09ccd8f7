"""Maps at run time: merged updates, gathered layers, and keys kept on a norm's sphere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mapper.methods.base import AffineMap, by_head, on_norm_sphere, select
from mapper.methods.distill import Adapter


@pytest.mark.parametrize("size", [(2, 12, 4), (1, 24, 8)], ids=["head-local", "all-head"])
def test_a_merged_update_maps_as_the_trained_one(size) -> None:
    torch.manual_seed(0)
    base = AffineMap((0, 1, 2), torch.randn(size), torch.randn(2, 4))
    adapter = Adapter(base)
    x = torch.randn(2, 5, 12)
    with torch.no_grad():
        assert torch.allclose(adapter(x), base(x), atol=1e-6)
        adapter.up.normal_()
        adapter.bias.normal_()
        merged = adapter.merged()
        assert torch.allclose(adapter(x), merged(x), atol=1e-4)
        assert not torch.allclose(base(x), merged(x), atol=0.1)
    assert merged.parameters == base.parameters


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
