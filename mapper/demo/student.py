"""The student of the distillation: the kept layers of the frozen large model with trainable low-rank additions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm
from transformers import LlamaForCausalLM

from .layers import run_layers

LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS = ("input_layernorm", "post_attention_layernorm")


class LowRankLinear(nn.Module):
    """A frozen linear layer plus a trainable product of two thin matrices, zero at the start."""

    def __init__(self, frozen: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = frozen.weight
        inputs, outputs = frozen.in_features, frozen.out_features
        self.down = nn.Parameter(torch.randn(rank, inputs, generator=generator) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = linear(linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))
        return linear(x, self.weight) + low


class TrainableNorm(nn.Module):
    """An RMS norm whose weight is trained in fp32 while its input and output stay in the model's precision."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach().float().clone())
        self.epsilon = norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(x.dtype)


@dataclass(frozen=True)
class Lesson:
    """What the teacher says about rows: all [rows, length, hidden_size].

    `parting` are the states where student and teacher part, `last` the teacher's after the final norm, `streams`
    its normed inputs of each layer that follows a gap.
    """

    parting: torch.Tensor
    last: torch.Tensor
    streams: list[torch.Tensor]


class Student:
    """Runs beside its teacher: the layers before the first change are the teacher's own and are run once for both."""

    def __init__(self, teacher: LlamaForCausalLM, kept: list[int], rank: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.teacher = teacher.requires_grad_(False)
        gaps = [place for place in range(1, len(kept)) if kept[place] != kept[place - 1] + 1]
        # the layer before the first gap has to make up for it, so it is the first one that may change
        self.shared = gaps[0] - 1
        self.rejoins = [(place, kept[place]) for place in gaps]
        self.layers = nn.ModuleDict(
            {
                str(place): adapted(teacher.model.layers[layer], rank, generator)
                for place, layer in enumerate(kept)
                if place >= self.shared
            }
        )
        self.norm = TrainableNorm(teacher.model.norm)
        self._lessons: dict[bytes, Lesson] = {}

    def teach(self, ids: torch.Tensor) -> Lesson:
        """The lesson of `ids` [rows, length].

        It is remembered (7 KB a token), so that the teacher, a third of a step's work, reads each row once.
        """
        key = ids.numpy().tobytes()
        if key not in self._lessons:
            self._lessons[key] = self._run_teacher(ids)
        return self._lessons[key]

    @torch.no_grad()
    def _run_teacher(self, ids: torch.Tensor) -> Lesson:
        layers = self.teacher.model.layers
        embedded = self.teacher.model.embed_tokens(ids)
        parting = run_layers(self.teacher, embedded, layers[: self.shared])
        last, streams = self._walk(
            parting, layers[self.shared :], [layer for _, layer in self.rejoins]
        )
        return Lesson(parting, self.teacher.model.norm(last), streams)

    def follow(self, parting: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The student's last hidden states and its streams, as in a `Lesson`; streams pass the teacher's norms."""
        own = list(self.layers.values())
        last, streams = self._walk(parting, own, [place for place, _ in self.rejoins])
        return self.norm(last), streams

    def _walk(
        self, hidden: torch.Tensor, layers: Sequence[nn.Module], stops: list[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The states after all `layers`, which follow the shared ones, and the normed ones before each of `stops`."""
        streams, at = [], 0
        for stop, (_, layer) in zip(stops, self.rejoins, strict=True):
            hidden = run_layers(self.teacher, hidden, layers[at : stop - self.shared])
            streams.append(self.teacher.model.layers[layer].input_layernorm(hidden))
            at = stop - self.shared
        return run_layers(self.teacher, hidden, layers[at:]), streams

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable tensors under the names of the update file."""
        named = {
            f"model.layers.{name}": value
            for name, value in self.layers.named_parameters()
            if value.requires_grad
        }
        return named | {"model.norm.weight": self.norm.weight}


def adapted(layer: nn.Module, rank: int, generator: torch.Generator) -> nn.Module:
    """A copy of a decoder layer that shares its frozen weights; its norms and low-rank additions can be trained."""
    frozen = {id(value): value for value in layer.parameters()}
    twin = copy.deepcopy(layer, memo=frozen)
    for name in LINEARS:
        parent, child = name.split(".")
        holder = getattr(twin, parent)
        setattr(holder, child, LowRankLinear(getattr(holder, child), rank, generator))
    for name in NORMS:
        setattr(twin, name, TrainableNorm(getattr(layer, name)))
    return twin


def stream_error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> torch.Tensor:
    """Mean over the gaps of |found - wanted|^2 / |wanted|^2, without position 0, whose states are huge."""
    errors = [
        (ours.float() - theirs.float())[:, 1:].square().mean()
        / theirs.float()[:, 1:].square().mean()
        for ours, theirs in zip(found, wanted, strict=True)
    ]
    return torch.stack(errors).mean()
