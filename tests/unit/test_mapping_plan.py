"""Plans of the published pairs: the published sizes, from shapes alone."""

from __future__ import annotations

import pytest

from mapper import plan, presets
from mapper.errors import UnsupportedModel


def test_sizes_span_the_published_range() -> None:
    """arXiv 2608.03893 gives 1.0 to 3.4 billion parameters over its six pairs."""
    sizes = [plan.run(name)["methods"][0]["parameters"] / 1e9 for name in presets.names()]
    assert len(sizes) == 6
    assert min(sizes) == pytest.approx(1.0, rel=0.02)
    assert max(sizes) == pytest.approx(3.4, rel=0.02)


def test_head_local_takes_an_eighth_at_eight_heads() -> None:
    full, local, blocks = plan.run("qwen3-14b-32b")["methods"]
    assert full["parameters"] == 64 * 2 * (8 * 1024 * 1024 + 1024)
    assert local["parameters"] == pytest.approx(full["parameters"] / 8, rel=0.001)
    assert blocks["parameters"] == local["parameters"]
    assert local["moments_bytes"] < blocks["narrow_moments_bytes"] / 7
    assert blocks["narrow_moments_bytes"] == full["moments_bytes"] < blocks["moments_bytes"] / 4
    assert local["share_of_prefill"] < full["share_of_prefill"] < 0.05


def test_an_unknown_pair_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel, match="qwen3-8b-32b"):
        plan.run("qwen9")
