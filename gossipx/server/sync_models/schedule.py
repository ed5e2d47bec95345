"""A plan of sync models: which one from which clock on, ``500=ssp:staleness=3;2000=asp``."""

from __future__ import annotations

from gossipx.errors import UsageError
from gossipx.server.sync_models.conditions import SyncModel
from gossipx.server.sync_models.models import parse as parse_model

Plan = tuple[tuple[int, SyncModel], ...]


def parse(text: str, rate: float | None = None) -> Plan:
    """The plan that ``text`` means; empty: none.

    Args:
        text: steps with a ; between them, each a clock, = and a sync model's spec.
        rate: the learning rate, for models that go by it.

    Raises:
        UsageError: what is wrong in it.
    """
    steps = []
    for step in filter(None, (part.strip() for part in text.split(";"))):
        clock, _, spec = step.partition("=")
        if not clock.strip().isdecimal() or not spec:
            raise UsageError(f"'{step}' is no step of a plan: a clock, = and a sync model, as in 500=ssp:staleness=3")
        model = parse_model(spec.strip())
        if model.needs_rate and rate is not None:
            model = model.resolved(rate)
        steps.append((int(clock), model))
    if [clock for clock, _ in steps] != sorted({clock for clock, _ in steps}):
        raise UsageError(f"the clocks of the plan '{text}' do not ascend")
    return tuple(steps)
