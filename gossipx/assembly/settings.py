"""The settings that a run begins with: presets filled in, and those refused that do not go together."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from gossipx import mixing, policies
from gossipx.assembly.graph import build_schedule
from gossipx.config.settings import ExchangeSettings, RunConfig, SyncSettings
from gossipx.errors import UsageError
from gossipx.solver import prototxt
from gossipx.tasks import solvers
from gossipx.tasks.presets import PRESETS

if TYPE_CHECKING:
    from gossipx.codecs import Codec

log = logging.getLogger("gossipx")

SAID_ELSEWHERE = {
    "solver_mode": "--device and the hosts file say where peers train",
    "device_id": "--device and the hosts file say where peers train",
    "random_seed": "--seed is of all that is random",
}
"""Fields of a solver file that options of the run stand for."""


def effective_config(config: RunConfig, size: int, has_script: bool) -> RunConfig:
    """The configuration with the model's preset filled in where nothing was given.

    Args:
        size: peers in the run.
        has_script: whether a user's script is trained; the built-in models' presets say nothing about its model then.

    Raises:
        UsageError: a value that would be refused when peers start, so that it is refused before any does.
    """
    if has_script and config.task.solver is not None:
        told = "is of the built-in task, and a script calls gossipx.get_solver: leave one out"
        raise UsageError(f"--solver {config.task.solver} {told}")
    if not has_script:
        config = _with_preset(config)
        if config.task.solver is not None:
            _check_solver(config.task.solver)
    steps = config.task.lr_steps or ()
    if list(steps) != sorted(steps):
        raise UsageError(f"--lr-steps do not ascend: {', '.join(map(str, steps))}")
    policies.parse(config.sync.policy)
    build_schedule(config, size)
    check_exchange(config)
    return config


def _check_solver(given: str) -> None:
    """Refuse a solver file that the built-in task cannot be trained by; warn of what it says to nobody."""
    from gossipx.solver import checks  # and torch

    param = prototxt.read(solvers.find(given))
    checks.check(param, min(len(param.test_iter), 1))
    ignored = {**prototxt.WITHOUT_MEANING, **SAID_ELSEWHERE}
    if param.net in PRESETS:
        del ignored["net"]
    for warning in param.warnings(ignored):
        log.warning(warning)


def _with_preset(config: RunConfig) -> RunConfig:
    task = config.task
    preset = PRESETS[task.model]
    keys = ["batch_size"]
    said = ("base_lr", "gamma", "momentum", "weight_decay", "lr_steps")  # by a solver file, if there is one
    if task.solver is None:
        keys += said
    for key in (*said, "nesterov") if task.solver is not None else ():
        if getattr(task, key):
            option = f"--{key.replace('_', '-')}"
            raise UsageError(f"{option} is the solver file's to say: leave it out, or --solver {task.solver}")
    filled = {key: getattr(preset, key) for key in keys if getattr(task, key) is None}
    # A policy named without arguments gets the model's; one with arguments stands as it was given.
    policy = preset.policies.get(config.sync.policy, config.sync.policy)
    return dataclasses.replace(
        config,
        task=dataclasses.replace(task, **filled),
        sync=dataclasses.replace(config.sync, policy=policy),
    )


def _check_around(config: RunConfig) -> None:
    """Refuse what is of peers that exchange with each other, where there is a hub or there are servers.

    What is the default is never refused: nobody can tell whether it was given.
    """
    sync, usual = config.sync, SyncSettings()
    averages = mixing.parse(sync.mixing) == mixing.parse(usual.mixing)
    how = {"--mode": sync.mode != usual.mode, "--exchange": sync.exchange != usual.exchange}
    whom = {
        "--topology": sync.topology != usual.topology,
        "--schedule": sync.schedule != usual.schedule,
        "--weights": sync.weights != usual.weights,
        "--mixing": not averages,
    }
    if config.server.servers is not None or sync.mode == "server":
        around = "--mode server" if config.server.servers is None else f"--servers {config.server.servers}"
        alone = "by the servers alone, as --sync says"
        # The model's preset may have put its own policy in; never says what is the case.
        preset = PRESETS[config.task.model].policies.get(usual.policy)
        by_policy = sync.policy not in (usual.policy, preset, "never")
        given = {**how, **whom, "--mode": how["--mode"] and sync.mode != "server", "--policy": by_policy}
    elif config.hub.hub is not None:
        around, alone, given = f"--hub {config.hub.hub}", "by the hub alone", how
        if config.hub.hub_lost != "gossip":  # else they pull from each other while it does not answer
            around, given = f"{around} --hub-lost {config.hub.hub_lost}", {**how, **whom}
    else:
        return
    for option, is_given in given.items():
        if is_given:
            value = getattr(sync, option.removeprefix("--"))
            raise UsageError(
                f"{option} {value} is of peers that exchange with each other, and with {around} they do so {alone}:"
                " leave one out"
            )


def _check_codec(config: RunConfig) -> None:
    """Refuse a codec that does not go with what it is of, or with how models are exchanged."""
    sync, usual = config.sync, SyncSettings()
    server = config.server
    push, pull, codec = map(_codec, (server.push_codec, server.pull_codec, sync.codec))
    for option, given, made in (("--push-codec", server.push_codec, push), ("--pull-codec", server.pull_codec, pull)):
        if made is not None and made.near:
            raise UsageError(f"{option} {given} is of models that peers exchange with each other: give it as --codec")
    if pull is not None and pull.gradients_only:
        raise UsageError(f"--pull-codec {server.pull_codec} is for gradients alone: give it as --push-codec")
    if server.rescale_error and (push is None or not push.feedback):
        raise UsageError("--rescale-error is of a --push-codec with error feedback: give one, or leave it out")
    if mixing.parse(sync.mixing).public:
        told = f"--mixing {sync.mixing} mixes what a codec makes of"
        if codec is None or not sync.references:
            raise UsageError(f"{told} differences: give --codec, such as 3lc, and --references, or leave --mixing out")
        if sync.mode != "pull":
            raise UsageError(f"{told} models that are pulled: leave it out, or --mode {sync.mode}")
    if codec is None:
        if sync.references != usual.references:
            raise UsageError(f"--references {sync.references} is of --codec: give one, or leave it out")
        return
    told = f"--codec {sync.codec}"
    if config.server.servers is not None or sync.mode == "server":
        raise UsageError(f"{told} is of models, and servers have --push-codec and --pull-codec: leave it out")
    if sync.exchange == "waves":
        raise UsageError(f"{told} is of models that are exchanged with one peer, and a wave has none: leave one out")
    if sync.weights == "push-sum":
        raise UsageError(f"{told} loses a part of what push-sum's weights are to keep: leave one out")
    if codec.gradients_only:
        raise UsageError(f"{told} is for gradients alone, as servers are pushed: leave it out")
    if not sync.references and not codec.alone:
        from gossipx import codecs

        raise UsageError(
            f"{told} leaves too much of a model out to be used without references: give --references, or one of"
            f" {', '.join(codecs.alone(near=config.hub.hub is None and sync.mode != 'push'))}"
        )
    if codec.near and config.hub.hub is not None:
        raise UsageError(f"{told} is of models that peers exchange with each other, not with a hub: leave one out")
    if codec.near and sync.mode == "push":
        raise UsageError(f"{told} is recovered near the model that asked for it: leave it out, or --mode push")
    if sync.references and codec.near:
        raise UsageError(f"{told} is of models, and with references differences are encoded: give --references 0")


def _codec(spec: str) -> Codec | None:
    """Return the codec that a spec means, or None for ``none``, which needs neither the codecs nor torch."""
    if spec == "none":
        return None
    from gossipx import codecs

    made = codecs.parse(spec)
    return None if made == codecs.NoCodec() else made


def check_exchange(config: RunConfig) -> None:
    """Refuse settings of what is exchanged, and how, that do not go together."""
    sync = config.sync
    averages = mixing.parse(sync.mixing) == mixing.Average()
    _check_around(config)
    if sync.exchange == "waves":
        if sync.mode != "pull":
            raise UsageError(f"--mode {sync.mode} is of exchanges of two peers, and a wave is of all: leave one out")
        if sync.topology != SyncSettings().topology:
            raise UsageError(
                f"--topology {sync.topology} says who may pull from whom, and in a wave any two peers meet:"
                " leave it out, or --exchange pulls"
            )
        if sync.schedule is not None:
            raise UsageError(
                f"--schedule {sync.schedule} says whose turn it is, and a wave has rounds of its own:"
                " leave it out, or --exchange pulls"
            )
        if sync.weights != "uniform":
            raise UsageError(
                f"--weights {sync.weights} weighs the models of two peers, and a wave averages all models alike:"
                " leave it out, or --exchange pulls"
            )
        if not averages:
            raise UsageError(
                f"--mixing {sync.mixing} says how a pulled model enters, and a wave averages all models alike:"
                " leave it out, or --exchange pulls"
            )
    if sync.weights != "uniform":
        goes_with = {"push-sum": "push", "metropolis": "pull"}[sync.weights]
        if sync.mode != goes_with:
            raise UsageError(f"--weights {sync.weights} goes with --mode {goes_with}, not {sync.mode}: leave one out")
    if (sync.mode == "pushpull" or sync.weights == "push-sum") and not averages:
        given = "--mode pushpull" if sync.mode == "pushpull" else "--weights push-sum"
        raise UsageError(f"{given} sets the share of a received model itself: leave --mixing out")
    _check_codec(config)
    exchange = config.exchange
    pulls = sync.exchange == "pulls" and sync.mode == "pull"
    usual = ExchangeSettings()
    given = "--exchange waves" if sync.exchange == "waves" else f"--mode {sync.mode}"
    if exchange.max_served != usual.max_served and not pulls:
        raise UsageError(f"--max-served counts pulls, and with {given} nobody pulls: leave one out")
    if exchange.max_pushes != usual.max_pushes and sync.mode != "push":
        raise UsageError(f"--max-pushes goes with --mode push, not {sync.mode}: leave one out")
    if exchange.serve_share != usual.serve_share and not pulls:
        raise UsageError(f"--serve-share is of answering pulls, and with {given} nobody pulls: leave one out")
    if exchange.serve_share != usual.serve_share and sync.blocking:
        raise UsageError(
            "--serve-share keeps answers from taking time of training, and with --blocking training waits for pulls"
            " anyway, so that all are answered: leave one out"
        )
    if exchange.max_rate is not None and exchange.transport == "shm":
        raise UsageError(
            f"--max-rate {exchange.max_rate} is of a network, and with --transport shm no model goes over one:"
            " leave one out"
        )
