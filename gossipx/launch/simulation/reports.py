"""The curves and figures of a simulated run, recorded as those of a real one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import nn

from gossipx import recorders
from gossipx.errors import UsageError
from gossipx.launch.simulation.plan import Plan
from gossipx.metrics.aggregate import WORST, Aggregate
from gossipx.metrics.board import HUB, PEERS, SERVERS, WHOLE
from gossipx.metrics.recorder import Recorder
from gossipx.recorders import Recorded
from gossipx.runtime import model_files
from gossipx.runtime.figures.progress import Progress
from gossipx.runtime.figures.reporting import MeasuredPeer, Reporter
from gossipx.runtime.place import Place
from gossipx.settings.modes import Elastic, Server
from gossipx.sim import SimPeer, World
from gossipx.sim.base import BasePeer
from gossipx.sim.traffic import TrafficPeer
from gossipx.transports import Address

EXACT_DISTANCE = "sync/exact_consensus_distance"
"""Tag of Eq. 8 as it is, where ``sync/consensus_distance`` is what a peer can estimate of it."""


class SimReporter(Reporter):
    """The reporter of a simulated peer.

    Args:
        peer: the peer, connected to its world.
        recorder: records its curves.
        curves: the curves of the whole run; None: they are not recorded.
    """

    def __init__(
        self, plan: Plan, peer: BasePeer, recorder: Recorder, curves: Aggregate | None, world: World[BasePeer]
    ):
        measured: MeasuredPeer = peer.driver if isinstance(peer, SimPeer) else cast(TrafficPeer, peer)
        module = peer.module if isinstance(peer, SimPeer) else nn.Identity()
        nowhere = Address("", 0)
        place = Place(peer.rank, tuple(plan.names), (), nowhere, "", None, Progress(None), under_run=True)
        super().__init__(module, measured, peer.endpoint, recorder, plan.config, place, plan.config.decides)
        self._curves = curves
        self._peer = peer
        self._world = world
        self._every = plan.config.sync.distance_interval

    def _record(self, tag: str, value: float, step: int) -> None:
        self._recorder.scalar(tag, value, step)
        if self._curves is not None and tag in WORST:
            self._curves.add(self._peer.rank, [(tag, step, value)])

    def step_done(self, delta: float) -> None:
        super().step_done(delta)
        is_kept = self._recorder is not recorders.NOWHERE  # it takes all models, of each peer
        if is_kept and isinstance(self._peer, SimPeer) and self._peer.step % self._every == 0:
            own = self._peer.weights()
            others = [peer.weights() for peer in self._world.peers.values() if isinstance(peer, SimPeer)]
            self._record(EXACT_DISTANCE, float((own - torch.stack(others).mean(0)).norm()), self._peer.step)


def peer_recorder(plan: Plan, directory: Path, rank: int, number: int, clock: Callable[[], float]) -> Recorder:
    """Return the recorder of a peer's curves.

    Args:
        directory: of the run.
        number: of the peer's process, from 0; only the first one records curves.
        clock: returns the virtual time.

    Raises:
        UsageError: nothing can be written there.
    """
    config = plan.config
    if rank >= plan.scenario.simulation.recorded or number:
        return recorders.NOWHERE
    used = {WHOLE: True, PEERS: True, HUB: isinstance(config.mode, Elastic), SERVERS: isinstance(config.mode, Server)}
    parts = [part for part, is_used in used.items() if is_used]
    own, name = model_files.directory_of(directory, rank), str(config.run.name)
    settings = config.hyperparameters(plan.size)
    try:
        return recorders.open_all(
            config.run.recorder, None, Recorded(name, plan.names[rank], rank, own, settings, parts, None, clock)
        )
    except OSError as error:
        raise UsageError(f"cannot write there: {error.strerror}; give another --logdir", own) from error


def curves_of(plan: Plan, directory: Path, clock: Callable[[], float]) -> Aggregate | None:
    """Return the curves of the whole run; None: TensorBoard is not among its recorders."""
    named = [part.partition(":")[0].strip() for part in plan.config.run.recorder.split("+")]
    if "tensorboard" not in named:
        return None
    curves = Aggregate(directory, lambda: plan.config.hyperparameters(plan.size), clock=clock)
    curves.begin()
    return curves


def consensus(peers: list[SimPeer]) -> dict[str, float]:
    """Return the scores of the average of the peers' finite models; empty if all have diverged."""
    states = [peer.module.state_dict() for peer in peers if math.isfinite(float(peer.weights().norm()))]
    if not states:
        return {}
    module = peers[0].module
    own = {name: value.clone() for name, value in module.state_dict().items()}
    try:
        with torch.no_grad():
            for name, value in module.state_dict().items():
                if value.is_floating_point():
                    value.copy_(torch.stack([state[name].double() for state in states]).mean(0))
        return peers[0].evaluate()
    finally:
        module.load_state_dict(own)
