"""``gossipx.join``: the call that makes a training script a peer."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from gossipx import policies
from gossipx.assembly.managers import Managers
from gossipx.assembly.peer import build_peer
from gossipx.assembly.presets import check_without_run
from gossipx.assembly.server import Parts
from gossipx.checkpoint import Store
from gossipx.comm import CommManager
from gossipx.errors import UsageError
from gossipx.launch.environment import (
    ADDED,
    ENV_ADMISSION,
    ENV_CONFIG,
    ENV_DESCRIBE,
    ENV_PEERS,
    ENV_RANK,
    ENV_RESUME,
    ENV_RESUME_AT,
    start_reporting,
)
from gossipx.launch.hosts import PeerLine, bind_host, local_ranks, peers_digest, read_hosts
from gossipx.launch.world.attempts import joins_again
from gossipx.launch.world.launchers import LaunchWorld, find, rank_among, why_none
from gossipx.launch.world.process_list import agree, check_reach, lines_of
from gossipx.launch.world.rendezvous import Rendezvous
from gossipx.metrics.recorder import Recorder
from gossipx.model.arena import ParameterArena
from gossipx.peer.joining.admission import Admission
from gossipx.policies import Observation, Policy
from gossipx.runtime.checkpoints import store_of
from gossipx.runtime.ending import exit_hooks
from gossipx.runtime.figures.progress import Progress
from gossipx.runtime.figures.scores import Evaluate
from gossipx.runtime.optimizers import OneOrMore, Optimizers
from gossipx.runtime.place import Place
from gossipx.runtime.training import schedule_free
from gossipx.runtime.training.peer import Peer
from gossipx.settings import files
from gossipx.settings.modes import Server
from gossipx.settings.sections import RunConfig
from gossipx.sync import SyncManager
from gossipx.transports import Address

log = logging.getLogger("gossipx")


def join(
    model: nn.Module,
    optimizer: OneOrMore | None = None,
    *,
    peers: str | Path | None = None,
    policy: str | Policy | Callable[[Observation], bool] | None = None,
    rank: int | None = None,
    evaluate: Evaluate | None = None,
    config_file: str | Path | None = None,
    parts: Parts | None = None,
    sync_manager: type[SyncManager] | SyncManager | None = None,
    comm_manager: Callable[..., CommManager] | None = None,
    recorder: str | Recorder | None = None,
    **settings: Any,
) -> Peer:
    """Make this process a peer: from now on, each step of ``optimizer`` is an iteration of the run.

    The model's parameters move into one flat buffer (the Parameter objects stay the same) and take the run's initial
    values. Returns when the other peers are connected or ``peer_timeout`` has passed. A peer that only serves the
    others (``hub_only``, ``servers_only``) serves here until their training is over, and exits.

    Under ``gossipx run`` rank, peers and all settings are the run's. Of the arguments, objects and functions are used.

    Args:
        model: any module whose parameters are dense, on one device.
        optimizer: one, or several, ``[adamw, muon]``: an iteration then ends when each has stepped at least once;
            None: the loop calls :meth:`Peer.step` after each update.
        peers: the hosts file. None under torchrun, srun or mpirun, whose processes exchange their addresses.
        policy: a spec such as ``adaptive:threshold=0.02``, a policy, or a function of an observation.
        rank: line of the hosts file of this process, from 0; required if several lines are this machine and the
            environment does not define the rank.
        evaluate: returns a model's accuracy from 0 to 1, or ``accuracy``, ``loss`` and other test figures by name.
        config_file: TOML file with settings.
        parts: replacements for parts of the parameter server.
        sync_manager: a subclass of :class:`SyncManager`, or an object with its methods, which has its own policy.
        comm_manager: a subclass of :class:`CommManager`, or a function that returns an object with its methods.
        recorder: a spec such as ``tensorboard+csv``, or an object with the methods of a recorder.
        settings: any other setting of ``gossipx run`` by its name: ``seed=1``, ``peer_timeout=10``.

    Raises:
        UsageError: settings are invalid or have no effect, an optimizer trains none of the model's parameters, a
            parameter cannot be joined (names it), or the peers' models differ (names the first tensor that does).
        GossipxError: no peer sent an initial model, the port is in use, or the processes did not find each other.
    """
    channel = start_reporting()
    optimizers = Optimizers(model, optimizer)
    under_run = ENV_CONFIG in os.environ
    # Before the peer is built, which changes a model that may belong to another peer.
    exit_hooks.check_unregistered(under_run)
    own = None if policy is None or isinstance(policy, str) else policies.parse(policy)
    run = settings_of(config_file, settings | _named(policy=policy, recorder=recorder))
    _check_deciders(run, under_run, own, sync_manager)
    averages = schedule_free.of(model, optimizers, isinstance(run.mode, Server))
    _describe_if_asked(model, run)
    managers = Managers(sync_manager, comm_manager, None if isinstance(recorder, str) else recorder)
    with contextlib.ExitStack() as until_started:
        place = _place(run, peers, rank, channel, under_run, until_started)
        peer = build_peer(model, optimizers, run, place, own, evaluate, parts, managers, averages)
        peer.start()
    return peer if peer.trains else _serve(peer)


def _serve(peer: Peer) -> NoReturn:
    """Serve until the training of the others is over, and end the script."""
    peer.finish()
    raise SystemExit(0)


def _describe_if_asked(model: nn.Module, run: RunConfig) -> None:
    """Write the tensors of the model where a parent process asks for them, and end the script."""
    if file := os.environ.get(ENV_DESCRIBE):
        tensors = "\n".join(ParameterArena(model, mix_buffers=run.sync.buffers == "mix").manifest)
        Path(file).write_text(tensors, encoding="utf-8")
        raise SystemExit(0)


def _named(**given: object) -> dict[str, Any]:
    """Return those arguments that are specs, and so settings."""
    return {name: value for name, value in given.items() if isinstance(value, str)}


def _check_deciders(run: RunConfig, under_run: bool, policy: Policy | None, sync_manager: object) -> None:
    """Refuse a policy or a SyncManager without effect; a script under ``gossipx run --servers`` is only told so."""
    for name, value in (("policy", policy), ("sync_manager", sync_manager)):
        if value is None or not isinstance(run.mode, Server):
            continue
        if not under_run:
            raise UsageError(f"a parameter server uses sync= instead of {name}=: leave {name}= out")
        log.warning("%s= has no effect, since a parameter server uses --sync instead", name)
    is_given = policy is not None or (run.is_given("policy") and not policies.is_object(run.decides))
    if sync_manager is not None and not isinstance(sync_manager, type) and is_given:
        given = "policy=" if policy is not None else f"--policy {run.decides}"
        raise UsageError(
            f"{given} has no effect, since sync_manager= is an object with a policy of its own: leave one out"
        )


def settings_of(config_file: str | Path | None, settings: Mapping[str, Any]) -> RunConfig:
    """Return the settings of this process: under ``gossipx run`` the run's, else the given ones.

    Raises:
        UsageError: a given setting is unknown or invalid, even if the run's apply, or has no effect.
    """
    given = files.load(Path(config_file)) if config_file else {}
    if ENV_CONFIG in os.environ:
        files.merged(given, settings)  # they may suit the run's settings, but not each other
        own = files.resolve(files.load(Path(os.environ[ENV_CONFIG])))
    else:
        own = files.resolve(given, settings)
        check_without_run(own)
    return files.absolute(own)  # the script may change its directory


def run_directory_of(run: RunConfig) -> Path:
    """Return the directory of this process's run, in which each peer has one of its own."""
    if ENV_CONFIG in os.environ:
        return Path(os.environ[ENV_CONFIG]).parent.absolute()
    return Path(run.run.logdir) / (run.run.name or "joined")


