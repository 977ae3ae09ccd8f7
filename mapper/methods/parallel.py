"""The gradient of a small batch, each item on a thread of its own: cores need not wait for each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch


def item_threads(items: int) -> ThreadPoolExecutor:
    """A thread for each item of a batch; they share the cores that torch may use."""
    cores = max(1, torch.get_num_threads() // items)
    return ThreadPoolExecutor(items, initializer=torch.set_num_threads, initargs=(cores,))


def set_mean_gradient(
    parameters: Sequence[torch.nn.Parameter], gradients: Iterable[Sequence[torch.Tensor]]
) -> None:
    """Puts the mean of the items' `gradients`, each one tensor a parameter, into the parameters."""
    of_items = list(gradients)
    for parameter, *parts in zip(parameters, *of_items, strict=True):
        parameter.grad = sum(parts) / len(of_items)
