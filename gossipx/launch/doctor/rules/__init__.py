"""What is to be said of the doctors' findings: findings in, verdicts out."""

from __future__ import annotations

from gossipx.launch.doctor.rules import comparing, reaching
from gossipx.launch.doctor.rules.case import LEVELS, Case, Verdict

__all__ = ["LEVELS", "Case", "Verdict", "exit_code", "verdicts"]

_RULES = (
    reaching.names,
    reaching.ports,
    reaching.reach,
    reaching.interrupted,
    comparing.versions,
    comparing.machines,
    comparing.clocks,
    comparing.latency,
    comparing.rates,
    comparing.models,
    comparing.devices,
)


def verdicts(case: Case) -> list[Verdict]:
    """All verdicts, by what they are about: each rule says what is wrong, or that all is well."""
    return [verdict for rule in _RULES for verdict in rule(case)]


def exit_code(found: list[Verdict]) -> int:
    """0: nothing fails; 5: somebody is not authorised; else 1."""
    return max((verdict.exit_code for verdict in found if verdict.level == "fail"), default=0)
