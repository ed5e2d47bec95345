"""The peers of a simulated run, built like real ones."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gossipx.assembly.peer import add_codecs, build_arena
from gossipx.assembly.role import build_role
from gossipx.assembly.server import serve
from gossipx.launch.loops.train import live_of, optimizer_of, rate_of, scores
from gossipx.launch.simulation.plan import Plan, deltas_of, incarnation_of, policy_of, served_of, sizes_of
from gossipx.peer import PeerRole
from gossipx.peer.joining.admission import why_closed
from gossipx.server.plan import ServerPlan
from gossipx.settings.sections import RunConfig
from gossipx.sim import SimPeer
from gossipx.sim.base import BasePeer
from gossipx.sim.traffic import TrafficPeer
from gossipx.sync import SyncManager
from gossipx.tasks.data import TASKS, Batches, Samples, load
from gossipx.tasks.models import build_model
from gossipx.tasks.partition import partition_from

ANY_NUMBER = 2**20
"""Gradients that a server receives at a time: virtual time cannot wait for a place."""
HOST = torch.device("cpu")


@dataclass
class Disks:
    """The disks of all peers, and whether a peer that is started again has its disk.

    Attributes:
        every: iterations between two checkpoints; 0: none are written.
        lost: ranks of the peers whose next process finds no checkpoint.
        checkpoints: the last one of each peer, by rank.
    """

    every: int
    lost: set[int] = field(default_factory=set)
    checkpoints: dict[int, dict[str, Any]] = field(default_factory=dict)

    def found(self, rank: int) -> dict[str, Any] | None:
        """Return the checkpoint that a new process of a peer finds."""
        if rank in self.lost:
            self.lost.discard(rank)
            return None
        return self.checkpoints.get(rank)

    def iteration(self, rank: int) -> int:
        """Return the iteration of a peer's checkpoint; 0: it has none."""
        return int(self.checkpoints[rank]["driver"]["iteration"]) if rank in self.checkpoints else 0


class RealPeers:
    """Makes peers that train the built-in task.

    Args:
        plan: the run.
        disks: where their checkpoints are kept.
    """

    def __init__(self, plan: Plan, disks: Disks):
        task = plan.config.task
        self._plan = plan
        self._disks = disks
        self._everything, self._test = load(task.task, None if task.data_dir is None else Path(task.data_dir))
        labels = self._everything.labels.numpy()
        self._parts = partition_from(task.partition).split(labels, plan.size, plan.config.run.seed)
        self._live = live_of(self._test)
        self._scores: dict[str, dict[str, float]] = {}  # of final models, by digest
        torch.set_num_threads(plan.config.run.threads)

    def __call__(self, rank: int, number: int) -> SimPeer:
        """Return the peer of this rank; ``number`` counts its processes from 0."""
        plan, config, spec = self._plan, self._plan.config, TASKS[self._plan.config.task.task]
        # Peers that fetch no first model begin with the one that they would fetch.
        first = 0 if plan.assembled and config.sync.init == "first" else rank
        torch.manual_seed(config.run.seed * 1000 + first)
        classes = self._everything.classes
        model = build_model(config.task.model, classes=classes, channels=spec.channels, pixels=spec.pixels)
        optimizer = optimizer_of(model, config.task)
        served = serve(config, plan.names, rank, model, [optimizer], plan.parts, ANY_NUMBER)
        arena = build_arena(config, rank, model)
        role = _role(plan, rank, number, arena.nbytes(), None if served is None else served.plan)
        assert config.task.batch_size is not None
        own = self._everything.take(self._parts[rank])
        batches = Batches(own, config.task.batch_size, config.run.seed * 1000 + rank)
        if number:
            batches.seek(number * config.run.iterations)  # other batches than those before
        training = _Training(config, model, optimizer, batches, self._live, self._disks, served is not None)
        peer = SimPeer(
            role,
            model,
            training.step,
            config.run.iterations if role.trains else 0,
            plan.times.of(rank),
            arena,
            None if served is None else served.table_store,
        )
        add_codecs(peer.driver, config, model)
        if config.sync.init == "first":
            peer.begin_codec()
        peer.seconds = config.run.seconds
        peer.after_step = lambda: training.step_done(peer)
        peer.evaluate = lambda: self._scores_of(peer)
        peer.scored = not plan.assembled or rank < plan.scenario.simulation.recorded
        if config.run.checkpoint_every != "0" and number:
            training.resume(peer)
        _assemble(plan, peer, number)
        return peer

    def _scores_of(self, peer: SimPeer) -> dict[str, float]:
        """Evaluate a model on all test data, once for all peers that hold it."""
        own = peer.digest()
        if own not in self._scores:
            self._scores[own] = scores(peer.module, self._test, HOST)
        return self._scores[own]


