"""One gossip peer for each group of processes that DDP keeps equal: DDP inside a host, gossip between hosts."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, Subset

from gossipx.config.settings import RunConfig
from gossipx.errors import UsageError
from gossipx.integrations.group import Group, GroupStatus
from gossipx.launch.environment import ENV_PEERS, ENV_RESUME
from gossipx.launch.loops.join import join as join_alone
from gossipx.launch.loops.join import rank_and_size, settings_of
from gossipx.model import layout
from gossipx.model.layout import Section, Slot
from gossipx.policies import Observation, Policy
from gossipx.runtime.options import labels_of
from gossipx.runtime.peer import Peer, overflowed
from gossipx.tasks import partition

PolicyLike = str | Policy | Callable[[Observation], bool] | None


def join(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    peers: str | Path | None = None,
    policy: PolicyLike = None,
    rank: int | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    config_file: str | Path | None = None,
    **settings: Any,
) -> GroupPeer:
    """Make the processes of this DDP group one peer; to be called by all of them, as all else that is here.

    As :func:`gossipx.join`, which it is for a process without a group. Rank 0 of the group gossips; its weights reach
    the others before their next forward pass. All take the values of the peer that began.

    Args:
        model: in DistributedDataParallel or not.
        optimizer: its step is an iteration.
        peers: the hosts file: a line a group.
        policy, config_file, settings: as for :func:`gossipx.join`.
        rank: of the group, which line of the hosts file it is.
        evaluate: called by rank 0 alone.

    Raises:
        UsageError: as :func:`gossipx.join`; or settings for loops of one's own alone: servers, ``checkpoint_every``.
        GossipxError: as :func:`gossipx.join`, on all ranks of the group.
    """
    return Joining(peers, policy, rank, evaluate, config_file, settings).join(model, optimizer)


def shard(
    dataset: Dataset[Any],
    *,
    peers: str | Path | None = None,
    rank: int | None = None,
    config_file: str | Path | None = None,
    **settings: Any,
) -> Subset[Any]:
    """This peer's part of a data set, before joining; the same in all processes of a group.

    Args:
        dataset: as for :meth:`gossipx.Peer.shard`.
        peers, rank, config_file, settings: as for :func:`join`; none under ``gossipx run``.

    Raises:
        UsageError: it has no labels, and the partition needs them; or this is no peer of the hosts file.
    """
    return Joining(peers, None, rank, None, config_file, settings).shard(dataset)


@dataclass
class Joining:
    """What a peer is to join with, before there is a model to join: arguments as :func:`join` has them."""

    peers: str | Path | None = None
    policy: PolicyLike = None
    rank: int | None = None
    evaluate: Callable[[nn.Module], float] | None = None
    config_file: str | Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> RunConfig:
        """The settings that hold here."""
        policy = {"policy": self.policy} if isinstance(self.policy, str) else {}
        return settings_of(self.config_file, {**self.settings, **policy})

    def shard(self, dataset: Dataset[Any]) -> Subset[Any]:
        """This peer's part of a data set, as :meth:`gossipx.Peer.shard` gives it, before joining.

        All processes of a group get the same part, which a sampler deals out to them.

        Raises:
            UsageError: the data set has no labels, and the partition needs them; or this is no peer of the hosts file.
        """
        run = self.run
        rank, size = rank_and_size(run, self.peers, self.rank)
        by = partition.parse(run.task.partition)
        parts = by.split(labels_of(dataset, by.by_label), size, run.run.seed)
        return Subset(dataset, [int(index) for index in parts[rank]])

    def join(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any] | None = None
    ) -> GroupPeer:
        """Join; with ``state``, what :meth:`GroupPeer.state_dict` gave, go on from there with the model as it is."""
        return GroupPeer(self, model, optimizer, state)


class GroupPeer:
    """A peer that is a group of processes with equal models, or one process; made by :func:`join`.

    Use it as a context manager, as :class:`gossipx.Peer`. All of it but :meth:`log`, :meth:`leave`,
    :meth:`leave_at_exit` and :meth:`close` is for all processes of the group together.

    Attributes:
        rank: of the peer, the same in all processes of the group.
        size: peers in the run.
        iteration: iterations done.
    """

    def __init__(
        self,
        joining: Joining,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any] | None,
    ):
        run = joining.run
        _check(run)
        self._module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self._group = Group()
        self._peer: Peer | None = None
        self._slots: list[Slot] = []  # where this process lays the model out by itself
        self._sections: list[Section] = []
        self._mixes = 0
        self._unhook: list[Callable[[], None]] = []
        self._open = False

        status = self._after(functools.partial(self._begin, joining, state) if self._group.rank == 0 else None)
        self.rank, self.size, self.iteration = status.rank, status.size, status.iteration
        if self._peer is None:
            self._slots = list(layout.slots_of(self._module, run.sync.buffers == "mix"))
            self._sections = [layout.lay_out(kind) for kind in layout.by_dtype(self._slots).values()]
        self._group.give(section.storage for section in self._sections)
        self._unhook.append(optimizer.register_step_post_hook(self._optimizer_stepped).remove)
        self._open = True

    def _begin(self, joining: Joining, state: Mapping[str, Any] | None) -> None:
        """Rank 0's part of joining."""
        if self._group.size > 1 and joining.peers is None and ENV_PEERS not in os.environ:
            raise UsageError(
                f"the {self._group.size} processes of this group are one peer: say who the other peers are, "
                "peers='hosts.txt'"
            )
        # torchrun's rank is that of a process in its group, and not that of a peer.
        rank, _ = rank_and_size(joining.run, joining.peers, joining.rank)
        own = None if state is None else [tensor.detach().clone() for tensor in _tensors(self._module)]
        self._peer = peer = join_alone(
            self._module,
            None,
            peers=joining.peers,
            policy=joining.policy,
            rank=rank,
            evaluate=joining.evaluate,
            config_file=joining.config_file,
            **joining.settings,
        )
        self._sections = peer.arena.sections
        if state is not None and own is not None:
            with torch.no_grad():
                for tensor, value in zip(_tensors(self._module), own, strict=True):
                    tensor.copy_(value)
            peer.load_state_dict(dict(state))

    def _after(self, act: Callable[[], object] | None) -> GroupStatus:
        """Rank 0 acts, and all learn what has come of it; None: this is another rank."""
        status = None
        if act is not None:
            try:
                act()
            except BaseException as error:
                self._group.tell(GroupStatus.of(error))
                raise
            peer = self._peer
            assert peer is not None
            status = GroupStatus(peer.rank, peer.size, peer.iteration, peer.mixes > self._mixes)
            self._mixes = peer.mixes
        status = self._group.tell(status)
        if status.exit_code is not None:
            status.end()
        return status

    # --- the training loop --------------------------------------------------------------------------

    def step(self) -> None:
        """One iteration is done. The joined optimizer calls this itself.

        Raises:
            GossipxError: training cannot go on (too few peers left, models that differ).
        """
        if not self._open:
            return
        status = self._after(None if self._peer is None else self._peer.step)
        self.iteration = status.iteration
        if status.entered:
            self._give_exchanged()

    def _give_exchanged(self) -> None:
        with torch.no_grad():
            self._group.give(section.storage[: section.mixed] for section in self._sections)

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not overflowed(optimizer):
            self.step()

    def log(self, tag: str, value: float | Tensor) -> None:
        """As :meth:`gossipx.Peer.log`; what others than rank 0 of the group say is left out."""
        if self._peer is not None:
            self._peer.log(tag, value)

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`gossipx.Peer.state_dict`, by rank 0 of the group; empty elsewhere."""
        return {} if self._peer is None else self._peer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`gossipx.Peer.load_state_dict`: model and optimizer, the same in all processes, are loaded before.

        Args:
            state: what :meth:`state_dict` gave on rank 0.
        """
        if self._peer is not None:
            self._peer.load_state_dict(dict(state))
        self.iteration = int(state["iteration"])

    def copy_state(self) -> None:
        """While joined, have ``state_dict()`` of the model give copies.

        Joined, all are views of one vector. Who writes safetensors takes tensors of one storage for one tensor:
        Accelerate would leave out all but the first.
        """
        handle = self._module._register_state_dict_hook(_copied)  # type: ignore[no-untyped-call]
        self._unhook.append(handle.remove)

    # --- the end ------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Training is over: agree with the other peers, and leave; all processes hold the model that comes out."""
        if not self._open:
            return
        self._close_hooks()
        self._after(None if self._peer is None else self._peer.finish)
        self._give_exchanged()
        self.close()

    def leave(self) -> None:
        """Take no further part, without a finish, and tell the other peers."""
        if self._peer is not None:
            self._peer.leave()
        self.close()

    def leave_at_exit(self) -> None:
        """As :meth:`gossipx.Peer.leave_at_exit`."""
        if self._peer is not None:
            self._peer.leave_at_exit()

    def close(self) -> None:
        """Take no further part, without a finish; any number of times."""
        self._close_hooks()
        if self._peer is not None:
            self._peer.close()
        elif self._slots:
            layout.detach(self._slots)
        self._slots, self._sections = [], []
        self._group.close()

    def _close_hooks(self) -> None:
        self._open = False
        while self._unhook:
            self._unhook.pop()()

    def __enter__(self) -> GroupPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
            return
        if self._peer is not None:
            self._peer.__exit__(kind, error, trace)
        self.close()


def _check(run: RunConfig) -> None:
    if run.server.servers is not None or run.sync.mode == "server":
        raise UsageError("a parameter server is for loops of your own, with gossipx.join: leave out --servers here")
    if str(run.run.checkpoint_every) != "0" or os.environ.get(ENV_RESUME):
        raise UsageError(
            "--checkpoint-every and --resume are for loops of your own, with gossipx.join: here the loop's own "
            "checkpoints hold gossipx's state"
        )


def _tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, tied ones once."""
    return [*module.parameters(), *module.buffers()]


def _copied(module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
    """Give each tensor of a state storage of its own; tied ones stay tied."""
    own: dict[tuple[int, torch.Size, tuple[int, ...]], Tensor] = {}
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, Tensor):
            place = value.data_ptr(), value.shape, value.stride()
            if place not in own:
                own[place] = value.detach().clone(memory_format=torch.preserve_format)
            state[name] = own[place]
