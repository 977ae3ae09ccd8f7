"""Forward KL divergence of the student's next-token distribution from the teacher's, in pieces that fit the cache."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

CHUNK = 64
# Finite, so that 0 times its logarithm is 0.
NEVER = -1e4


class Candidates:
    """The part of the vocabulary that one step compares: frequent tokens, the batch's own and a sample of the rest.

    The head over all 49,152 tokens would take as long as half of the layers. A sampled token stands for
    `weight` others of its kind, so that the sum over the candidates estimates the sum over the vocabulary.
    """

    def __init__(self, counts: torch.Tensor, frequent: int, sampled: int, seed: int) -> None:
        self.vocabulary = len(counts)
        self.frequent = counts.argsort(descending=True)[:frequent]
        self.sampled = sampled
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and the logarithm of the number of tokens each one stands for."""
        certain = torch.unique(torch.cat([self.frequent, ids.flatten()]))
        rest = torch.ones(self.vocabulary, dtype=torch.bool)
        rest[certain] = False
        others = rest.nonzero()[:, 0]
        drawn = others[torch.randperm(len(others), generator=self.generator)[: self.sampled]]
        log_weight = torch.zeros(len(certain) + len(drawn))
        if len(drawn):
            log_weight[len(certain) :] = torch.tensor(len(others) / len(drawn)).log()
        return torch.cat([certain, drawn]), log_weight


class _ForwardKL(torch.autograd.Function):
    """Mean KL(teacher || student); its gradient is worked out chunk by chunk, so that no full logits are stored."""

    @staticmethod
    def forward(ctx, student, teacher, head, log_weight, among):
        gradient = torch.empty_like(student)
        total = 0.0
        for start in range(0, len(student), CHUNK):
            part = slice(start, start + CHUNK)
            logits = linear(teacher[part], head).float()
            if among is not None:
                logits = _truncated(logits, among[part])
            wanted = (logits + log_weight).log_softmax(-1)
            found = (linear(student[part], head).float() + log_weight).log_softmax(-1)
            share = wanted.exp()
            total += (share * (wanted - found)).sum().item()
            gradient[part] = (found.exp() - share).to(head.dtype) @ head
        ctx.save_for_backward(gradient / len(student))
        return torch.tensor(total / len(student))

    @staticmethod
    def backward(ctx, outer):
        (gradient,) = ctx.saved_tensors
        return gradient * outer.to(gradient.dtype), None, None, None, None


def forward_kl(
    student: torch.Tensor,
    teacher: torch.Tensor,
    head: torch.Tensor,
    log_weight: torch.Tensor,
    among: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean KL over positions; `student` and `teacher` are normed hidden states, `head` the candidates' rows.

    `among` says for each position how many of its likeliest tokens the teacher draws from (top-k sampling); 0: all.
    """
    size = student.shape[-1]
    among = None if among is None else among.flatten()
    return _ForwardKL.apply(
        student.reshape(-1, size), teacher.reshape(-1, size), head, log_weight, among
    )


def _truncated(logits: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """The logits with those that are never drawn so low that nothing is left of their probability."""
    most = min(int(among.max()), logits.shape[-1])
    if most == 0:
        return logits
    lowest = logits.topk(most).values.gather(1, (among.clamp(1, most) - 1)[:, None])
    return logits.masked_fill((logits < lowest) & (among > 0)[:, None], NEVER)
