"""The spec of planned switches between sync models: ``500=ssp:staleness=3;2000=asp`` names one per clock."""

from __future__ import annotations

from gossipx.errors import UsageError
from gossipx.server.sync_models.conditions import SyncModel
from gossipx.server.sync_models.models import parse as parse_model

Plan = tuple[tuple[int, SyncModel], ...]


def parse(text: str, rate: float | None = None) -> Plan:
    """Return the plan for ``text``; an empty text is an empty plan.

    Args:
        text: steps separated by semicolons, each a clock, = and a sync model's spec.
        rate: the learning rate, for models that depend on it.

    Raises:
        UsageError: the text is malformed.
    """
    steps = []
    for step in filter(None, (part.strip() for part in text.split(";"))):
        clock, _, spec = step.partition("=")
        if not clock.strip().isdecimal() or not spec:
            raise UsageError(f"'{step}' is not a step of a plan: expected CLOCK=MODEL, such as 500=ssp:staleness=3")
        model = parse_model(spec.strip())
        if model.needs_rate and rate is not None:
            model = model.resolved(rate)
        steps.append((int(clock), model))
    if [clock for clock, _ in steps] != sorted({clock for clock, _ in steps}):
        raise UsageError(f"the clocks of the plan '{text}' are not in ascending order")
    return tuple(steps)
