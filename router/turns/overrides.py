"""What a request asks for beside its body: a tier, a policy, an explanation; and its key's rights."""

from __future__ import annotations

from router.errors import ApiError
from router.settings import ALIASES, Tier
from router.turns.incoming import Incoming
from router.workers.pool import Pool


def forced_tier(incoming: Incoming, pool: Pool) -> tuple[Tier, str] | None:
    """A tier asked for by header, alias or model name goes before any policy.

    Raises ApiError 400, 403 or 404.
    """
    principal = incoming.principal
    model = incoming.body["model"]
    if model not in ALIASES and pool.tier_of(model) is None:
        raise ApiError(
            404, f"The model {model!r} does not exist.", param="model", code="model_not_found"
        )
    if not principal.may_use_model(model):
        raise ApiError(
            403, f"This key may not use the model {model!r}.",
            param="model", code="model_not_allowed",
        )  # fmt: skip
    header = incoming.headers.get("x-baton-tier")
    if header:
        if header not in ("small", "large"):
            raise ApiError(400, "x-baton-tier is small or large.", param="x-baton-tier")
        if not (
            principal.may_use_model(header)
            or principal.may_use_model(pool.models.get(header, header))
        ):
            raise ApiError(
                403, f"This key may not use the {header} tier.", code="model_not_allowed"
            )
        return header, "header"
    if model in ("small", "large"):
        return model, "alias"
    if model != "auto":
        return pool.tier_of(model), "model"
    return None


def policy_name(incoming: Incoming) -> str:
    """Raises ApiError 403."""
    name = incoming.headers.get("x-baton-policy") or "default"
    if not incoming.principal.may_use_policy(name):
        raise ApiError(403, "This key may not use that policy.", param="x-baton-policy")
    return name


def explain(incoming: Incoming) -> bool:
    return incoming.headers.get("x-baton-explain", "").lower() in ("1", "true", "yes")
