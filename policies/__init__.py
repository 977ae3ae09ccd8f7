"""Routing policies: pure functions from a turn, its session and the fleet to a decision."""

from policies.base import (
    Decision,
    Economics,
    Memory,
    Policy,
    Rejection,
    SessionView,
    Spent,
    TierEconomics,
    Turn,
)
from policies.cascade import Cascade, Signals, Verdict, escalate, signals
from policies.load import PolicyError, from_dict, from_file, json_schema, watched_files

__all__ = [
    "Cascade",
    "Decision",
    "Economics",
    "Memory",
    "Policy",
    "PolicyError",
    "Rejection",
    "SessionView",
    "Signals",
    "Spent",
    "TierEconomics",
    "Turn",
    "Verdict",
    "escalate",
    "from_dict",
    "from_file",
    "json_schema",
    "signals",
    "watched_files",
]
