"""The effective settings of a run: the model's preset fills the gaps, and contradictory settings are refused."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gossipx import mixing, outer, policies
from gossipx.assembly.graph import build_schedule
from gossipx.errors import UsageError
from gossipx.settings.sections import KEYS, MOST_ITERATIONS, RunConfig, TaskSettings
from gossipx.solver import prototxt
from gossipx.tasks import solvers
from gossipx.tasks.presets import PRESETS, TEXT_MODEL, TEXT_TASK, Preset

if TYPE_CHECKING:
    from gossipx.codecs import Codec


log = logging.getLogger("gossipx")

SCRIPTS_THRESHOLD = 0.02
"""Threshold of the paper's rule for models other than the built-in ones: the middle one of Table I of Adaptive
Communication."""
REPLACED = {
    "solver_mode": "--device and the hosts file set the device",
    "device_id": "--device and the hosts file set the device",
    "random_seed": "--seed sets the seed of everything random",
}
"""Fields of a solver file that options of the run replace."""
OF_TASK = (
    *(field.name for field in dataclasses.fields(TaskSettings) if field.name != "partition"),
    *("eval_interval", "seconds"),
)
"""Settings of the built-in task, which have no effect on a script."""
MOMENTUM = 0.9
"""Momentum of SGD and LARS for a model whose own optimizer has none: that of all other models."""
LONGEST_EVAL_INTERVAL = 250
"""Default of ``--eval-interval``: an evaluation takes as long as 14 iterations of lenet. In a run of fewer than 2,500
iterations it is a tenth of them, since a curve needs some points."""
OF_RUN = ("overwrite", "iterations", "threads", "device", "restart")
"""Settings of ``gossipx run`` that have no effect on a script without it."""


def effective_config(config: RunConfig, size: int, has_script: bool, model: str | None = None) -> RunConfig:
    """Return the configuration with unset values filled in from the model's preset.

    Args:
        size: number of peers in the run.
        has_script: whether the run trains a user's script; the presets of built-in models are not used then.
        model: the model that is simulated without training, whose threshold counts.

    Raises:
        UsageError: a value that the peers would refuse; it is refused here before any of them is started.
    """
    if has_script and config.task.solver is not None:
        reason = "is for the built-in task, and a script calls gossipx.get_solver instead: leave one out"
        raise UsageError(f"--solver {config.task.solver} {reason}")
    if has_script:
        _refuse_of_task(config)
    if not has_script:
        config = _with_preset(_with_task_of_model(_with_solver(config)))
        if config.task.solver is not None:
            _check_solver(config.task.solver)
    steps = config.task.lr_steps or ()
    if list(steps) != sorted(steps):
        raise UsageError(f"--lr-steps must be in ascending order: {', '.join(map(str, steps))}")
    if not has_script or not policies.is_object(config.sync.policy):
        policies.parse(config.sync.policy)
    build_schedule(config, size)
    config = with_policy(config, has_script, model)
    check_exchange(config)
    return config


def with_policy(config: RunConfig, has_script: bool, model: str | None = None) -> RunConfig:
    """Return the configuration with the complete spec of its policy; servers replace the policy, which is unchanged.

    Args:
        config: the configuration.
        has_script: whether the run trains a user's script.
        model: the model that is simulated without training.
    """
    if config.has_servers:
        return config
    spec = config.sync.policy
    if config.sync.preset == "paper":
        preset = PRESETS.get((model or "") if has_script else config.task.model)
        threshold = SCRIPTS_THRESHOLD if preset is None else preset.threshold
        spec = _completed("adaptive", f"adaptive:threshold={threshold:g}", spec)
    return dataclasses.replace(config, sync=dataclasses.replace(config.sync, policy=policies.complete(spec)))


def _with_solver(config: RunConfig) -> RunConfig:
    """Return the configuration with the model and the number of iterations that its solver file sets, unless given.

    Raises:
        UsageError: the file does not exist or is invalid.
    """
    if config.task.solver is None:
        return config
    param = prototxt.read(solvers.find(config.task.solver))
    run, task = config.run, dataclasses.replace(config.task, solver=solvers.resolve(config.task.solver))
    if param.net in PRESETS and not config.is_given("model"):
        task = dataclasses.replace(task, model=param.net)
    if param.max_iter > 0 and not config.is_given("iterations"):
        run = dataclasses.replace(run, iterations=param.max_iter)
    return dataclasses.replace(config, run=run, task=task)


def _check_solver(given: str) -> None:
    """Refuse a solver file that cannot train the built-in task, and warn of fields that have no effect."""
    from gossipx.solver import checks  # imports torch

    param = prototxt.read(solvers.find(given))
    checks.check(param, min(len(param.test_iter), 1))
    ignored = {**prototxt.WITHOUT_MEANING, **REPLACED}
    if param.net in PRESETS:
        del ignored["net"]
    for warning in param.warnings(ignored):
        log.warning(warning)


def _with_task_of_model(config: RunConfig) -> RunConfig:
    """Return the configuration with the model of a given text task, or the task of a given model of text.

    Raises:
        UsageError: the model cannot train the task.
    """
    task = config.task
    if (task.task == TEXT_TASK) != (task.model == TEXT_MODEL):
        if config.is_given("model" if task.task == TEXT_TASK else "task"):
            raise UsageError(
                f"--model {task.model} cannot train --task {task.task}: {TEXT_MODEL} is for {TEXT_TASK}, and all other"
                " models are for images"
            )
        task = dataclasses.replace(task, task=TEXT_TASK, model=TEXT_MODEL)
    if task.task == TEXT_TASK and task.solver is not None:
        raise UsageError(f"--solver {task.solver} is for images: leave it out, or leave out --task {TEXT_TASK}")
    return dataclasses.replace(config, task=task)


def _with_preset(config: RunConfig) -> RunConfig:
    task = config.task
    preset = PRESETS[task.model]
    in_solver_file = ("optimizer", "base_lr", "gamma", "momentum", "nesterov", "weight_decay", "lr_steps")
    for key in (*in_solver_file, "eval_interval", "seconds") if task.solver is not None else ():
        if config.is_given(key):
            option = KEYS[key].option
            raise UsageError(f"{option} is set by the solver file: leave it out, or leave out --solver {task.solver}")
    values: dict[str, Any] = {"batch_size": preset.batch_size}
    if task.solver is None:
        values = {**dataclasses.asdict(preset), "momentum": _momentum_of(config, preset)}
    if preset.schedule == "cosine":
        reason = f"is for a learning rate with steps, and that of --model {task.model} follows a cosine: leave it out"
        _refuse_given(config, ("gamma", "lr_steps"), reason)
    run = config.run
    if run.seconds is not None and not config.is_given("iterations"):
        run = dataclasses.replace(run, iterations=MOST_ITERATIONS)
    if run.eval_interval is None and task.solver is None:
        run = dataclasses.replace(run, eval_interval=min(LONGEST_EVAL_INTERVAL, max(1, run.iterations // 10)))
    filled = {key: value for key, value in values.items() if getattr(task, key, "") is None}
    return dataclasses.replace(
        config,
        run=run,
        task=dataclasses.replace(task, **filled),
        sync=dataclasses.replace(config.sync, policy=_policy_for(preset, config.sync.policy)),
    )


def _momentum_of(config: RunConfig, preset: Preset) -> float | None:
    """Return the momentum of the optimizer unless it is given; None: the optimizer has none.

    Raises:
        UsageError: settings do not suit the optimizer, or the preset's learning rate is for another.
    """
    task = config.task
    name = task.optimizer or preset.optimizer
    reason = f"is for SGD, and {'LARS' if name == 'lars' else 'AdamW'} trains --model {task.model}: leave it out"
    without = {"sgd": (), "lars": ("nesterov",), "adamw": ("momentum", "nesterov")}[name]
    _refuse_given(config, without, reason)
    if name != preset.optimizer and task.base_lr is None:
        raise UsageError(
            f"--optimizer {name} needs --base-lr: the learning rate of --model {task.model} is for {preset.optimizer}"
        )
    return None if name == "adamw" else preset.momentum or MOMENTUM


def _policy_for(preset: Preset, spec: str) -> str:
    """Return the spec with the preset's arguments, unless it has arguments other than those that all policies have."""
    for name, of_model in preset.policies.items():
        spec = _completed(name, of_model, spec)
    return spec


