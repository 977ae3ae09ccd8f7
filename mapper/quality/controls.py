"""What a map is compared with: floors it cannot beat, and controls it must beat."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mapper.artifact import Artifact
from mapper.capture.model import Prefill
from mapper.methods.base import AffineMap, CacheMap, KVMap
from mapper.quality.divergence import Prefix, with_sink


def mapped(artifact: Artifact) -> Prefix:
    """The artifact as it would run, with position 0 exact."""
    return _through(artifact.compile())


def identity(theirs: Prefill, own: Prefill, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Floor: the target's own cache, taken out and put back."""
    return own.k, own.v


def rounded(theirs: Prefill, own: Prefill, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Floor: the target's own cache after a bfloat16 round trip, as between two bf16 workers."""
    return own.k.bfloat16().float(), own.v.bfloat16().float()


def zero(theirs: Prefill, own: Prefill, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Control: no content but position 0."""
    return with_sink((torch.zeros_like(own.k), torch.zeros_like(own.v)), own)


def raw(theirs: Prefill, own: Prefill, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Control: the source's cache as it is, each target layer from the source layer at its depth."""
    depth = torch.linspace(0, len(theirs.k) - 1, len(own.k)).round().long()
    return with_sink((theirs.k[depth], theirs.v[depth]), own)


def wrong_document(artifact: Artifact, prefills: Sequence[tuple[Prefill, Prefill]]) -> Prefix:
    """Control: the mapped cache of another conversation, as far as it reaches."""
    kv_map = artifact.compile()

    def prefix(theirs: Prefill, own: Prefill, index: int):
        other = prefills[(index + 1) % len(prefills)][0]
        tokens = own.k.shape[1]
        k, v = (
            part.repeat(1, tokens // part.shape[1] + 1, 1, 1)[:, :tokens]
            for part in (other.k, other.v)
        )
        return with_sink(kv_map.apply(k, v, torch.arange(tokens)), own)

    return prefix


def random_map(artifact: Artifact) -> Prefix:
    """Control: the artifact with each weight matrix replaced by noise of its own size."""
    generator = torch.Generator().manual_seed(0)

    def noise(one: AffineMap) -> AffineMap:
        rms = one.weight.square().mean().sqrt()
        weight = torch.randn(one.weight.shape, generator=generator) * rms
        return AffineMap(one.layers, weight, one.bias)

    maps = artifact.maps
    noisy = CacheMap([noise(one) for one in maps.k], [noise(one) for one in maps.v], maps.key_norms)
    same = Artifact(artifact.manifest, noisy, (torch.empty(0), torch.empty(0)))
    return _through(same.compile())


def _through(kv_map: KVMap) -> Prefix:
    def prefix(theirs: Prefill, own: Prefill, index: int):
        positions = torch.arange(theirs.k.shape[1])
        return with_sink(kv_map.apply(theirs.k, theirs.v, positions), own)

    return prefix
