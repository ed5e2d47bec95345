"""The effective settings of a run: those of its model's preset fill the gaps."""

from __future__ import annotations

import dataclasses

from gossipx import policies
from gossipx.assembly import rules
from gossipx.assembly.graph import build_schedule
from gossipx.errors import UsageError
from gossipx.settings import files
from gossipx.settings.modes import HasPolicy
from gossipx.settings.sections import MOST_ITERATIONS, RunConfig, TaskSettings
from gossipx.tasks.presets import PRESETS, TEXT_MODEL, TEXT_TASK, Preset

SCRIPTS_THRESHOLD = 0.02
"""Threshold of the paper's rule for models other than the built-in ones: the middle one of Table I of Adaptive
Communication."""
OF_TASK = (
    *(field.name for field in dataclasses.fields(TaskSettings) if field.name != "partition"),
    *("eval_interval", "seconds"),
)
"""Settings of the built-in task, which have no effect on a script."""
MOMENTUM, MUON_MOMENTUM = 0.9, 0.95
"""Momentum of SGD and LARS for a model whose own optimizer has none: that of all other models. Momentum of Muon for all
models: that of Jordan and torch."""
_TITLES = {"adamw": "AdamW", "lars": "LARS", "muon": "Muon"}
_NOT_OF = {"adamw": ("momentum", "nesterov"), "lars": ("nesterov",), "muon": ("nesterov",)}
"""Settings that optimizers do not have. Muon's momentum is always Nesterov's."""
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
    if has_script:
        _refuse_of_task(config)
    else:
        config = _with_preset(_with_task_of_model(config))
    steps = config.task.lr_steps or ()
    if list(steps) != sorted(steps):
        raise UsageError(f"--lr-steps must be in ascending order: {', '.join(map(str, steps))}")
    if isinstance(config.mode, HasPolicy) and not (has_script and policies.is_object(config.mode.policy)):
        policies.parse(config.mode.policy)
    build_schedule(config, size)
    config = with_policy(config, has_script, model)
    rules.check(config)
    return config


def with_policy(config: RunConfig, has_script: bool, model: str | None = None) -> RunConfig:
    """Return the configuration with the complete spec of its policy; servers replace the policy, which is unchanged.

    Args:
        config: the configuration.
        has_script: whether the run trains a user's script.
        model: the model that is simulated without training.
    """
    if not isinstance(config.mode, HasPolicy):
        return config
    spec = config.mode.policy
    if config.mode.preset == "paper":
        preset = PRESETS.get((model or "") if has_script else config.task.model)
        threshold = SCRIPTS_THRESHOLD if preset is None else preset.threshold
        spec = _completed("adaptive", f"adaptive:threshold={threshold:g}", spec)
    return files.changed(config, policy=policies.complete(spec))


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
        config = files.changed(config, task=TEXT_TASK, model=TEXT_MODEL)
    return config


def _with_preset(config: RunConfig) -> RunConfig:
    task = config.task
    preset = PRESETS[task.model]
    values = {**dataclasses.asdict(preset), **_of_optimizer(config, preset)}
    if preset.schedule == "cosine":
        reason = f"is for a learning rate with steps, and that of --model {task.model} follows a cosine: leave it out"
        rules.refuse_given(config, ("gamma", "lr_steps"), reason)
    filled = {key: value for key, value in values.items() if getattr(task, key, "") is None}
    iterations = config.run.iterations
    if config.run.seconds is not None and not config.is_given("iterations"):
        filled["iterations"] = iterations = MOST_ITERATIONS
    if config.run.eval_interval is None:
        filled["eval_interval"] = min(LONGEST_EVAL_INTERVAL, max(1, iterations // 10))
    if isinstance(config.mode, HasPolicy):
        filled["policy"] = _policy_for(preset, config.mode.policy)
    return files.changed(config, **filled)


def _of_optimizer(config: RunConfig, preset: Preset) -> dict[str, float | None]:
    """Return the learning rate and the momentum of the optimizer, unless they are given; None: it has no momentum.

    Raises:
        UsageError: settings do not suit the optimizer, or the preset's learning rate is for another.
    """
    task = config.task
    name = task.optimizer or preset.optimizer
    reason = f"is for SGD, and {_TITLES.get(name)} trains --model {task.model}: leave it out"
    rules.refuse_given(config, _NOT_OF.get(name, ()), reason)
    lr = preset.lr if name == preset.optimizer else preset.muon_lr if name == "muon" else None
    if lr is None and task.lr is None:
        raise UsageError(
            f"--optimizer {name} needs --lr: the learning rate of --model {task.model} is for {preset.optimizer}"
        )
    default = MUON_MOMENTUM if name == "muon" else preset.momentum or MOMENTUM
    return {"lr": lr, "momentum": None if name == "adamw" else default}


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
    rules.refuse_given(config, OF_RUN, "is for 'gossipx run', and a script decides that itself: leave it out")


def _refuse_of_task(config: RunConfig) -> None:
    # In a run that resumes with a script, other values are those of the model's preset.
    names = (name for name in OF_TASK if name in config.given)
    rules.refuse_given(config, names, "is for the built-in task, and a script decides that itself: leave it out")