def _completed(name: str, complete: str, spec: str) -> str:
    """Return ``complete`` with the arguments of a spec of this name, if these are ones that all policies have."""
    own, _, given = spec.partition(":")
    keys = {part.partition("=")[0].strip() for part in given.split(",")} - {""}
    if own.strip() != name or not keys <= {"warmup", "max_silence"}:
        return spec
    return f"{complete}{',' if ':' in complete else ':'}{given}" if keys else complete


def check_without_run(config: RunConfig) -> None:
    """Refuse settings that have no effect in a script that was not started by ``gossipx run``.

    Raises:
        UsageError: such a setting is given.
    """
    _refuse_of_task(config)
    _refuse_given(config, OF_RUN, "is for 'gossipx run', and a script decides that itself: leave it out")


def _refuse_of_task(config: RunConfig) -> None:
    # In a run that resumes with a script, other values are those of the model's preset.
    names = (name for name in OF_TASK if name in config.given)
    _refuse_given(config, names, "is for the built-in task, and a script decides that itself: leave it out")


def _refuse_given(config: RunConfig, names: Iterable[str], reason: str) -> None:
    for name in names:
        if config.is_given(name):
            raise UsageError(f"{_shown(config, name)} {reason}")


def _shown(config: RunConfig, name: str) -> str:
    """Return a setting as an option with its value."""
    option, value = KEYS[name].option, config.value(name)
    if isinstance(value, bool):
        return option if value else option.replace("--", "--no-", 1)
    return f"{option} {','.join(map(str, value)) if isinstance(value, tuple) else value}"


