"""Gossip between DDP groups: the processes of a group are one peer, with DDP inside a host and gossip between hosts.

Rank 0 of the group exchanges models with other peers and broadcasts its weights to the group afterwards.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from gossipx.errors import UsageError
from gossipx.integrations.group import GroupStatus, WorldGroup, rank_in_group
from gossipx.launch.environment import ENV_PEERS, ENV_RESUME, start_reporting
from gossipx.launch.loops.join import join as join_alone
from gossipx.launch.loops.join import rank_and_size, run_directory_of, settings_of
from gossipx.model import layout
from gossipx.model.layout import Places
from gossipx.model.section import Section, Slot
from gossipx.policies import Observation, Policy
from gossipx.runtime import model_files
from gossipx.runtime.ending.stop_signals import StopSignals
from gossipx.runtime.figures.scores import Evaluate
from gossipx.runtime.optimizers import OneOrMore, Optimizers
from gossipx.runtime.training import schedule_free
from gossipx.runtime.training.data import shard_of
from gossipx.runtime.training.peer import Peer, check_own
from gossipx.settings.files import absolute_values
from gossipx.settings.modes import Server
from gossipx.settings.sections import RunConfig, RunSettings
from gossipx.tasks import partition

log = logging.getLogger("gossipx")

PolicyLike = str | Policy | Callable[[Observation], bool] | None


def join(
    model: nn.Module,
    optimizer: OneOrMore,
    *,
    peers: str | Path | None = None,
    policy: PolicyLike = None,
    rank: int | None = None,
    evaluate: Evaluate | None = None,
    config_file: str | Path | None = None,
    **settings: Any,
) -> GroupPeer:
    """Make the processes of this DDP group one peer. All of them must call this, and all other functions here.

    For a process without a group this is :func:`gossipx.join`. Rank 0 of the group exchanges models; the other
    processes get its weights before their next forward pass. All processes start with rank 0's model after it joined.

    Args:
        model: may be wrapped in DistributedDataParallel.
        optimizer: as for :func:`gossipx.join`.
        peers: the hosts file, with one line per group.
        policy, config_file, settings: as for :func:`gossipx.join`.
        rank: the group's line in the hosts file, from 0.
        evaluate: called by rank 0 only.

    Raises:
        UsageError: as :func:`gossipx.join`; or servers or ``checkpoint_every`` are set, which are not supported here.
        GossipxError: as :func:`gossipx.join`, on all ranks of the group.
    """
    return PendingJoin(peers, policy, rank, evaluate, config_file, settings).join(model, optimizer)


def shard(
    dataset: Dataset[Any],
    *,
    peers: str | Path | None = None,
    rank: int | None = None,
    config_file: str | Path | None = None,
    **settings: Any,
) -> Dataset[Any]:
    """Return this peer's part of a data set, before joining; the same in all processes of a group.

    Args:
        dataset: as for :meth:`gossipx.Peer.shard`.
        peers, rank, config_file, settings: as for :func:`join`; not needed under ``gossipx run``.

    Raises:
        UsageError: the partition needs labels and the data set has none, or the hosts file does not name this peer.
    """
    return PendingJoin(peers, None, rank, None, config_file, settings).shard(dataset)


@dataclass
class PendingJoin:
    """The arguments of :func:`join` except model and optimizer, stored until these exist."""

    peers: str | Path | None = None
    policy: PolicyLike = None
    rank: int | None = None
    evaluate: Evaluate | None = None
    config_file: str | Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    framework: str = "torch"
    defers: bool = False  # whether the framework calls leave_saved() when a signal has asked to stop
    _named: set[str] = field(default_factory=set, init=False)  # directories of which a line was logged

    def __post_init__(self) -> None:
        start_reporting()  # an error may end this process before it joins
        _check_for_groups(self.run)
        # The script may change its directory before it joins.
        self.peers, self.config_file = (
            None if given is None else Path(given).absolute() for given in (self.peers, self.config_file)
        )
        logdir = {} if self.config_file is not None else {"logdir": RunSettings().logdir}
        self.settings = absolute_values(logdir | self.settings)

    @property
    def run(self) -> RunConfig:
        """The effective settings: under ``gossipx run`` those of the run, otherwise the given ones."""
        policy = {"policy": self.policy} if isinstance(self.policy, str) else {}
        return settings_of(self.config_file, {**self.settings, **policy})

    @property
    def directory(self) -> Path:
        """As :attr:`gossipx.Peer.directory`, but before joining."""
        run = self.run
        return model_files.directory_of(run_directory_of(run), rank_and_size(run, self.peers, self.rank)[0])

    def own(self, directory: str | os.PathLike[str]) -> str:
        """Return a directory for checkpoints of this peer alone within one that the peers may share, before joining.

        It is called ``peer-00``, by rank; the peer logs a line that names it. A directory that is in one of that name
        already is this peer's own.
        """
        rank, size = rank_and_size(self.run, self.peers, self.rank)
        given, name = os.fspath(directory), model_files.directory_of(Path(), rank).name
        if size == 1 or name in Path(given).absolute().parts:
            return given
        own = f"{given}/{name}"  # it may be a URL
        if rank_in_group() == 0 and own not in self._named:
            self._named.add(own)
            log.warning(
                "%s: each peer keeps its checkpoints in a directory of its own there, this one in %s", given, own
            )
        return own

    def shard(self, dataset: Dataset[Any]) -> Dataset[Any]:
        """Return this peer's part of a data set, as :meth:`gossipx.Peer.shard` does, but before joining.

        All processes of a group get the same part; a sampler divides it among them.

        Raises:
            UsageError: the partition needs labels and the data set has none, or the hosts file does not name this peer.
        """
        run = self.run
        rank, size = rank_and_size(run, self.peers, self.rank)
        by = partition.partition_from(run.task.partition)
        split = functools.partial(by.split, parts=size, seed=run.run.seed)
        return shard_of(dataset, split, by.by_label, rank, lambda: size)

    def join(self, model: nn.Module, optimizer: OneOrMore, state: Mapping[str, Any] | None = None) -> GroupPeer:
        """Join the run.

        Args:
            state: what :meth:`GroupPeer.state_dict` returned: resume from it with the model's current values. None:
                start with the run's initial model.
        """
        return GroupPeer(self, model, optimizer, state)


class GroupPeer:
    """A peer that consists of a group of processes with equal models, or of one process; created by :func:`join`.

    Use it as a context manager, like :class:`gossipx.Peer`. All processes of the group must call each method together,
    except :meth:`log`, :meth:`leave`, :meth:`leave_at_exit` and :meth:`close`.

    Attributes:
        rank: the peer's rank in the run, the same in all processes of the group.
        size: number of peers in the run.
        iteration: iterations done.
        directory: as :attr:`gossipx.Peer.directory`.
    """

    def __init__(
        self,
        joining: PendingJoin,
        model: nn.Module,
        optimizer: OneOrMore,
        state: Mapping[str, Any] | None,
    ):
        run = joining.run
        self._module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self._optimizers = Optimizers(self._module, optimizer)
        self._averages = schedule_free.of(self._module, self._optimizers, has_servers=False)
        self._group = WorldGroup()
        self._peer: Peer | None = None
        # The model's layout on ranks other than 0; on rank 0 the peer's arena has it.
        self._slots: list[Slot] = []
        self._places: Places | None = None
        self._sections: list[Section] = []
        self._mixes = 0
        self._signals = StopSignals()  # of a rank other than 0, which leaves when rank 0 does
        self._open = self._asked = False

        status = self._run_on_rank_0(functools.partial(self._begin, joining, state) if self._group.rank == 0 else None)
        self.rank, self.size, self.iteration = status.rank, status.size, status.iteration
        self.directory = model_files.directory_of(run_directory_of(run), self.rank)
        if self._peer is None:
            self._signals.install()
            self._slots = list(layout.slots_of(self._module, run.sync.buffers == "mix"))
            self._sections = layout.sections_of(self._slots)
            self._places = Places(self._module, self._slots, self._sections)
        self._group.broadcast(section.storage for section in self._sections)
        self._optimizers.count(self.step)
        self._open = True

    def _begin(self, joining: PendingJoin, state: Mapping[str, Any] | None) -> None:
        """Join the run; for rank 0 of the group."""
        if self._group.size > 1 and joining.peers is None and ENV_PEERS not in os.environ:
            raise UsageError(
                f"the {self._group.size} processes of this group are one peer: name the other peers with "
                "peers='hosts.txt'"
            )
        # torchrun's RANK is the rank of a process in its group, not of a peer in the run.
        rank, size = rank_and_size(joining.run, joining.peers, joining.rank)
        if state is not None:
            check_own(state, rank, size)
        # Joining replaces the model's values by the initial ones of the run; a resumed peer gets its own back below.
        own = None if state is None else [tensor.detach().clone() for tensor in _tensors(self._module)]
        self._peer = peer = join_alone(
            self._module,
            None,  # the group's optimizers call the group's step(), which calls the peer's
            peers=joining.peers,
            policy=joining.policy,
            rank=rank,
            evaluate=joining.evaluate,
            config_file=joining.config_file,
            **joining.settings,
        )
        peer.saved_by(joining.framework, joining.defers)
        self._sections = peer.arena.whole
        if state is not None and own is not None:
            with torch.no_grad():
                for tensor, value in zip(_tensors(self._module), own, strict=True):
                    tensor.copy_(value)
            peer.load_state_dict(dict(state))

    def _run_on_rank_0(self, action: Callable[[], object] | None) -> GroupStatus:
        """Run an action on rank 0 and share the resulting status with all ranks.

        If the action fails, all ranks raise an error.

        Args:
            action: None on the other ranks.
        """
        status = None
        if action is not None:
            try:
                action()
            except BaseException as error:
                self._group.share(GroupStatus.of(error))
                raise
            peer = self._peer
            assert peer is not None
            weights_follow = peer.mixes > self._mixes
            status = GroupStatus(peer.rank, peer.size, peer.iteration, weights_follow, asked=peer.asked)
            self._mixes = peer.mixes
        status = self._group.share(status)
        if status.exit_code is not None:
            status.end()
        return status

    @property
    def asked(self) -> bool:
        """Whether a signal has asked the peer to stop; in a group as of the last step, so that all ranks agree."""
        return self._asked if self._peer is None or self._group.size > 1 else self._peer.asked

    # --- the training loop --------------------------------------------------------------------------

    def step(self) -> None:
        """Count one iteration. The optimizer given to :func:`join` calls this after each of its steps.

        Raises:
            GossipxError: training cannot continue, for example because too few peers are left or the models differ.
        """
        if not self._open:
            return
        status = self._run_on_rank_0(None if self._peer is None else self._peer.step)
        self.iteration, self._asked = status.iteration, status.asked
        if status.weights_follow:
            self._broadcast_exchanged()

    def _broadcast_exchanged(self) -> None:
        """Broadcast the values that exchanges change, which come first in each section."""
        if self._places is not None:
            self._places.check()
        with torch.no_grad():
            self._group.broadcast(section.storage[: section.mixed] for section in self._sections)

    def log(self, tag: str, value: float | Tensor) -> None:
        """As :meth:`gossipx.Peer.log` on rank 0 of the group; ignored on the other ranks."""
        if self._peer is not None:
            self._peer.log(tag, value)

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`gossipx.Peer.state_dict` on rank 0 of the group; empty on the other ranks."""
        return {} if self._peer is None else self._peer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`gossipx.Peer.load_state_dict`. Load model and optimizer before, equally in all processes.

        Args:
            state: what :meth:`state_dict` returned on rank 0; the same in all processes.

        Raises:
            UsageError: as :meth:`gossipx.Peer.load_state_dict`, in all processes.
        """
        check_own(state, self.rank, self.size)
        if self._peer is not None:
            self._peer.load_state_dict(dict(state))
        self.iteration = int(state["iteration"])

    # --- the end ------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the training: take part in the finish, and leave. All processes of the group have the final model."""
        if not self._open:
            return
        self._close_hooks()
        if self._averages is not None:
            self._averages.training_ended()
        self._run_on_rank_0(None if self._peer is None else self._peer.finish)
        self._broadcast_exchanged()
        self.close()

    def leave(self) -> None:
        """Leave the run without a finish, and notify the other peers."""
        if self._peer is not None:
            self._peer.leave()
        self.close()

    def leave_saved(self, kept: str) -> None:
        """As :meth:`gossipx.Peer.leave_saved`, in all processes of the group."""
        self._close_hooks()
        self._run_on_rank_0(None if self._peer is None else functools.partial(self._peer.leave_saved, kept))

    def leave_at_exit(self) -> None:
        """As :meth:`gossipx.Peer.leave_at_exit`."""
        if self._peer is not None:
            self._peer.leave_at_exit()

    def close(self) -> None:
        """Leave the run without a finish or a notice. Idempotent."""
        self._close_hooks()
        if self._peer is not None:
            self._peer.close()
        elif self._slots:
            layout.detach(self._slots)
        self._signals.restore()
        self._slots, self._sections = [], []
        if self._averages is not None:
            self._averages.close()
            self._averages = None
        self._group.close()

    def _close_hooks(self) -> None:
        self._open = False
        self._optimizers.close()

    def __enter__(self) -> GroupPeer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
            return
        try:
            if self._peer is not None:
                self._peer.__exit__(kind, error, trace)
        finally:
            self.close()


def _check_for_groups(run: RunConfig) -> None:
    """Check that a run is one for groups of processes.

    Raises:
        UsageError: it has a parameter server, checkpoints, or resumes.
    """
    if isinstance(run.mode, Server):
        raise UsageError("a parameter server needs a loop of your own with gossipx.join: leave out --servers here")
    if str(run.run.checkpoint_every) != "0" or os.environ.get(ENV_RESUME):
        raise UsageError(
            "--checkpoint-every and --resume need a loop of your own with gossipx.join: leave them out, since the "
            "framework's checkpoints contain gossipx's state"
        )


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return all parameters and buffers; tied ones appear once."""
    return [*module.parameters(), *module.buffers()]
