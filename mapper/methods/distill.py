"""Distillation: a fitted map's own tensors, trained on what a user sees of them.

The loss is the forward KL(native || mapped) of the target's next tokens on top of a mapped prefix,
in a short window after the hand-over (after the distillation reported beside arXiv 2609.00891;
there a low-rank update, here all of the map: it is small beside the model that it is trained
through). It starts from the closed-form fit, without which it does not converge, and works in whitened
coordinates of the source's features. No parameter is added. Several hand-overs of one document share one mapped
prefix and one pass of the target. Half of the documents are handed over with a native tail, where only what stands
far above still depends on the map.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import DynamicCache

from mapper.capture.grouped import GROUPED_ATTENTION
from mapper.capture.model import CapturedModel
from mapper.capture.texts import Document
from mapper.methods.base import (
    CacheMap,
    LayerMap,
    as_features,
    map_layers,
    on_norm_sphere,
    wide_inputs,
)
from mapper.methods.forward_kl import forward_kl
from mapper.methods.parallel import item_threads, set_mean_gradient
from mapper.methods.whiten import Whitening
from mapper.moments import KINDS

# Tokens after a hand-over that count: those further on hardly feel the prefix, and cost the same.
WINDOW = 40
# Documents of one step, each on a thread of its own.
DOCUMENTS = 2
# Native tails of a step's documents, in turn, and hand-overs of each document: about as many tokens with a tail as without.
TAILS = (0, 64)
HAND_OVERS = {0: 8, 64: 4}
# The shortest prefix before a hand-over.
SHORTEST_PREFIX = 32
# Prefilling a document on both models costs half as much as a step with it: so many are kept at a time, and each is
# taught so often, at other places, before the next ones are prefilled.
KEPT = 32
VISITS = 2
# Kinds of documents in turn, however many there are of each: a map that is not better on all of them is not kept. With
# quotes at every fourth turn the last of the way lowered their KL at the dialogues' expense.
TURNS = ("chat", "chat", "chat", "recall", "chat", "prose")
WARM_UP = 20
# Step of the optimiser relative to the size of what it changes.
RATE = 2e-3
# What a new loss counts in the running mean of its kind of text and tail.
RECENT = 0.05


@dataclass(frozen=True)
class Lesson:
    """What one document teaches.

    `features` are the source's, `sink` the target's k, v [layers, 1, kv_heads, head_dim] at
    position 0, `hidden` [tokens, hidden_size] its last hidden states, after the final norm.
    """

    document: Document
    features: dict[str, torch.Tensor]
    sink: tuple[torch.Tensor, torch.Tensor]
    hidden: torch.Tensor


class Pupil(nn.Module):
    """A layer's map with all of its tensors trainable."""

    def __init__(self, base: LayerMap) -> None:
        super().__init__()
        self.base = base
        self.values = nn.ParameterDict({name: v.clone() for name, v in base.tensors().items()})

    def forward(self, features: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
        return self.layer_map(features[kind].dtype)(features, kind)

    def layer_map(self, dtype: torch.dtype) -> LayerMap:
        """The map as it is now; what is multiplied in `dtype`, what is added in fp32."""
        return replace(
            self.base,
            **{
                name: value if name.startswith("bias") else value.to(dtype)
                for name, value in self.values.items()
            },
        )


def fastest_dtype() -> torch.dtype:
    """bfloat16 where the CPU multiplies it natively (four times as fast), else float32."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


class Classroom:
    """The target in the dtype that trains fastest here, frozen, and lessons in the same dtype.

    `wide`: whether the maps to be taught read `wide_inputs`.
    """

    def __init__(self, source: CapturedModel, target: CapturedModel, *, wide: bool) -> None:
        self.dtype, self.wide = fastest_dtype(), wide
        self.source, self.target = (
            CapturedModel(model.folder, spec=model.spec, dtype=self.dtype)
            for model in (source, target)
        )
        self.target.model.set_attn_implementation(GROUPED_ATTENTION)
        self.head = self.target.model.lm_head.weight

    @torch.no_grad()
    def features(self, document: Document) -> dict[str, torch.Tensor]:
        """What maps read of the source, [heads, tokens, layers, head_dim]."""
        theirs = self.source.prefill(document.ids)
        unrotated = self.source.rotary.undo(theirs.k, torch.arange(len(document.ids)))
        inputs = {"k": unrotated, "v": theirs.v}
        return as_features(wide_inputs(*inputs.values()) if self.wide else inputs)

    @torch.no_grad()
    def lesson(self, document: Document) -> Lesson:
        """Prefills the document on both models."""
        own = self.target.model.base_model(input_ids=document.ids[None], use_cache=False)
        sink = self.target.prefill(document.ids[:1])
        return Lesson(document, self.features(document), (sink.k, sink.v), own.last_hidden_state[0])

    def loss(
        self,
        pupils: dict[str, Sequence[Pupil]],
        key_norms: torch.Tensor | None,
        lesson: Lesson,
        hand_overs: Sequence[int],
        *,
        tail: int = 0,
    ) -> torch.Tensor:
        """Mean KL(native || mapped) in nats over the tokens after each hand-over.

        The last `tail` tokens before each are the target's own.
        """
        places = torch.tensor(hand_overs)
        # A tail longer than the prompt leaves nothing to map but position 0, which is exact.
        starts = (places - tail).clamp_min(1)
        longest, window = int(starts.max()), WINDOW + tail
        features = {kind: part[:, :longest] for kind, part in lesson.features.items()}
        k, v = (map_layers(list(pupils[kind]), features, kind) for kind in ("k", "v"))
        if key_norms is not None:
            k = on_norm_sphere(k, key_norms)
        k = self.target.rotary.apply(k, torch.arange(longest))
        k, v = (
            torch.cat((own, mapped[:, 1:].to(self.dtype)), dim=1)
            for own, mapped in zip(lesson.sink, (k, v), strict=True)
        )
        at = starts[:, None] + torch.arange(window)
        inside = (at >= places[:, None]) & (at < places[:, None] + WINDOW)
        inside &= at < len(lesson.document.ids)
        at = at.clamp(max=len(lesson.document.ids) - 1)
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(k, v, strict=True)):
            parts = (
                part.transpose(0, 1)[None].expand(len(starts), -1, -1, -1)
                for part in (keys, values)
            )
            cache.update(*parts, layer)
        hidden = self.target.model.base_model(
            input_ids=lesson.document.ids[at],
            position_ids=at,
            attention_mask=_mask(starts, window, longest),
            past_key_values=cache,
        ).last_hidden_state
        return forward_kl(hidden[inside], lesson.hidden[at[inside]], self.head, torch.zeros(1))


def distill(
    maps: CacheMap,
    classroom: Classroom,
    documents: Sequence[Document],
    *,
    seconds: float,
    report: Callable[[float], None] = lambda elapsed: None,
) -> tuple[CacheMap, int]:
    """Trains for `seconds`; returns the trained map and the steps taken.

    Memory does not grow with the documents: `KEPT` of them are prefilled at a time.
    """
    generator = torch.Generator().manual_seed(0)
    mixed = _mixed(documents, generator)
    coordinates = Whitening(map(classroom.features, itertools.islice(mixed, KEPT)))
    pupils = {
        kind: nn.ModuleList(Pupil(coordinates.enter(one, kind)) for one in getattr(maps, kind))
        for kind in KINDS
    }
    optimiser = torch.optim.Adam(_groups(pupils), betas=(0.9, 0.98))
    parameters = [p for group in optimiser.param_groups for p in group["params"]]

    balance = Balance()

    def gradient(lesson: Lesson, places: list[int], tail: int) -> tuple[torch.Tensor, ...]:
        seen = replace(lesson, features=coordinates.features(lesson.features))
        loss = classroom.loss(pupils, maps.key_norms, seen, places, tail=tail)
        weight = balance.weight((lesson.document.kind, tail), float(loss.detach()))
        return torch.autograd.grad(weight * loss, parameters)

    started, step = time.monotonic(), 0
    with item_threads(DOCUMENTS) as threads:
        taught = _taught(classroom, mixed, threads, generator)
        while (elapsed := time.monotonic() - started) < seconds:
            for group in optimiser.param_groups:
                warm_up = min(1.0, (step + 1) / WARM_UP)
                group["lr"] = group["peak"] * warm_up * (1 - elapsed / seconds)
            lessons = [next(taught) for _ in range(DOCUMENTS)]
            tails = [TAILS[at % len(TAILS)] for at in range(DOCUMENTS)]
            places = [
                _hand_overs(lesson.document, HAND_OVERS[tail], generator)
                for lesson, tail in zip(lessons, tails, strict=True)
            ]
            set_mean_gradient(parameters, threads.map(gradient, lessons, places, tails))
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            step += 1
            report(elapsed)
    trained = (
        [
            coordinates.leave(pupil.requires_grad_(False).layer_map(torch.float32), kind)
            for pupil in pupils[kind]
        ]
        for kind in KINDS
    )
    return CacheMap(*trained, maps.key_norms), step


class Balance:
    """Weights that keep the kinds of text with the largest KL from having nearly all of the gradient.

    Quotes have thirty times the KL of an answer behind a native tail. Each loss counts by the inverse root of the running
    mean of its kind and tail: halfway between the nats themselves, where the small ones rise unseen, and their
    logarithms, by which the large ones hardly fall.
    """

    def __init__(self) -> None:
        self._means: dict[tuple[str, int], float] = {}

    def weight(self, which: tuple[str, int], loss: float) -> float:
        before = self._means.get(which, loss)
        self._means[which] = before + RECENT * (loss - before)
        return max(self._means[which], 1e-4) ** -0.5


def between(start: CacheMap, end: CacheMap, share: float) -> CacheMap:
    """The map that is `share` of the way from one to another of the same form, in every coefficient."""

    def one(mine: LayerMap, other: LayerMap) -> LayerMap:
        theirs = other.tensors()
        mixed = {name: value.lerp(theirs[name], share) for name, value in mine.tensors().items()}
        return replace(mine, **mixed)

    pairs = (zip(getattr(start, kind), getattr(end, kind), strict=True) for kind in KINDS)
    return CacheMap(*([one(*pair) for pair in layers] for layers in pairs), start.key_norms)


def _mixed(documents: Sequence[Document], generator: torch.Generator) -> Iterator[Document]:
    """Endless: the kinds that there are, in turn, each kind's documents in random orders."""

    def endless(kind: str) -> Iterator[Document]:
        group = [document for document in documents if document.kind == kind]
        while True:
            for at in torch.randperm(len(group), generator=generator).tolist():
                yield group[at]

    there = {document.kind for document in documents}
    orders = {kind: endless(kind) for kind in there}
    for kind in itertools.cycle([kind for kind in TURNS if kind in there]):
        yield next(orders[kind])


def _taught(
    classroom: Classroom,
    documents: Iterator[Document],
    threads: ThreadPoolExecutor,
    generator: torch.Generator,
) -> Iterator[Lesson]:
    """Endless lessons: all of one group of documents in random orders, then those of the next."""
    while True:
        lessons = list(threads.map(classroom.lesson, itertools.islice(documents, KEPT)))
        for _ in range(VISITS):
            for at in torch.randperm(len(lessons), generator=generator).tolist():
                yield lessons[at]


def evaluate(
    maps: CacheMap, classroom: Classroom, documents: Sequence[Document], tails: Sequence[int]
) -> dict[tuple[str, int], float]:
    """Mean KL in nats per token after hand-overs, by kind of text and native tail: at the answers' beginnings of
    dialogues, at evenly spread places of prose.

    Documents are prefilled anew each time: kept, they would need some 50 MB each.
    """
    pupils = {kind: list(map(Pupil, getattr(maps, kind))) for kind in KINDS}

    @torch.no_grad()
    def kls(document: Document) -> list[float]:
        lesson, places = classroom.lesson(document), exam_places(document)
        return [
            float(classroom.loss(pupils, maps.key_norms, lesson, places, tail=tail))
            for tail in tails
        ]

    losses: dict[tuple[str, int], list[float]] = {}
    with item_threads(DOCUMENTS) as threads:
        for document, found in zip(documents, threads.map(kls, documents), strict=True):
            for tail, kl in zip(tails, found, strict=True):
                losses.setdefault((document.kind, tail), []).append(kl)
    return {which: sum(one) / len(one) for which, one in losses.items()}


def exam_places(document: Document) -> list[int]:
    """Where answers begin, in prose six evenly spread places."""
    last = len(document.ids) - 1
    places = [at for at in document.answers if SHORTEST_PREFIX <= at < last]
    return (
        places or torch.linspace(min(SHORTEST_PREFIX, last - 1), last - 1, 6).long()[:-1].tolist()
    )


def _hand_overs(document: Document, count: int, generator: torch.Generator) -> list[int]:
    """Half of them where answers begin, if there are any: there a session changes its model. First of all those
    to questions that follow up on an answer: behind a native tail the others hardly need what stands before it."""
    low, high = SHORTEST_PREFIX, max(len(document.ids) - WINDOW, SHORTEST_PREFIX + 1)
    places = torch.randint(low, high, (count,), generator=generator).clamp(
        max=len(document.ids) - 2
    )
    answers = [at for at in document.answers if low <= at < len(document.ids) - 1]
    mixed = [answers[place] for place in torch.randperm(len(answers), generator=generator)]
    chosen = sorted(mixed, key=lambda at: at not in document.follow_ups)[: count // 2]
    return chosen + places[len(chosen) :].tolist()


def _mask(starts: torch.Tensor, window: int, longest: int) -> torch.Tensor:
    """[hand_overs, 1, window, longest + window], true where each row sees the prefix before its own hand-over and
    its own tokens so far."""
    prefix = (torch.arange(longest) < starts[:, None])[:, None].expand(-1, window, -1)
    own = torch.ones(window, window, dtype=torch.bool).tril().expand(len(starts), -1, -1)
    return torch.cat((prefix, own), dim=2)[:, None]


def _groups(pupils: dict[str, nn.ModuleList]) -> list[dict]:
    """A parameter group a tensor, so that Adam's steps are alike relative to what they change."""
    return [
        {
            "params": [value],
            "peak": RATE * max(float(value.detach().square().mean().sqrt()), 1e-3),
            "lr": 0.0,
        }
        for modules in pupils.values()
        for pupil in modules
        for value in pupil.values.values()
    ]
