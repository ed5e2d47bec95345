"""Functions that complete option values and arguments of the ``gossipx`` command in a shell.

The shell starts a process for each press of the Tab key, so this module must import quickly. Names that are defined in
modules that import torch, numpy or networkx are therefore repeated here; a test checks that both lists agree. All other
names are imported from their modules when they are completed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from gossipx.settings.keys import Key

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
"""A completion function, click's ``shell_complete``: from (context, parameter, typed text) to the offered items."""

TOPOLOGIES = (
    *("full", "ring", "star", "grid", "torus", "hypercube", "exponential", "expander", "regular", "small-world"),
    *("erdos-renyi", "hierarchical", "bipartite"),
)
SCHEDULES = ("random", "static", "one-peer", "inner-outer", "bandwidth-aware")
PARTITIONS = ("iid", "dirichlet", "contiguous")
UNTRAINED = ("inception-v4", "densenet121", "transformer-1b")
"""Models that cannot be trained: commands use only the sizes of their tensors."""
DEVICES = ("cpu", "cuda", "cuda:0")


def names(known: Callable[[], Iterable[str]]) -> Completer:
    """Return a completion function that offers each ``known`` name that starts with the typed text."""
    return lambda ctx, parameter, typed: [CompletionItem(name) for name in known() if name.startswith(typed)]


def paths(kind: str) -> Completer:
    """Return a completion function that lets the shell complete paths; ``kind`` is ``file`` or ``dir``."""
    return lambda ctx, parameter, typed: [CompletionItem(typed, type=kind)]


def names_or_files(known: Callable[[], Iterable[str]]) -> Completer:
    """Return a completion function that offers names as :func:`names` does; if none matches, files."""
    complete_names, complete_files = names(known), paths("file")
    return lambda *typed: complete_names(*typed) or complete_files(*typed)


def runs() -> Completer:
    """Return a completion function that offers names of runs in ``--logdir``; if none matches, directories."""

    def complete(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
        logdir = Path(ctx.params.get("logdir") or "runs")
        value = ctx.params.get(parameter.name or "") or ()  # a tuple if several may be given
        given = {str(name) for name in value} if isinstance(value, tuple) else set()
        found = (file.parent.name for file in sorted(logdir.glob("*/config.toml")))
        offered = [CompletionItem(name) for name in found if name.startswith(typed) and name not in given]
        return offered or [CompletionItem(typed, type="dir")]

    return complete


def _policies() -> Iterable[str]:
    from gossipx import policies

    return policies.names()


def _codecs() -> Iterable[str]:
    from gossipx.specs import plugins
    from gossipx.specs.codecs import CODECS, ENTRY_POINT_GROUP

    return plugins.names(dict.fromkeys(CODECS, str), ENTRY_POINT_GROUP)


def _recorders() -> Iterable[str]:
    from gossipx import recorders

    return recorders.recorder_names()


def _outers() -> Iterable[str]:
    from gossipx.outer import OUTERS

    return OUTERS


def _mixings() -> Iterable[str]:
    from gossipx.mixing import MIXINGS

    return MIXINGS


def _sync_models() -> Iterable[str]:
    from gossipx.server.sync_models import SYNC_MODELS

    return SYNC_MODELS


def _placements() -> Iterable[str]:
    from gossipx.server.placement import BUILT_IN

    return BUILT_IN


def _solvers() -> Iterable[str]:
    from gossipx.tasks import solvers

    return solvers.solver_names()


def _tasks() -> Iterable[str]:
    from gossipx.tasks.presets import TASKS

    return TASKS


def _trained_models() -> Iterable[str]:
    from gossipx.tasks.presets import PRESETS

    return PRESETS


topologies = names(lambda: TOPOLOGIES)
schedules = names(lambda: SCHEDULES)
models = names(lambda: (*_trained_models(), *UNTRAINED))
placements = names(_placements)
sync_models = names(_sync_models)

_BY_SETTING: dict[str, Completer] = {
    **dict.fromkeys(("peers", "secret_file", "tls_cert", "tls_key", "tls_ca"), paths("file")),
    **dict.fromkeys(("logdir", "data_dir"), paths("dir")),
    **dict.fromkeys(("codec", "push_codec", "pull_codec"), names(_codecs)),
    "name": runs(),
    "device": names(lambda: DEVICES),
    "task": names(_tasks),
    "model": names(_trained_models),
    "solver": names_or_files(_solvers),
    "partition": names(lambda: PARTITIONS),
    "policy": names(_policies),
    "topology": topologies,
    "schedule": schedules,
    "mixing": names(_mixings),
    "outer": names(_outers),
    "recorder": names(_recorders),
    "sync": sync_models,
    "placement": placements,
}


def for_setting(key: Key) -> Completer | None:
    """Return the completion function for a setting's value; None: leave it to click, which completes choices only."""
    return _BY_SETTING.get(key.name)
