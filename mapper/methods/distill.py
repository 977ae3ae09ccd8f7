"""Distillation: a low-rank update of a fitted map that minimises the target's forward KL.

The ridge map stays frozen; every map gets a rank-16 update and a free bias (after arXiv
2609.00891's successors: ridge initialisation is essential, full weights overfit). The loss is
KL(native || mapped) of the target's next tokens after a mapped prefix, which is what a user
sees of a map. The update is merged at the end: no parameter is added.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mapper.capture.model import CapturedModel, build_cache
from mapper.capture.texts import Document
from mapper.methods.base import AffineMap, CacheMap, by_head, on_norm_sphere, select

RANK = 16
# Tokens after the hand-over that count: those further on hardly feel the prefix, and cost the same.
WINDOW = 96
BATCH = 2
WARM_UP = 20
# Step of the optimiser relative to the size of what it changes.
RATE = 1e-2
UP_GAIN = 8.0


@dataclass(frozen=True)
class Lesson:
    """What one document teaches: source features, and the target's last hidden states."""

    ids: torch.Tensor
    features: dict[str, torch.Tensor]
    sink: tuple[torch.Tensor, torch.Tensor]
    hidden: torch.Tensor


class Adapter(nn.Module):
    """A frozen `AffineMap` with a low-rank update, differentiable in the update and the bias."""

    def __init__(self, base: AffineMap) -> None:
        super().__init__()
        self.base = base
        groups, rows, columns = base.weight.shape
        rank = min(RANK, columns)
        self.down = nn.Parameter(torch.randn(groups, rows, rank) / rows**0.5)
        self.up = nn.Parameter(torch.zeros(groups, rank, columns))
        self.bias = nn.Parameter(torch.zeros_like(base.bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x) + self.bias[:, None]
        if self.base.head_local:
            return y + x @ self.down @ self.up
        flat = x.transpose(0, 1).flatten(1) @ self.down[0] @ self.up[0]
        return y + flat.view(x.shape[1], x.shape[0], -1).transpose(0, 1)

    def merged(self) -> AffineMap:
        weight = self.base.weight + (self.down @ self.up).detach()
        return AffineMap(self.base.layers, weight, self.base.bias + self.bias.detach())


def prepare(
    source: CapturedModel, target: CapturedModel, documents: Sequence[Document]
) -> list[Lesson]:
    """Prefills each document once on both models; memory grows with the documents given."""
    lessons = []
    for document in documents:
        theirs = source.prefill(document.ids)
        positions = torch.arange(len(document.ids))
        with torch.inference_mode():
            hidden = target.model.base_model(input_ids=document.ids[None]).last_hidden_state[0]
        sink = target.prefill(document.ids[:1])
        features = {
            "k": by_head(source.rotary.undo(theirs.k, positions)).clone(),
            "v": by_head(theirs.v).clone(),
        }
        lessons.append(
            Lesson(document.ids, features, (sink.k.clone(), sink.v.clone()), hidden.clone())
        )
    return lessons


def distill(
    maps: CacheMap,
    target: CapturedModel,
    lessons: Sequence[Lesson],
    *,
    seconds: float,
    report: Callable[[float], None] = lambda elapsed: None,
) -> tuple[CacheMap, int]:
    """Trains for `seconds`; returns the merged map and the steps taken."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    adapters = {kind: nn.ModuleList(map(Adapter, getattr(maps, kind))) for kind in ("k", "v")}
    optimiser = torch.optim.Adam(_groups(adapters), betas=(0.9, 0.98))
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    started, step = time.monotonic(), 0
    while (elapsed := time.monotonic() - started) < seconds:
        warm_up = min(1.0, (step + 1) / WARM_UP)
        for group in optimiser.param_groups:
            group["lr"] = group["peak"] * warm_up * (1 - elapsed / seconds)
        for _ in range(BATCH):
            lesson = lessons[int(torch.randint(len(lessons), (1,), generator=generator))]
            start = _hand_over(len(lesson.ids), generator)
            loss = _loss(adapters, maps.key_norms, target, lesson, start, autocast=True)
            (loss / BATCH).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        step += 1
        report(elapsed)
    merged = ([adapter.merged() for adapter in adapters[kind]] for kind in ("k", "v"))
    return CacheMap(*merged, maps.key_norms), step


@torch.inference_mode()
def evaluate(maps: CacheMap, target: CapturedModel, lessons: Sequence[Lesson]) -> float:
    """Mean KL in nats per token after hand-overs in the middle of each document."""
    adapters = {kind: list(map(Adapter, getattr(maps, kind))) for kind in ("k", "v")}
    losses = [
        _loss(adapters, maps.key_norms, target, lesson, len(lesson.ids) // 2, autocast=False)
        for lesson in lessons
    ]
    return float(torch.stack(losses).mean())


def _groups(adapters: dict[str, nn.ModuleList]) -> list[dict]:
    """Parameter groups whose Adam steps are alike relative to the map they change."""
    groups = []
    for modules in adapters.values():
        for adapter in modules:
            rms = float(adapter.base.weight.square().mean().sqrt())
            spread = float(adapter.base.bias.square().mean().sqrt())
            groups += [
                {"params": [adapter.up], "peak": RATE * rms * UP_GAIN},
                {"params": [adapter.down], "peak": RATE * adapter.down.shape[1] ** -0.5},
                {"params": [adapter.bias], "peak": RATE * max(spread, 1e-3)},
            ]
    return [{**group, "lr": 0.0} for group in groups]


def _hand_over(tokens: int, generator: torch.Generator) -> int:
    """A random place with at least 16 tokens on each side."""
    return int(torch.randint(16, max(tokens - 16, 17), (1,), generator=generator))


def _loss(
    adapters, key_norms, target: CapturedModel, lesson: Lesson, start: int, *, autocast: bool
) -> torch.Tensor:
    """Mean KL(native || mapped) over the tokens after `start`, in nats.

    `autocast` runs the target's matrix products in bfloat16; the map itself stays in fp32.
    """
    cache = [
        torch.stack(
            [
                adapter(select(lesson.features[kind][:, :start], adapter.base.layers)).transpose(
                    0, 1
                )
                for adapter in adapters[kind]
            ]
        )
        for kind in ("k", "v")
    ]
    if key_norms is not None:
        cache[0] = on_norm_sphere(cache[0], key_norms)
    cache[0] = target.rotary.apply(cache[0], torch.arange(start))
    k, v = (
        torch.cat((own, mapped[:, 1:]), dim=1)
        for own, mapped in zip(lesson.sink, cache, strict=True)
    )
    stop = min(len(lesson.ids), start + WINDOW)
    model = target.model
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = model.base_model(
            input_ids=lesson.ids[None, start:stop], past_key_values=build_cache(k, v)
        ).last_hidden_state[0]
        native = model.lm_head(lesson.hidden[start:stop]).float().log_softmax(-1)
        mapped = model.lm_head(hidden).float().log_softmax(-1)
    return (native.exp() * (native - mapped)).sum(-1).mean()