@dataclass
class _Training:
    """The training loop of one peer, and its checkpoints.

    Attributes:
        live: the data on which the model is evaluated from time to time.
        is_served: whether servers apply the gradients, instead of the optimizer.
        loss: of the last batch.
    """

    config: RunConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    live: Samples
    disks: Disks
    is_served: bool
    loss: float = math.nan

    def step(self, peer: SimPeer) -> None:
        """Compute the gradient of the next batch, and make the optimizer's step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate_of(self.config.task, *peer.used)
        inputs, labels = next(self.batches)
        self.optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(self.model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss = float(loss.detach())
        if not self.is_served:
            self.optimizer.step()

    def step_done(self, peer: SimPeer) -> None:
        """Write a checkpoint and record curves, if they are due."""
        assert peer.reporter is not None
        step, run = peer.arena.step, self.config.run
        if self.disks.every and step % self.disks.every == 0:
            self.disks.checkpoints[peer.rank] = {
                "model": {name: value.clone() for name, value in self.model.state_dict().items()},
                "optimizer": copy.deepcopy(self.optimizer.state_dict()),
                "driver": peer.driver.state_dict(),
            }
        if step % run.log_interval == 0:
            peer.reporter.scalar("train/loss", self.loss)
        if run.eval_interval and step % run.eval_interval == 0:
            for name, value in scores(self.model, self.live, HOST).items():
                peer.reporter.scalar(f"test/{name}", value)

    def resume(self, peer: SimPeer) -> None:
        """Let a peer resume from the checkpoint on its disk, if there is one."""
        found = self.disks.found(peer.rank)
        if found is None:
            return
        peer.resumed = True

        def restore() -> None:
            self.model.load_state_dict(found["model"])
            self.optimizer.load_state_dict(found["optimizer"])
            peer.driver.load_state_dict(found["driver"])
            self.batches.seek(found["driver"]["iteration"])

        peer.before_join = restore


class TrafficPeers:
    """Makes peers without a model.

    Args:
        plan: the run.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._served = served_of(plan)
        self._sizes = sizes_of(plan) if self._served is None else self._served[1]
        self._deltas = deltas_of(plan)

    def __call__(self, rank: int, number: int) -> TrafficPeer:
        """Return the peer of this rank; ``number`` counts its processes from 0."""
        plan, config = self._plan, self._plan.config
        served = None if self._served is None else self._served[0]
        role = _role(plan, rank, number, self._sizes.whole, served)
        iterations = config.run.iterations if role.trains else 0
        peer = TrafficPeer(role, iterations, plan.times.of(rank), self._sizes, self._deltas(rank))
        _assemble(plan, peer, number)
        return peer


def _assemble(plan: Plan, peer: BasePeer, number: int) -> None:
    peer.assembled = plan.assembled and not number and peer.rank not in plan.late
    peer.announces = not plan.assembled
    peer.evaluation_seconds = plan.scenario.compute.evaluation


def _role(plan: Plan, rank: int, number: int, model_bytes: int, served: ServerPlan | None) -> PeerRole:
    chosen = policy_of(plan, rank)
    return build_role(
        plan.config,
        rank,
        plan.size,
        plan.schedule,
        model_bytes=model_bytes,
        incarnation=incarnation_of(plan, rank, number),
        why_closed=why_closed(plan.config, plan.schedule),
        hub=plan.hub,
        server_plan=served,
        sync_manager=SyncManager if chosen is None else lambda policy, seed: SyncManager(chosen, seed),
    )
