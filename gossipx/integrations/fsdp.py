"""Gossip between FSDP groups: FSDP2 shards a model among the processes of a host, and hosts exchange models.

No process holds the whole model. So the processes with the same part of it, one per host, are the peers of a gossip of
their own: rank r of a group exchanges its shards with rank r of another group. All parts are averaged in the same way,
so that together these exchanges are those of the whole model.

FSDP keeps its shards in memory of its own. So they are copied into the peer's model after each step, and back when
other shards were mixed into that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gossipx.errors import GossipxError, UsageError
from gossipx.integrations.ddp import PendingJoin, PolicyLike
from gossipx.integrations.ddp import shard as shard
from gossipx.integrations.group import TIMEOUT
from gossipx.launch.environment import ENV_CONFIG, ENV_PEERS, ENV_PROGRESS
from gossipx.launch.hosts import NAT, read_hosts
from gossipx.launch.loops.join import join as join_alone
from gossipx.launch.loops.join import rank_and_size, run_directory_of
from gossipx.runtime.optimizers import OneOrMore, Optimizers
from gossipx.runtime.training import schedule_free
from gossipx.settings.sections import RunConfig
from gossipx.transports import Address


def join(
    model: nn.Module,
    optimizer: OneOrMore,
    *,
    peers: str | Path | None = None,
    policy: PolicyLike = None,
    rank: int | None = None,
    config_file: str | Path | None = None,
    **settings: Any,
) -> ShardPeer:
    """Make the processes of this FSDP group one peer. All of them must call this, and all functions of the result.

    Args:
        model: sharded by ``fully_shard`` among all processes of torch.distributed, every parameter of it.
        optimizer: as for :func:`gossipx.join`.
        peers: the hosts file, with one line per group. Of n lines, rank r of a group listens at its line's port + r·n.
        policy, config_file, settings: as for :func:`gossipx.join`. Each process decides by its own shards.
        rank: the group's line in the hosts file, from 0.

    Raises:
        UsageError: as :func:`gossipx.integrations.ddp.join`; or a parameter is not sharded like this.
        GossipxError: as :func:`gossipx.join`.
    """
    return ShardPeer(PendingJoin(peers, policy, rank, None, config_file, settings, "torch"), model, optimizer)


class ShardPeer:
    """The part of a peer in one process of an FSDP group; created by :func:`join`.

    Use it as a context manager, like :class:`gossipx.Peer`.

    Attributes:
        rank: the peer's rank in the run, the same in all processes of the group.
        size: number of peers in the run.
        directory: of this process within the run's directory.
    """

    def __init__(self, joining: PendingJoin, model: nn.Module, optimizer: OneOrMore):
        run = joining.run
        self._optimizers = Optimizers(model, optimizer)
        for one in self._optimizers:
            if schedule_free.is_one(one):
                raise UsageError(
                    f"{type(one).__name__} has a second set of weights, which FSDP groups do not exchange: use another"
                    " optimizer"
                )
        self._model = model
        self._copy = _copy_of(model)
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._open = True
        self._mixes = -1
        self.rank, self.size = rank_and_size(run, joining.peers, joining.rank)
        with _join_arguments(run, joining.peers) as given:
            self._together(lambda: self._join(joining, given))
        self.directory = self._peer.directory
        self._take_back()
        self._optimizers.count(self.step)

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self._peer.iteration

    def _join(self, joining: PendingJoin, given: dict[str, Any]) -> None:
        own = {"peers": joining.peers, **joining.settings, **given}
        self._peer = join_alone(
            self._copy, None, policy=joining.policy, rank=self.rank, config_file=joining.config_file, **own
        )
        self._peer.saved_by("torch", defers=True)

    # --- the training loop --------------------------------------------------------------------------

    def step(self) -> None:
        """Count one iteration. The optimizer given to :func:`join` calls this after each of its steps.

        Raises:
            GossipxError: training cannot continue, in this process or in another one of the group.
        """
        if self._open:
            _copy(self._model, self._copy)
            self._together(self._peer.step)
            self._take_back()

    def _take_back(self) -> None:
        """Copy the shards back to FSDP's memory if others were mixed into them."""
        if self._peer.mixes != self._mixes:
            self._mixes = self._peer.mixes
            _copy(self._copy, self._model)

    def log(self, tag: str, value: float | Tensor) -> None:
        """As :meth:`gossipx.Peer.log`, among the curves of this process."""
        self._peer.log(tag, value)

    def _together(self, action: Callable[[], object]) -> None:
        """Run an action in all processes of the group; if one fails or is asked to stop, all of them end."""
        failed, asked = True, False
        try:
            action()
            failed, asked = False, self._peer.asked
        finally:  # an error of this process ends it; the others would wait for it in their next collective call
            told = torch.tensor([failed, asked], dtype=torch.uint8)
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        failed, stops = map(bool, told.tolist())
        if failed:
            raise GossipxError("another process of this FSDP group ended: see its output")
        if stops:
            self._peer.leave_saved("")

    # --- the end ------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the training: take part in the finish, and leave. All groups then have the same model."""
        if self._open:
            self._open = False
            _copy(self._model, self._copy)
            self._together(self._peer.finish)
            _copy(self._copy, self._model)
            self.close()

    def leave(self) -> None:
        """Leave the run without a finish, and notify the other peers."""
        self._peer.leave()
        self.close()

    def close(self) -> None:
        """Leave the run without a finish or a notice. Idempotent."""
        self._open = False
        self._optimizers.close()
        self._peer.close()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def __enter__(self) -> ShardPeer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
            return
        try:
            self._peer.__exit__(kind, error, trace)
        finally:
            self.close()