def rank_and_size(run: RunConfig, peers: str | Path | None = None, rank: int | None = None) -> tuple[int, int]:
    """Return the rank of the peer to which this process belongs, and the number of peers, without joining.

    With a hosts file it is the peer of this machine: processes that torchrun starts here may together be one peer.

    Raises:
        UsageError: the rank is out of range or unknown, or the peers are unknown.
    """
    if (members := _listed(run, peers, rank, {})) is not None:
        return members.rank, len(members.lines)
    world = _world()
    return world.rank if rank is None else rank, world.size


def _place(
    run: RunConfig,
    peers: str | Path | None,
    rank: int | None,
    channel: Progress,
    under_run: bool,
    until_started: contextlib.ExitStack,
) -> Place:
    """Return rank and addresses of this process's peer, from a hosts file or else from torchrun and its like.

    Args:
        until_started: receives resources that must last until the peer listens.
    """
    members = _listed(run, peers, rank, os.environ) or _met(run, rank, until_started)
    lines, rank, admission = members.lines, members.rank, members.admission
    directory, resumes = run_directory_of(run), os.environ.get(ENV_RESUME)
    if resumes and not under_run:
        _check_checkpoint(store_of(directory, rank))
    resumes = resumes or members.again
    return Place(
        rank=rank,
        names=tuple(line.name for line in lines),
        addresses=tuple(Address(line.host, line.port, line.behind_nat) for line in lines),
        bind=Address(bind_host(lines[rank], run.exchange.bind, members.file), lines[rank].port),
        digest=peers_digest(lines if admission is None else lines[: len(admission.begun)]),
        directory=directory,
        progress=channel,
        under_run=under_run,
        resumes=bool(resumes),
        is_added=resumes == ADDED or (admission is not None and not resumes),
        resumes_at=int(at) if (at := os.environ.get(ENV_RESUME_AT)) else None,
        admission=admission,
        job=members.job,
    )


