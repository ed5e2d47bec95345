"""Checks of settings that are specs or names, such as ``tau:10``; each raises UsageError for an invalid one.

A check imports the module that defines its specs only when it is called, so that ``gossipx run --help`` needs no torch.
"""

from __future__ import annotations

from gossipx.specs import known_word


def policy(spec: str) -> None:
    """Check ``--policy``: a spec, or the name of a policy."""
    from gossipx import policies

    if policies.is_object(spec):  # a script may pass it; where none does, that is refused as the run begins
        return
    if ":" in spec:  # a bare name may take its parameters from the model's preset
        policies.parse(spec)
    elif spec.strip() not in policies.BUILT_IN:
        known_word("policy", spec.strip(), policies.names())


def interval(spec: str) -> None:
    """Check ``--checkpoint-every``."""
    from gossipx.config.interval import CheckpointInterval

    CheckpointInterval.parse(spec)


def mixing(spec: str) -> None:
    """Check ``--mixing``."""
    from gossipx import mixing

    mixing.parse(spec)


def outer(spec: str) -> None:
    """Check ``--outer``."""
    from gossipx import outer

    outer.parse(spec)


def recorder(spec: str) -> None:
    """Check ``--recorder``."""
    from gossipx import recorders

    recorders.parse(spec)


def metrics_port(text: str) -> None:
    """Check ``--metrics-port``."""
    from gossipx.metrics import prometheus

    prometheus.parse(text)


def schedule(spec: str) -> None:
    """Check ``--schedule``."""
    from gossipx.topology import schedules

    schedules.check(spec)


def sync_model(specs: str) -> None:
    """Check ``--sync``: one sync model, or one per shard separated by |."""
    from gossipx.server.sync_models import models

    for spec in specs.split("|"):
        models.parse(spec)


def plan(text: str) -> None:
    """Check ``--sync-plan``."""
    from gossipx.server.sync_models import schedule

    schedule.parse(text)


def placement(spec: str) -> None:
    """Check ``--placement``."""
    from gossipx.server import placement

    placement.parse(spec)


def codec(spec: str) -> None:
    """Check ``--codec``, ``--push-codec`` or ``--pull-codec``."""
    if spec == "none":  # the default, for which no torch is imported
        return
    from gossipx import codecs

    codecs.parse(spec)


def rate(text: str) -> None:
    """Check ``--max-rate``."""
    from gossipx.transports import pace

    pace.parse_rate(text)


def bandwidth(text: str) -> None:
    """Check the bandwidth of a link."""
    from gossipx.transports.pace import parse_rate

    parse_rate(text, "bandwidth")


def partition(spec: str) -> None:
    """Check ``--partition``."""
    from gossipx.tasks import partition

    partition.parse(spec)


def task(name: str) -> None:
    """Check ``--task``."""
    from gossipx.tasks.presets import TASKS

    known_word("task", name, dict.fromkeys(TASKS))


def model(name: str) -> None:
    """Check ``--model``."""
    from gossipx.tasks.presets import PRESETS

    known_word("model", name, PRESETS)


def solver(given: str) -> None:
    """Check ``--solver``: the file must exist, or be the name of a built-in one."""
    from gossipx.tasks import solvers

    solvers.find(given)


def solver_path(given: str) -> str:
    """Return ``--solver`` as it is valid in any working directory."""
    from gossipx.tasks import solvers

    return solvers.resolve(given)


def topology_path(given: str) -> str:
    """Return ``--topology`` as it is valid in any working directory."""
    from gossipx.topology import files

    return files.absolute(given)