def _copy_of(model: nn.Module) -> nn.Module:
    """Return a module with copies of this process's shards, and of the buffers, under the same names."""
    whole = dist.get_world_size()
    copy = nn.Module()
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UsageError(f"parameter '{name}' is not sharded: apply fully_shard to the whole model before joining")
        mesh = parameter.device_mesh
        if mesh.ndim != 1 or mesh.size() != whole or not parameter.placements[0].is_shard():
            raise UsageError(
                f"parameter '{name}' has the placements {parameter.placements} on a mesh {tuple(mesh.shape)}: gossip"
                f" needs fully_shard over one dimension with all {whole} processes of the group"
            )
        _place_of(copy, name).register_parameter(
            name.rpartition(".")[2], nn.Parameter(_local(parameter).clone(), parameter.requires_grad)
        )
    for name, buffer in model.named_buffers():
        _place_of(copy, name).register_buffer(name.rpartition(".")[2], buffer.detach().clone())
    return copy


def _place_of(root: nn.Module, name: str) -> nn.Module:
    """Return the submodule in which a name's tensor belongs, made if it is missing."""
    for part in name.split(".")[:-1]:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, in the same memory."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


def _copy(source: nn.Module, target: nn.Module) -> None:
    """Copy all values from one module to the other, which have the same names in the same order."""
    with torch.no_grad():
        for tensors in (zip(source.parameters(), target.parameters(), strict=True), _buffers(source, target)):
            for given, taken in tensors:
                _local(taken).copy_(_local(given))


def _buffers(source: nn.Module, target: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(source.buffers(), target.buffers(), strict=True)


@contextlib.contextmanager
def _join_arguments(run: RunConfig, peers: str | Path | None) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which this process joins: rank 0 joins the run, and each other rank one beside it.

    That has a directory within the run's, with a hosts file of its own.
    """
    rank = dist.get_rank()
    hosts = os.environ.get(ENV_PEERS) if ENV_CONFIG in os.environ else peers or os.environ.get(ENV_PEERS)
    if hosts is None:
        raise UsageError("the processes of this group are one peer: name the other peers with peers='hosts.txt'")
    if rank == 0:
        yield {}
        return
    directory = run_directory_of(run) / f"shards-{rank:02d}"
    directory.mkdir(parents=True, exist_ok=True)
    lines = read_hosts(Path(hosts))
    places = [(Address(line.host, line.port + rank * len(lines)), f" {NAT}" * line.behind_nat) for line in lines]
    own = "".join(f"{place}{nat}\n" for place, nat in places)
    _write_shared(directory / "hosts.txt", own)
    if ENV_CONFIG not in os.environ:
        yield {"peers": directory / "hosts.txt", "logdir": str(directory.parent), "name": directory.name}
        return
    kept = {name: os.environ.get(name) for name in (ENV_CONFIG, ENV_PEERS, ENV_PROGRESS)}
    _write_shared(directory / "config.toml", Path(os.environ[ENV_CONFIG]).read_text(encoding="utf-8"))
    os.environ.update({ENV_CONFIG: str(directory / "config.toml"), ENV_PEERS: str(directory / "hosts.txt")})
    os.environ.pop(ENV_PROGRESS, None)
    try:
        yield {}
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _write_shared(file: Path, text: str) -> None:
    """Write a file that groups of one machine may write at the same time, with the same content."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)