def _check_around(config: RunConfig) -> None:
    """Refuse settings of peer-to-peer exchanges in a run with a hub or servers."""
    sync = config.sync
    how = ["mode", "exchange", "fragments"]
    partners = ["topology", "schedule", "weights", "mixing", "outer"]
    if config.has_servers:
        around, partner = _around(config), "with the servers, as --sync says"
        names = ["preset", *how, *partners, "policy", "blocking", "max_served", "max_pushes", "serve_share"]
        if sync.mode == "server":
            names.remove("mode")
    elif config.hub.hub is not None:
        around, partner, names = _around(config), "with the hub", how
        if config.hub.hub_lost != "gossip":  # with gossip, workers pull from each other while the hub is down
            around, names = f"{around} --hub-lost {config.hub.hub_lost}", [*how, *partners]
    else:
        return
    reason = f"is for peers that exchange with each other, and with {around} they exchange only {partner}"
    _refuse_given(config, names, f"{reason}: leave one out")
    if config.has_servers:
        reason = "is for peers that keep a copy of their last step, and with servers only these send tables"
        _refuse_given(config, ["delta"], f"{reason}: leave it out")


def _around(config: RunConfig) -> str:
    """Return the option that gives a run its hub or its servers."""
    if config.hub.hub is not None:
        return f"--hub {config.hub.hub}"
    return "--mode server" if config.server.servers is None else f"--servers {config.server.servers}"


def _check_codec(config: RunConfig) -> None:
    """Refuse a codec that cannot encode what its option is for, or that the exchange of the run excludes."""
    sync, server = config.sync, config.server
    push, pull, codec = map(_codec, (server.push_codec, server.pull_codec, sync.codec))
    for option, spec, parsed in (("--push-codec", server.push_codec, push), ("--pull-codec", server.pull_codec, pull)):
        if parsed is not None and parsed.near:
            raise UsageError(f"{option} {spec} is for models that peers exchange with each other: give it as --codec")
    if pull is not None and pull.gradients_only:
        raise UsageError(f"--pull-codec {server.pull_codec} is for gradients only: give it as --push-codec")
    if config.is_given("rescale_error") and (push is None or not push.feedback):
        raise UsageError("--rescale-error needs a --push-codec with error feedback: give one, or leave it out")
    if mixing.parse(sync.mixing).public:
        option = f"--mixing {sync.mixing}"
        if codec is None or not sync.references:
            raise UsageError(
                f"{option} mixes encoded differences: give --codec, such as 3lc, and --references, or leave it out"
            )
        if sync.mode not in ("pull", "pushpull"):
            raise UsageError(f"{option} is for pulls and pairs: leave it out, or leave out --mode {sync.mode}")
    option = f"--codec {sync.codec}"
    if config.has_servers and config.is_given("codec"):
        raise UsageError(f"{option} is for models, and servers have --push-codec and --pull-codec: leave it out")
    if codec is None:
        if config.is_given("references"):
            raise UsageError(f"--references {sync.references} needs a --codec: give one, or leave it out")
        return
    if sync.weights == "push-sum":
        raise UsageError(f"{option} is lossy, and --weights push-sum needs exact values: leave one out")
    if codec.gradients_only:
        raise UsageError(f"{option} is for gradients only, which workers push to servers: leave it out")
    if sync.exchange == "waves":
        _check_coded_waves(config, codec)
        return
    if not sync.references and not codec.alone:
        from gossipx import codecs

        raise UsageError(
            f"{option} loses too much of a model to be used without references: give --references, or one of"
            f" {', '.join(codecs.alone(near=config.hub.hub is None and sync.mode != 'push'))}"
        )
    if codec.near and config.hub.hub is not None:
        raise UsageError(f"{option} is for models that peers exchange with each other, not with a hub: leave one out")
    if codec.near and sync.mode == "push":
        raise UsageError(f"{option} is decoded with the puller's own model, and a push has no puller: leave one out")
    if sync.references and codec.near:
        raise UsageError(f"{option} is for models, and with references differences are encoded: give --references 0")


