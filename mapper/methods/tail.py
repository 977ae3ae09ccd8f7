"""The native tail: how many of a prompt's last tokens the target should prefill itself.

Each of them is paid for on the user's path, and buys answers that are closer to the target's own
(arXiv 2609.00891 and others). Measured on held-out text of the calibration: never on the text that
a map is later judged by.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mapper.capture.model import CapturedModel, build_cache
from mapper.capture.texts import Document
from mapper.methods.base import CacheMap
from mapper.methods.distill import Classroom, evaluate

TAILS = (0, 16, 32, 64, 128)
# Below this KL the answers of both caches are hard to tell apart.
KL_GOAL = 0.03
_REPEATS = 3


@dataclass(frozen=True)
class TailPoint:
    """KL in nats per token of answers with this tail, and the milliseconds of prefilling it."""

    tail: int
    kl: float
    ms: float


def tail_curve(
    maps: CacheMap, classroom: Classroom, documents: Sequence[Document], target: CapturedModel
) -> list[TailPoint]:
    """KL on dialogues among the documents (on all of them if there is none), time on the longest."""
    chats = [document for document in documents if document.kind == "chat"] or list(documents)
    longest = max((document.ids for document in chats), key=len)
    kls = evaluate(maps, classroom, chats, TAILS)
    return [
        TailPoint(tail, kls[chats[0].kind, tail], _milliseconds(target, longest, tail))
        for tail in TAILS
    ]


def choose_tail(curve: Sequence[TailPoint]) -> int:
    """The shortest tail that reaches the goal; when none does, the longest whose every step took at
    least a tenth of the KL away (a longer one costs more and changes little)."""
    for point in curve:
        if point.kl <= KL_GOAL:
            return point.tail
    chosen = curve[0]
    for point in curve[1:]:
        if point.kl > 0.9 * chosen.kl:
            break
        chosen = point
    return chosen.tail


@torch.inference_mode()
def _milliseconds(target: CapturedModel, ids: torch.Tensor, tail: int) -> float:
    """The best of a few: of the last prompt token and the tail before it, on top of a cache."""
    start = max(len(ids) - 1 - tail, 1)
    prefill = target.prefill(ids[:start])
    times = []
    for _ in range(_REPEATS):
        cache = build_cache(prefill.k, prefill.v)
        began = time.perf_counter()
        target.model(input_ids=ids[None, start:], past_key_values=cache, logits_to_keep=1)
        times.append(time.perf_counter() - began)
    return round(1000 * min(times), 2)
