"""Refusals of settings that their mode has, but that exclude each other, or need another one.

Those that a mode does not have are refused in :mod:`gossipx.settings.refusals`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gossipx import mixing, outer
from gossipx.errors import UsageError
from gossipx.settings.interval import CheckpointInterval
from gossipx.settings.modes import (
    Elastic,
    HasOuter,
    HasPolicy,
    HasServing,
    Pairs,
    Pulls,
    Pushes,
    Server,
    Waves,
)
from gossipx.settings.refusals import shown
from gossipx.settings.sections import RunConfig

if TYPE_CHECKING:
    from gossipx.codecs import Codec


def check(config: RunConfig) -> None:
    """Refuse settings that exclude each other.

    Raises:
        UsageError: names them and what to do.
    """
    mode = config.mode
    if isinstance(mode, Elastic) and mode.hub_lost != "gossip":  # with gossip, workers pull from each other meanwhile
        with_hub = f"with --hub {mode.hub} --hub-lost {mode.hub_lost} they exchange only with the hub: leave one out"
        reason = f"is for peers that exchange with each other, and {with_hub}"
        refuse_given(config, ("topology", "schedule", "weights", "mixing"), reason)
    if isinstance(mode, Pushes) and mode.weights == "push-sum":
        reason = "is for parts of a model, and --weights push-sum has one weight for all of it: leave one out"
        refuse_given(config, ["fragments"], reason)
        if config.is_given("mixing"):
            raise UsageError("--weights push-sum sets the share of a received model itself: leave --mixing out")
    if isinstance(mode, Pairs) and config.is_given("mixing") and not mixing.mixing_from(mode.mixing).uses_public_copies:
        raise UsageError("--mode pushpull averages two models equally: leave --mixing out, or give choco and a --codec")
    if isinstance(mode, HasOuter):
        _check_outer(mode, config.sync.init)
    if isinstance(mode, Server):
        if (pull := _codec(mode.pull_codec)) is not None and pull.gradients_only:
            raise UsageError(f"--pull-codec {mode.pull_codec} is for gradients only: give it as --push-codec")
        if CheckpointInterval.parse(every := str(config.run.checkpoint_every)).seconds:
            raise UsageError(f"--checkpoint-every {every} with servers: give iterations, at which all peers can resume")
    if isinstance(mode, Pulls | Pushes | Pairs | Elastic) and mixing.mixing_from(mode.mixing).uses_public_copies:
        _check_public_copies(mode)
    if isinstance(mode, Pulls | Pushes | Pairs | Waves):
        _check_codec(config, mode)
    if (  # serve_share is a setting of HasServing, and blocking one of HasPolicy
        isinstance(mode, HasServing)
        and isinstance(mode, HasPolicy)
        and config.is_given("serve_share")
        and mode.blocking
    ):
        raise UsageError(
            "--serve-share limits how much answers to pulls slow down training, and with --blocking training waits"
            " for pulls anyway: leave one out"
        )
    if config.exchange.max_rate is not None and config.exchange.transport == "shm":
        raise UsageError(
            f"--max-rate {config.exchange.max_rate} limits network traffic, and --transport shm sends no model over a"
            " network: leave one out"
        )


def refuse_given(config: RunConfig, names: Iterable[str], reason: str) -> None:
    """Refuse those of the named settings that the user gave, for this reason.

    Raises:
        UsageError: one of them is given.
    """
    for name in names:
        if config.is_given(name):
            raise UsageError(f"{shown(name, config.values[name])} {reason}")


def _check_outer(mode: HasOuter, init: str) -> None:
    """Refuse an outer optimizer that does not suit the exchange of the run."""
    if (rule := outer.outer_from(mode.outer)) is None:
        return
    option = f"--outer {mode.outer}"
    if isinstance(rule, outer.Nesterov) and not isinstance(mode, Waves):
        raise UsageError(f"{option} needs the mean of all models: give --exchange waves, or --outer momentum:0.6")
    if isinstance(rule, outer.Nesterov) and init == "own":
        raise UsageError(f"{option} needs a common initial model: leave --init own out")


def _check_public_copies(mode: Pulls | Pushes | Pairs | Elastic) -> None:
    """Refuse CHOCO mixing where no differences are encoded, or only one of two peers receives any."""
    given = f"--mixing {mode.mixing}"
    if isinstance(mode, Elastic):
        raise UsageError(f"{given} mixes encoded differences, and with --hub models are sent whole: leave it out")
    if _codec(mode.codec) is None or not mode.references:
        raise UsageError(
            f"{given} mixes encoded differences: give --codec, such as 3lc, and --references, or leave it out"
        )
    if isinstance(mode, Pushes):
        raise UsageError(f"{given} is for pulls and pairs: leave it out, or leave out --mode push")


def _check_codec(config: RunConfig, mode: Pulls | Pushes | Pairs | Waves) -> None:
    """Refuse a codec that cannot encode models, or that the exchange of the run excludes."""
    codec, option = _codec(mode.codec), f"--codec {mode.codec}"
    if codec is None:
        if config.is_given("references"):
            raise UsageError(f"--references {mode.references} needs a --codec: give one, or leave it out")
        return
    if isinstance(mode, Pushes) and mode.weights == "push-sum":
        raise UsageError(f"{option} is lossy, and --weights push-sum needs exact values: leave one out")
    if codec.gradients_only:
        raise UsageError(f"{option} is for gradients only, which workers push to servers: leave it out")
    if isinstance(mode, Waves):
        if config.is_given("references"):
            raise UsageError("--references are models of other peers, and a wave needs none: leave it out")
        return
    if not mode.references and not codec.alone:
        from gossipx import codecs

        raise UsageError(
            f"{option} loses too much of a model to be used without references: give --references, or one of"
            f" {', '.join(codecs.alone())}"
        )


def _codec(spec: str) -> Codec | None:
    """Return the codec of a spec; None for ``none``, which is handled without importing the codecs and torch."""
    if spec == "none":
        return None
    from gossipx import codecs

    codec = codecs.parse(spec)
    return None if codec == codecs.NoCodec() else codec  # NoCodec also by another spelling, such as "none:"
