"""What is compared: variants, floors they cannot beat, and controls they must beat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch

from mapper.artifact import Artifact
from mapper.methods.base import CacheMap, IdentityMap, KVMap, LayerMap

KV = tuple[torch.Tensor, torch.Tensor]
Role = Literal["native", "variant", "comparator", "floor", "control"]


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of a prompt, from position `start`, in every cache that an arm may use.

    Each is k, v [layers, tokens, kv_heads, head_dim] as cached: `source` and `native` of the two
    models, `foreign` the source's of other text; `source_before` and `foreign_before` are of the token before the
    span, if there is one. `again` computes the native one a second time
    in other chunks. `ids` are the prompt's token ids from position 0 to the span's end.
    """

    ids: torch.Tensor
    start: int
    source: KV
    native: KV
    foreign: KV
    source_before: KV
    foreign_before: KV
    again: Callable[[], KV]

    @property
    def positions(self) -> torch.Tensor:
        return torch.arange(self.start, self.start + self.native[0].shape[1])


@dataclass(frozen=True)
class Arm:
    """One way to fill the target's cache. `tail`: whether it is judged with a native tail.

    `convert` gives k, v of a span in the target's shape, token by token: what it gives for a
    position never depends on the span's bounds. Unless `maps_sink`, position 0 is native.
    """

    name: str
    role: Role
    convert: Callable[[Span], KV]
    maps_sink: bool = False
    tail: bool = True

    def cache(self, span: Span) -> KV:
        k, v = self.convert(span)
        if span.start == 0 and not self.maps_sink:
            return tuple(
                torch.cat((own[:, :1], other[:, 1:]), dim=1)
                for own, other in zip(span.native, (k, v), strict=True)
            )
        return k, v


def native() -> Arm:
    return Arm("native", "native", lambda span: span.native)


def variant(name: str, artifact: Artifact) -> Arm:
    """An artifact as it would run."""
    return Arm(name, "variant", _mapped(artifact.compile()))


def published(name: str, artifact: Artifact) -> Arm:
    """A map in the setting of arXiv 2608.03893: position 0 mapped as any other, no native tail."""
    return Arm(name, "comparator", _mapped(artifact.compile()), maps_sink=True, tail=False)


def floors() -> list[Arm]:
    """The target's own cache: unchanged, rounded as between bf16 workers, computed twice."""
    return [
        Arm("floor: identity", "floor", lambda span: span.native),
        Arm("floor: bf16 round trip", "floor", lambda span: _rounded(span.native)),
        Arm("floor: native splice", "floor", lambda span: span.again()),
    ]


def controls(artifact: Artifact) -> list[Arm]:
    """No content; the source's cache unmapped; another text's, mapped; a map of noise."""
    wrong = _mapped(artifact.compile(), "foreign")
    arms = [
        Arm("control: zero", "control", _zero),
        Arm("control: raw", "control", _raw),
        Arm("control: wrong document", "control", wrong),
    ]
    if artifact.maps is not None:
        arms.append(Arm("control: random map", "control", _mapped(_random(artifact))))
    return arms


def _mapped(kv_map: KVMap | IdentityMap, which: str = "source") -> Callable[[Span], KV]:
    def convert(span: Span) -> KV:
        before, own = getattr(span, f"{which}_before"), getattr(span, which)
        k, v = (torch.cat(parts, dim=1) for parts in zip(before, own, strict=True))
        lead = before[0].shape[1]
        positions = torch.arange(span.start - lead, span.start - lead + k.shape[1])
        return tuple(part[:, lead:] for part in kv_map.apply(k, v, positions))

    return convert


def _rounded(cache: KV) -> KV:
    return tuple(part.bfloat16().float() for part in cache)


def _zero(span: Span) -> KV:
    return tuple(torch.zeros_like(part) for part in span.native)


def _raw(span: Span) -> KV:
    """Each target layer from the source layer at its relative depth."""
    layers, wanted = len(span.source[0]), len(span.native[0])
    depth = torch.linspace(0, layers - 1, wanted).round().long()
    return tuple(part[depth] for part in span.source)


def _random(artifact: Artifact) -> KVMap:
    """The artifact with each weight replaced by noise of the same size."""
    generator = torch.Generator().manual_seed(0)

    def noise(weight: torch.Tensor) -> torch.Tensor:
        size = weight.float().square().mean().sqrt()
        return (torch.randn(weight.shape, generator=generator) * size).to(weight.dtype)

    def noisy(one: LayerMap) -> LayerMap:
        weights = {
            field.name: noise(getattr(one, field.name))
            for field in fields(one)
            if torch.is_tensor(getattr(one, field.name)) and not field.name.startswith("bias")
        }
        return replace(one, **weights)

    maps = artifact.maps
    random = CacheMap(
        [noisy(one) for one in maps.k], [noisy(one) for one in maps.v], maps.key_norms
    )
    sinks = torch.empty(0)
    return Artifact(artifact.manifest, random, (sinks, sinks)).compile()