def _check_checkpoint(store: Store) -> None:
    """Check that there is a checkpoint: a run that begins at 0 is not what GOSSIPX_RESUME asks for."""
    if store.find() is None:
        reason = f"{ENV_RESUME} is set, but no complete checkpoint is here"
        why = store.fault() or "unset it to begin anew, or with the model of a peer that trains"
        raise UsageError(f"{reason}: {why}", store.directory)


@dataclass(frozen=True)
class _Members:
    """The peers of the run, of which this process is one.

    Attributes:
        lines: all peers, by rank.
        rank: of this process.
        file: the hosts file that lists them; None: no file does.
        admission: that with which ``gossipx peer join`` has started this process; None: it has not.
        job: mark of the job whose processes met; empty: they did not, or it has none.
        again: how this attempt of the job resumes, as in GOSSIPX_RESUME.
    """

    lines: list[PeerLine]
    rank: int
    file: Path | None = None
    admission: Admission | None = None
    job: str = ""
    again: str = ""


def _listed(run: RunConfig, peers: str | Path | None, rank: int | None, started: Mapping[str, str]) -> _Members | None:
    """Return the members of a run that an admission or a hosts file lists; None: they have to meet.

    Args:
        started: environment with a launcher's rank.
    """
    under_run = ENV_CONFIG in os.environ
    if under_run and (file := os.environ.get(ENV_ADMISSION)):
        admission = Admission.decoded(Path(file).read_bytes())
        named = enumerate(admission.peers())
        lines = [PeerLine(one, host, port, None, name, 0) for one, (name, host, port) in named]
        return _Members(lines, admission.rank, admission=admission)
    hosts = os.environ.get(ENV_PEERS) if under_run else peers or os.environ.get(ENV_PEERS)
    if hosts is None:
        return None
    lines = read_hosts(Path(hosts))
    if under_run:
        rank = int(os.environ[ENV_RANK])
        _check_rank(rank, len(lines), None)
    else:
        rank = _rank_here(run, Path(hosts), lines, rank, started)
    return _Members(lines, rank, Path(hosts))


def _met(run: RunConfig, rank: int | None, until_started: contextlib.ExitStack) -> _Members:
    """Return the members of a run whose processes were started together: they exchange their addresses."""
    world = _world()
    if rank is not None:
        _check_rank(rank, world.size, None)
        world = replace(world, rank=rank)
    with Rendezvous(world, run.exchange.rendezvous_timeout) as meeting:
        check_reach(world, run.exchange)
        text, reserved = agree(meeting, run.exchange)
        until_started.callback(reserved.close)
        again = joins_again(meeting, run_directory_of(run), world.rank)
    return _Members(lines_of(text), world.rank, job=meeting.mark, again=again)


def _world() -> LaunchWorld:
    world = find(os.environ)
    if world is None:
        raise UsageError(
            "the peers are unknown: start the script by 'gossipx run --peers hosts.txt SCRIPT', torchrun, srun or"
            f" mpirun, or give peers='hosts.txt'{why_none(os.environ)}"
        )
    return world


def _rank_here(run: RunConfig, hosts: Path, lines: list[PeerLine], rank: int | None, started: Mapping[str, str]) -> int:
    """Return the first of: the given rank, GOSSIPX_RANK, the launcher's rank in ``started``, the only line of this
    machine."""
    here = local_ranks(lines, run.exchange.advertise, hosts)
    if rank is None and (value := os.environ.get(ENV_RANK)):
        if not value.isdecimal():
            raise UsageError(f"{ENV_RANK} is {value[:50]!r}, not a line of the hosts file, from 0")
        rank = int(value)
    if rank is None:
        rank = rank_among(started, len(lines), hosts)
    if rank is None and len(here) > 1:
        ranks = ", ".join(f"{one} ({lines[one].name})" for one in here)
        raise UsageError(f"several lines are this machine, ranks {ranks}: give rank= or set {ENV_RANK}", hosts)
    rank = here[0] if rank is None else rank
    _check_rank(rank, len(lines), hosts)
    return rank


def _check_rank(rank: int, size: int, hosts: Path | None) -> None:
    if not 0 <= rank < size:
        where = "" if hosts is None else " in the hosts file"
        raise UsageError(f"rank {rank} is out of range for the {size} peers{where} (0 to {size - 1})", hosts)