def _check_coded_waves(config: RunConfig, codec: Codec) -> None:
    option = f"--codec {config.sync.codec}"
    if config.is_given("references"):
        raise UsageError("--references are models of other peers, and a wave needs none: leave it out")
    if codec.near:
        raise UsageError(f"{option} is for models, and a wave encodes changes: leave one out")
    if outer.parse(config.sync.outer) is not None:
        raise UsageError(
            f"--outer {config.sync.outer} is for waves of whole models, and with a --codec the error that it leaves out"
            " takes the place of momentum: leave one out"
        )


def _check_outer(config: RunConfig) -> None:
    """Refuse an outer optimizer that does not suit the exchange of the run."""
    sync = config.sync
    rule = outer.parse(sync.outer)
    if rule is None:
        return
    option = f"--outer {sync.outer}"
    if config.hub.hub is not None or config.has_servers:
        raise UsageError(f"{option} is for peers that exchange with each other, not {_around(config)}: leave one out")
    if sync.exchange == "pulls" and sync.mode == "push":
        raise UsageError(f"{option} acts on exchanges that a peer begins, and a push is one of another: leave one out")
    if rule.waves_only and sync.exchange != "waves":
        raise UsageError(f"{option} needs the mean of all models: give --exchange waves, or --outer momentum:0.6")
    if rule.from_start and sync.init == "own":
        raise UsageError(f"{option} needs a common initial model: leave --init own out")


def _check_fragments(config: RunConfig) -> None:
    """Refuse fragments in a run whose peers have one weight for the whole model."""
    if config.sync.weights == "push-sum":
        reason = "is for parts of a model, and --weights push-sum has one weight for all of it: leave one out"
        _refuse_given(config, ["fragments"], reason)


def _codec(spec: str) -> Codec | None:
    """Return the codec of a spec; None for ``none``, which is handled without importing the codecs and torch."""
    if spec == "none":
        return None
    from gossipx import codecs

    codec = codecs.parse(spec)
    return None if codec == codecs.NoCodec() else codec


def check_exchange(config: RunConfig) -> None:
    """Refuse settings of the exchange that exclude each other."""
    sync = config.sync
    _check_around(config)
    if sync.exchange == "waves":
        if config.is_given("mode"):
            raise UsageError(
                f"--mode {sync.mode} is for exchanges between two peers, and a wave is among all: leave one out"
            )
        if config.is_given("topology"):
            raise UsageError(
                f"--topology {sync.topology} limits which peers exchange, and in a wave any two peers may:"
                " leave it out, or give --exchange pulls"
            )
        if config.is_given("schedule"):
            raise UsageError(
                f"--schedule {sync.schedule} orders the exchanges, and a wave has its own rounds:"
                " leave it out, or give --exchange pulls"
            )
        if config.is_given("weights"):
            raise UsageError(
                f"--weights {sync.weights} weights the models of two peers, and a wave averages all models equally:"
                " leave it out, or give --exchange pulls"
            )
        if config.is_given("mixing"):
            raise UsageError(
                f"--mixing {sync.mixing} is for pulled models, and a wave averages all models equally:"
                " leave it out, or give --exchange pulls"
            )
    if sync.weights != "uniform":
        required = {"push-sum": "push", "metropolis": "pull"}[sync.weights]
        if sync.mode != required:
            raise UsageError(f"--weights {sync.weights} needs --mode {required}, not {sync.mode}: leave one out")
    if sync.weights == "push-sum" and config.is_given("mixing"):
        raise UsageError("--weights push-sum sets the share of a received model itself: leave --mixing out")
    if sync.mode == "pushpull" and config.is_given("mixing") and not mixing.parse(sync.mixing).public:
        raise UsageError("--mode pushpull averages two models equally: leave --mixing out, or give choco and a --codec")
    _check_fragments(config)
    _check_outer(config)
    _check_codec(config)
    pulls = sync.exchange == "pulls" and sync.mode == "pull"
    given = "--exchange waves" if sync.exchange == "waves" else f"--mode {sync.mode}"
    if config.is_given("max_served") and not pulls:
        raise UsageError(f"--max-served counts pulls, and with {given} nobody pulls: leave one out")
    if config.is_given("max_pushes") and sync.mode != "push":
        raise UsageError(f"--max-pushes needs --mode push, not {sync.mode}: leave one out")
    if config.is_given("serve_share") and not pulls:
        raise UsageError(f"--serve-share limits answers to pulls, and with {given} nobody pulls: leave one out")
    if config.is_given("serve_share") and sync.blocking:
        raise UsageError(
            "--serve-share limits how much answers to pulls slow down training, and with --blocking training waits"
            " for pulls anyway: leave one out"
        )
    if config.exchange.max_rate is not None and config.exchange.transport == "shm":
        raise UsageError(
            f"--max-rate {config.exchange.max_rate} limits network traffic, and --transport shm sends no model over a"
            " network: leave one out"
        )
