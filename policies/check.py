"""Runs the probe prompts of a policy: its own regression tests."""

from __future__ import annotations

from typing import NamedTuple

from policies.base import Decision, Policy, Probe

CHECKED = ("tier", "kv", "reason", "task")


class Checked(NamedTuple):
    probe: Probe
    decision: Decision
    # What differs, as "tier is small, expected large".
    differences: list[str]


def check(policy: Policy) -> list[Checked]:
    """All probes, with what was decided and how that differs from what was expected."""
    return [_run(policy, probe) for probe in policy.probes]


def _run(policy: Policy, probe: Probe) -> Checked:
    decision = policy.decide(*probe.inputs())
    differences = [
        f"{name} is {getattr(decision, name)}, expected {expected}"
        for name in CHECKED
        if (expected := getattr(probe, name)) is not None and getattr(decision, name) != expected
    ]
    return Checked(probe, decision, differences)
