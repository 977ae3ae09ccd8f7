"""A two-layer ReLU network for each target layer, head and K|V: the fallback for pairs that no
linear map serves (arXiv 2608.03893, appendix; there +24 to +37 points on the two failing pairs,
slightly worse on good ones). Head-local, trained by Adam on squared error; never chosen by itself.

It needs the rows themselves, a bounded number of them, not only the moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mapper.capture.pairs import Pair
from mapper.methods.base import Features, by_head, select

HIDDEN = 1024
BATCH = 512
STEPS = 600
RATE = 2e-3


@dataclass(frozen=True)
class MlpMap:
    """y = relu(x W1 + b1) W2 + b2. `hidden` [kv_heads, k * head_dim, width], `weight` [kv_heads,
    width, head_dim]; `bias_hidden` and `bias` likewise."""

    layers: tuple[int, ...]
    hidden: torch.Tensor
    bias_hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors().values())

    @property
    def reads(self) -> frozenset[int]:
        return frozenset(self.layers)

    def __call__(self, features: Features, kind: str) -> torch.Tensor:
        x = select(features[kind], self.layers)
        inner = torch.bmm(x, self.hidden).float() + self.bias_hidden[:, None]
        return torch.bmm(inner.relu().to(x.dtype), self.weight).float() + self.bias[:, None]

    def to(self, device: str, dtype: torch.dtype) -> MlpMap:
        return MlpMap(
            self.layers,
            self.hidden.to(device, dtype),
            self.bias_hidden.float().to(device),
            self.weight.to(device, dtype),
            self.bias.float().to(device),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("hidden", "bias_hidden", "weight", "bias")
        return {name: getattr(self, name).float().contiguous() for name in names}


def fit_mlp(
    pairs: Sequence[Pair],
    kind: str,
    layers: Sequence[int],
    target_layer: int,
    *,
    hidden: int = HIDDEN,
    steps: int = STEPS,
) -> MlpMap:
    """Trains the networks of all heads of one layer side by side on the pairs' rows."""
    layers = tuple(sorted(layers))
    x = torch.cat(
        [select(by_head(pair.source[kind]), layers)[:, 1:] for pair in pairs], dim=1
    ).float()
    y = torch.cat(
        [pair.target[kind][target_layer].transpose(0, 1)[:, 1:] for pair in pairs], dim=1
    ).float()
    # Trained on standardised rows; the scales are folded into the weights afterwards.
    x_mean, x_scale = x.mean(1, keepdim=True), x.std(1, keepdim=True).clamp_min(1e-6)
    y_mean, y_scale = y.mean(1, keepdim=True), y.std(1, keepdim=True).clamp_min(1e-6)
    x, y = (x - x_mean) / x_scale, (y - y_mean) / y_scale
    generator = torch.Generator().manual_seed(0)
    heads, rows, inputs = x.shape

    def start(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator) / size[-2] ** 0.5).requires_grad_()

    first, second = start(heads, inputs, hidden), start(heads, hidden, y.shape[2])
    bias_first = torch.zeros(heads, 1, hidden, requires_grad=True)
    bias_second = torch.zeros(heads, 1, y.shape[2], requires_grad=True)
    optimiser = torch.optim.Adam([first, bias_first, second, bias_second], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        chosen = torch.randint(rows, (min(BATCH, rows),), generator=generator)
        found = (x[:, chosen] @ first + bias_first).relu() @ second + bias_second
        (found - y[:, chosen]).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
    with torch.no_grad():
        scaled = first / x_scale.mT
        return MlpMap(
            layers,
            scaled,
            (bias_first - x_mean @ scaled)[:, 0],
            second * y_scale,
            (bias_second * y_scale + y_mean)[:, 0],
        )
