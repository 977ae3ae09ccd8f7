"""KL per token and top-1 agreement of the target's answers on a mapped prefix against its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mapper.capture.model import CapturedModel, Prefill, build_cache
from mapper.quality.conversations import Conversation

# k, v [target_layers, tokens, kv_heads, head_dim] of a prompt, from the source's prefill,
# the target's own (exact) one, and the conversation's index.
Prefix = Callable[[Prefill, Prefill, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Divergence:
    """Sums for each conversation: `kl` in nats, tokens, and tokens with the same argmax."""

    kl: list[float] = field(default_factory=list)
    agree: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, native: torch.Tensor, other: torch.Tensor) -> None:
        """Log-probabilities [tokens, vocabulary] of both."""
        self.kl.append(float((native.exp() * (native - other)).sum()))
        self.agree.append(int((native.argmax(-1) == other.argmax(-1)).sum()))
        self.tokens.append(len(native))

    def summary(self) -> dict[str, float | list[float]]:
        """Means per token, each with a 95 % interval bootstrapped over conversations."""
        kl, agree, tokens = (
            np.array(part, dtype=float) for part in (self.kl, self.agree, self.tokens)
        )
        draws = np.random.default_rng(0).integers(0, len(tokens), (2000, len(tokens)))
        weights = tokens[draws].sum(1)
        return {
            "kl": float(kl.sum() / tokens.sum()),
            "kl_interval": _interval(kl[draws].sum(1) / weights),
            "top1": float(agree.sum() / tokens.sum()),
            "top1_interval": _interval(agree[draws].sum(1) / weights),
            "tokens": int(tokens.sum()),
        }


def _interval(values: np.ndarray) -> list[float]:
    return [float(value) for value in np.percentile(values, [2.5, 97.5])]


@torch.inference_mode()
def continue_from(
    model: CapturedModel, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] after each of `ids`, on top of a cache."""
    logits = model.model(input_ids=ids[None], past_key_values=build_cache(k, v)).logits[0]
    return logits.float().log_softmax(-1)


def answer_logprobs(
    model: CapturedModel, cache: tuple[torch.Tensor, torch.Tensor], talk: Conversation, tail: int
) -> torch.Tensor:
    """Log-probabilities of the answer's tokens; the last `tail` prompt tokens are the model's own.

    At least the prompt's last token is: a server always computes that one.
    """
    start = talk.prompt - max(tail, 1)
    k, v = (part[:, :start] for part in cache)
    return continue_from(model, k, v, talk.ids[start:-1])[-(len(talk.ids) - talk.prompt) :]


def with_sink(
    mapped: tuple[torch.Tensor, torch.Tensor], native: Prefill
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position 0 from the target itself, as the sink table gives it."""
    return tuple(
        torch.cat((own[:, :1], other[:, 1:]), dim=1)
        for own, other in zip((native.k, native.v), mapped, strict=True)
    )


class Judge:
    """Both models' prefills of a set of conversations, made once for all variants."""

    def __init__(
        self, source: CapturedModel, target: CapturedModel, talks: Sequence[Conversation]
    ) -> None:
        self.source, self.target, self.talks = source, target, list(talks)
        self.prefills = [
            tuple(model.prefill(talk.ids[: talk.prompt]) for model in (source, target))
            for talk in self.talks
        ]
        self.native = [
            answer_logprobs(target, (own.k, own.v), talk, 1)
            for (_, own), talk in zip(self.prefills, self.talks, strict=True)
        ]

    def measure(self, prefix: Prefix, tails: Sequence[int] = (1,)) -> dict[int, Divergence]:
        """The divergence of answers on top of `prefix` for each length of the native tail."""
        results = {tail: Divergence() for tail in tails}
        for index, (talk, (theirs, own)) in enumerate(zip(self.talks, self.prefills, strict=True)):
            cache = prefix(theirs, own, index)
            for tail, result in results.items():
                result.add(self.native[index], answer_logprobs(self.target, cache, talk, tail))
        return results

    def source_alone(self) -> Divergence:
        """What staying on the source would cost, in the same currency."""
        result = Divergence()
        for talk, (theirs, _), native in zip(self.talks, self.prefills, self.native, strict=True):
            result.add(native, answer_logprobs(self.source, (theirs.k, theirs.v), talk, 1))
        return result
