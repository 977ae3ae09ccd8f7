"""Whitened coordinates: unit covariance in every block, and maps that compute the same in both coordinates."""

from __future__ import annotations

import pytest
import torch

from mapper.methods.whiten import Whitening
from tests.unit.test_mapping_maps import maps


def uneven(rows: int = 400) -> dict[str, torch.Tensor]:
    """Features whose channels differ in mean, in size by a factor of sixty, and are mixed within each block."""
    torch.manual_seed(1)
    sizes = torch.tensor([3.0, 1.0, 0.5, 0.05])
    mixed = torch.linalg.qr(torch.randn(4, 4)).Q
    return {
        kind: (torch.randn(2, rows, 3, 4) * sizes) @ mixed + torch.randn(2, 1, 3, 4)
        for kind in ("k", "v")
    }


def test_blocks_have_unit_covariance() -> None:
    x = uneven()
    halves = [
        {kind: part[:, rows] for kind, part in x.items()} for rows in (slice(150), slice(150, None))
    ]
    white = Whitening(halves).features(x)["k"].permute(0, 2, 3, 1)
    for head in white:
        for block in head:
            # the quietest direction is held below one by the floor
            assert torch.linalg.eigvalsh(torch.cov(block))[1:] == pytest.approx([1, 1, 1], rel=0.05)
            assert block.mean(1).abs().max() < 1e-2


@pytest.mark.parametrize("form", ["head-local", "all-head", "blocks"])
def test_a_map_computes_the_same_in_both_coordinates(form: str) -> None:
    x, one = uneven(), maps()[form]
    coordinates = Whitening([x])
    for kind in ("k", "v"):
        inside = coordinates.enter(one, kind)
        assert not torch.allclose(inside.weight, one.weight, atol=0.1)
        found = inside(coordinates.features(x), kind)
        torch.testing.assert_close(found, one(x, kind), atol=1e-3, rtol=1e-4)
        back = coordinates.leave(inside, kind)
        torch.testing.assert_close(back.weight, one.weight, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(back.bias, one.bias, atol=1e-3, rtol=1e-4)


def test_a_block_that_never_changes_stays_finite() -> None:
    x = uneven()
    x["k"][0, :, 1] = 3.0
    coordinates = Whitening([x])
    assert all(part.isfinite().all() for part in coordinates.features(x).values())
    assert coordinates.enter(maps()["all-head"], "k").weight.isfinite().all()
