"""In which KV namespace a turn is answered, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from router.sessions.lineage import Epoch

# Values of the x-baton-kv header:
#   none                 nothing to carry over: first turn, or exact KV on the same model
#   continued            same model as before, on a lineage that holds mapped KV
#   exact                the model changed, and the new one already had exact KV of it all
#   applied              the model changed, and mapped KV was carried over
#   native               the model changed, and the prompt was prefilled: late, failed,
#                        not wanted by the policy, or no session state
#   fallback_reprefill   as native, by the mapper's decision
#   unsupported          as native, because these two models cannot be mapped
Status = Literal[
    "none", "continued", "exact", "applied", "native", "fallback_reprefill", "unsupported"
]


@dataclass(frozen=True)
class Outcome:
    status: Status
    reason: str
    # The lossy lineage and its namespace at the worker; None is the exact namespace.
    epoch: Epoch | None = None
    extra_key: str | None = None
    # Prefix that the target can restore, and how much of it was there exactly.
    tokens: int = 0
    exact_tokens: int = 0
    mapped_tokens: int = 0
    # Mapped before the switch was asked for, and used for the first time.
    ahead_tokens: int = 0
    # Drift of the lineage that was mapped from.
    inherited_drift: float = 0.0
    seconds: float = 0.0
    pair: str = "none"
    direction: str = "none"

    @property
    def fresh_tokens(self) -> int:
        """What native prefill would have had to compute without a map."""
        return self.mapped_tokens + self.ahead_tokens

    def natively(self, reason: str) -> Outcome:
        """The same turn answered from exact KV only."""
        return replace(
            self,
            status="native",
            reason=reason,
            epoch=None,
            extra_key=None,
            tokens=0,
            exact_tokens=0,
            mapped_tokens=0,
            ahead_tokens=0,
            inherited_drift=0.0,
        )
