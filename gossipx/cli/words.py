"""Shell completion of option values and arguments of the ``gossipx`` command.

The shell starts a process for each press of the Tab key, so this module must import quickly. Names that are defined in
modules that import torch, numpy or networkx are therefore repeated here; a test checks that both lists agree. All other
names are imported from their modules when they are completed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from gossipx.config.settings import Key

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
"""A completion function, click's ``shell_complete``: from (context, parameter, typed text) to the offered items."""

CODECS = (
    *("none", "fp16", "bf16", "int8", "uint8-minmax", "3lc", "stochastic3", "onebit", "topk", "randomk", "threshold"),
    *("qsgd", "natural", "signsgd", "efsignsgd", "powersgd", "dgc", "localsteps", "moniqua"),
)
CODEC_PACKAGES = "gossipx.codecs"
"""Entry-point group by which installed packages add codecs."""
TOPOLOGIES = (
    *("full", "ring", "star", "grid", "torus", "hypercube", "exponential", "expander", "regular", "small-world"),
    *("erdos-renyi", "hierarchical", "bipartite"),
)
SCHEDULES = ("random", "static", "one-peer", "inner-outer", "bandwidth-aware")
PARTITIONS = ("iid", "dirichlet")
TASKS = ("fashion-mnist", "mnist", "cifar10")
UNTRAINED = ("inception-v4",)
"""Models that cannot be trained: commands use only the sizes of their tensors."""
DEVICES = ("cpu", "cuda", "cuda:0")


def of(words: Callable[[], Iterable[str]]) -> Complete:
    """Return a completion function that offers each of ``words`` that starts with the typed text."""

    def complete(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in words() if word.startswith(typed)]

    return complete


def path(kind: str) -> Complete:
    """Return a completion function that lets the shell complete paths; ``kind`` is ``file`` or ``dir``."""
    return lambda ctx, parameter, typed: [CompletionItem(typed, type=kind)]


def or_file(words: Callable[[], Iterable[str]]) -> Complete:
    """Return a completion function as :func:`of` does; if no word matches, the shell completes files."""

    def complete(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
        found = [CompletionItem(word) for word in words() if word.startswith(typed)]
        return found or [CompletionItem(typed, type="file")]

    return complete


def runs(marked: str = "config.toml") -> Complete:
    """Return a completion function that offers names of runs in ``--logdir``; if none matches, directories.

    Args:
        marked: name of a file; only directories that contain it are offered as runs.
    """

    def complete(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
        logdir = Path(ctx.params.get("logdir") or "runs")
        given = ctx.params.get(parameter.name or "") or ()  # a tuple if several may be given
        known = {str(name) for name in given} if isinstance(given, tuple) else set()
        names = (file.parent.name for file in sorted(logdir.glob(f"*/{marked}")))
        found = [CompletionItem(name) for name in names if name.startswith(typed) and name not in known]
        return found or [CompletionItem(typed, type="dir")]

    return complete


def _policies() -> Iterable[str]:
    from gossipx import policies

    return policies.names()


def _codecs() -> Iterable[str]:
    from gossipx.specs import plugins

    return plugins.names(dict.fromkeys(CODECS, str), CODEC_PACKAGES)


def _mixings() -> Iterable[str]:
    from gossipx.mixing import MIXINGS

    return MIXINGS


def _sync_models() -> Iterable[str]:
    from gossipx.server.sync_models.models import SYNC_MODELS

    return SYNC_MODELS


def _placements() -> Iterable[str]:
    from gossipx.server.placement import BUILT_IN

    return BUILT_IN


def _solvers() -> Iterable[str]:
    from gossipx.tasks import solvers

    return solvers.names()


def _trained() -> Iterable[str]:
    from gossipx.tasks.presets import PRESETS

    return PRESETS


ended_runs = runs("summary.json")
"""Offers runs that have ended; a run writes its summary at the end."""
topologies = of(lambda: TOPOLOGIES)
schedules = of(lambda: SCHEDULES)
models = of(lambda: (*_trained(), *UNTRAINED))
placements = of(_placements)
sync_models = of(_sync_models)

_BY_SETTING: dict[str, Complete] = {
    **dict.fromkeys(("peers", "secret_file", "tls_cert", "tls_key", "tls_ca"), path("file")),
    **dict.fromkeys(("logdir", "data_dir"), path("dir")),
    **dict.fromkeys(("codec", "push_codec", "pull_codec"), of(_codecs)),
    "name": runs(),
    "device": of(lambda: DEVICES),
    "task": of(lambda: TASKS),
    "model": of(_trained),
    "solver": or_file(_solvers),
    "partition": of(lambda: PARTITIONS),
    "policy": of(_policies),
    "topology": topologies,
    "schedule": schedules,
    "mixing": of(_mixings),
    "sync": sync_models,
    "placement": placements,
}


def of_setting(key: Key) -> Complete | None:
    """Return the completion function for a setting's value; None: leave it to click, which completes choices only."""
    return _BY_SETTING.get(key.name)
