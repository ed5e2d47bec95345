"""``gossipx.join``: one line that makes a training script a peer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossipx import policies
from gossipx.assembly.peer import Place, build_peer
from gossipx.assembly.server import Parts
from gossipx.config import files
from gossipx.config.settings import RunConfig
from gossipx.errors import UsageError
from gossipx.launch.cluster.membership import agree, check_reach, lines_of
from gossipx.launch.cluster.rendezvous import Rendezvous
from gossipx.launch.cluster.world import World, find, rank_among, why_none
from gossipx.launch.environment import (
    ENV_CONFIG,
    ENV_DESCRIBE,
    ENV_PEERS,
    ENV_RANK,
    ENV_RESUME,
    ENV_RESUME_AT,
    progress,
)
from gossipx.launch.hosts import PeerLine, bind_host, local_ranks, peers_digest, read_hosts
from gossipx.model.arena import ParameterArena
from gossipx.policies import Observation, Policy
from gossipx.runtime import exit_hooks
from gossipx.runtime.peer import Peer
from gossipx.runtime.progress import Progress
from gossipx.transports import Address


def join(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    peers: str | Path | None = None,
    policy: str | Policy | Callable[[Observation], bool] | None = None,
    rank: int | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    config_file: str | Path | None = None,
    parts: Parts | None = None,
    **settings: Any,
) -> Peer:
    """Make this process a peer: from here on, each step of ``optimizer`` is an iteration of the run.

    The model's parameters become views of one flat buffer (the Parameter objects stay the same), and take the values of
    the peer that began. Returns once the other peers are there too, or ``peer_timeout`` has passed; a peer that only
    serves the others (``hub_only``) does that here until their training is over, and exits.

    Under ``gossipx run`` nothing but the model and the optimizer is needed: rank, peers and all settings are the run's,
    whatever is given here. A policy that is an object or a function, which no command line can name, is taken.

    Args:
        model: any module whose parameters are dense, on one device.
        optimizer: None for a loop without one; it then calls :meth:`Peer.step` after each update.
        peers: the hosts file. None under torchrun, srun or mpirun: each process they start is one peer, and the
            processes tell each other where they are.
        policy: a spec such as ``adaptive:threshold=0.02``, a policy, or a function of an observation.
        rank: which line of the hosts file this process is, from 0; needed where several lines are this machine,
            and nothing in the environment says it.
        evaluate: gives a model's accuracy from 0 to 1, for the figures before and after the finish.
        config_file: a TOML file of settings.
        parts: of a parameter server, those that are your own.
        settings: any other setting of ``gossipx run`` by its name, ``seed=1``, ``peer_timeout=10``.

    Raises:
        UsageError: settings that do not fit, an optimizer that trains none of the model's parameters, a parameter that
            cannot be joined (by its name), or peers whose models differ (the first tensor that does).
        GossipxError: no peer gave a model to begin with, the port is in use, or the processes did not meet.
    """
    told = progress()
    _check(model, optimizer)
    under_run = ENV_CONFIG in os.environ
    exit_hooks.check_unregistered(under_run)  # before this model is laid out, which may be that of the first
    own = None if policy is None or isinstance(policy, str) else policies.parse(policy)
    if isinstance(policy, str):
        settings["policy"] = policy
    run = settings_of(config_file, settings)
    if own is not None and not under_run and (run.server.servers is not None or run.sync.mode == "server"):
        raise UsageError("policy= is of peers that exchange with each other, and servers go by sync=: leave it out")
    if os.environ.get(ENV_DESCRIBE):
        told.tell(manifest="\n".join(ParameterArena(model, mix_buffers=run.sync.buffers == "mix").manifest))
        raise SystemExit(0)
    with contextlib.ExitStack() as until_started:
        place = _place(run, peers, rank, told, under_run, until_started)
        peer = build_peer(model, optimizer, run, place, own, evaluate, parts)
        peer.start()
    if not peer.trains:
        peer.finish()
        raise SystemExit(0)
    return peer


def settings_of(config_file: str | Path | None, settings: Mapping[str, Any]) -> RunConfig:
    """The settings that hold here: under ``gossipx run`` the run's, else what is given.

    Raises:
        UsageError: a setting that is misspelt or wrong, also where the run's hold.
    """
    given = files.load(Path(config_file)) if config_file else {}
    own = files.resolve(given, settings)
    return files.resolve(files.load(Path(os.environ[ENV_CONFIG]))) if ENV_CONFIG in os.environ else own


def rank_and_size(run: RunConfig, peers: str | Path | None = None, rank: int | None = None) -> tuple[int, int]:
    """The rank of the peer that this process is or belongs to, and the number of peers, without joining.

    With a hosts file it is this machine's: processes that torchrun starts here may be one peer together.

    Raises:
        UsageError: a rank that is none of the peers' or cannot be told, or nothing says who they are.
    """
    hosts = os.environ.get(ENV_PEERS) if ENV_CONFIG in os.environ else peers or os.environ.get(ENV_PEERS)
    if hosts is None:
        world = _world()
        return world.rank if rank is None else rank, world.size
    file = Path(hosts)
    lines = read_hosts(file)
    if ENV_CONFIG in os.environ:
        return _by_run(len(lines)), len(lines)
    return _by_hosts(run, file, lines, rank, {}), len(lines)


def _check(model: object, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"join takes the model first, then the optimizer: {type(model).__name__} is no torch module")
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{type(optimizer).__name__} is no torch optimizer: leave it out, and call peer.step()")
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError("the optimizer trains none of the model's parameters: join the model that it was made for")


def _place(
    run: RunConfig,
    peers: str | Path | None,
    rank: int | None,
    told: Progress,
    under_run: bool,
    until_started: contextlib.ExitStack,
) -> Place:
    """Where this process stands: by a hosts file, or else by what torchrun and its like tell.

    Args:
        until_started: what is to last until the peer listens.
    """
    hosts = os.environ.get(ENV_PEERS) if under_run else peers or os.environ.get(ENV_PEERS)
    if hosts is None:
        lines, rank = _by_world(run, rank, until_started)
        file = None
    else:
        file = Path(hosts)
        lines = read_hosts(file)
        rank = _by_run(len(lines)) if under_run else _by_hosts(run, file, lines, rank, os.environ)
    directory = Path(run.run.logdir) / (run.run.name or "joined")
    return Place(
        rank=rank,
        names=tuple(line.name for line in lines),
        addresses=tuple(Address(line.host, line.port) for line in lines),
        bind=Address(bind_host(lines[rank], run.exchange.bind, file), lines[rank].port),
        digest=peers_digest(lines),
        directory=Path(os.environ[ENV_CONFIG]).parent if under_run else directory,
        progress=told,
        under_run=under_run,
        resumes=bool(os.environ.get(ENV_RESUME)),
        resumes_at=int(at) if (at := os.environ.get(ENV_RESUME_AT)) else None,
    )


def _by_world(run: RunConfig, rank: int | None, until_started: contextlib.ExitStack) -> tuple[list[PeerLine], int]:
    """All processes that were started together meet, and tell each other where they are."""
    world = _world()
    if rank is not None:
        _check_rank(rank, world.size, None)
        world = replace(world, rank=rank)
    with Rendezvous(world, run.exchange.rendezvous_timeout) as meeting:
        check_reach(world, run.exchange)
        text, held = agree(meeting, run.exchange)
        until_started.callback(held.close)
    return lines_of(text), world.rank


def _world() -> World:
    world = find(os.environ)
    if world is None:
        raise UsageError(
            "join needs to know the other peers: start the script by 'gossipx run --peers hosts.txt SCRIPT', by"
            f" torchrun, srun or mpirun, or give peers='hosts.txt'{why_none(os.environ)}"
        )
    return world


def _by_run(size: int) -> int:
    """The rank that ``gossipx run`` has given this process."""
    rank = int(os.environ[ENV_RANK])
    _check_rank(rank, size, None)
    return rank


def _by_hosts(run: RunConfig, hosts: Path, lines: list[PeerLine], rank: int | None, started: Mapping[str, str]) -> int:
    """The rank that is given, or that GOSSIPX_RANK says, or who has ``started`` the process; or the only one here."""
    here = local_ranks(lines, run.exchange.advertise, hosts)
    if rank is None and (told := os.environ.get(ENV_RANK)):
        if not told.isdecimal():
            raise UsageError(f"{ENV_RANK} is {told[:50]!r}, and not a line of the hosts file, from 0")
        rank = int(told)
    if rank is None:
        rank = rank_among(started, len(lines), hosts)
    if rank is None:
        rank = _only_one(here, lines, hosts)
    _check_rank(rank, len(lines), hosts)
    return rank


def _check_rank(rank: int, size: int, hosts: Path | None) -> None:
    if not 0 <= rank < size:
        where = "" if hosts is None else " in the hosts file"
        raise UsageError(f"rank {rank} is none of the {size} peers{where} (0 to {size - 1})", hosts)


def _only_one(here: list[int], lines: list[PeerLine], hosts: Path) -> int:
    if len(here) == 1:
        return here[0]
    ranks = ", ".join(f"{rank} ({lines[rank].name})" for rank in here)
    raise UsageError(f"several lines are this machine, ranks {ranks}: give rank= or set {ENV_RANK}", hosts)
