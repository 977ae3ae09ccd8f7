"""Routing policies: pure functions from a turn, its session and the fleet to a decision."""

from policies.base import Decision, Economics, Policy, SessionView, TierEconomics, Turn
from policies.load import PolicyError, from_dict, from_file

__all__ = [
    "Decision",
    "Economics",
    "Policy",
    "PolicyError",
    "SessionView",
    "TierEconomics",
    "Turn",
    "from_dict",
    "from_file",
]
