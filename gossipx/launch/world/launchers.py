"""The processes of a run, as their launcher describes them in environment variables: one process per peer.

This module only reads a mapping of variables; :mod:`gossipx.launch.world.rendezvous` connects the processes.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gossipx.errors import UsageError
from gossipx.launch.environment import (
    ENV_CONFIG,
    ENV_LOCAL_RANK,
    ENV_LOCAL_SIZE,
    ENV_MASTER,
    ENV_RANK,
    ENV_SIZE,
)
from gossipx.launch.hosts import LOOPBACK, address_of, is_address, is_loopback_name
from gossipx.protocol.places import is_everywhere

DEFAULT_PORT = 29500
"""Default port of rank 0, the same as torchrun's."""
PORTS = range(20_000, 30_000)
"""Ports of which a job uses one, by its number, so that jobs that share a machine use different ones: above commonly
used registered ports, below ephemeral ports."""
MOST = 65_536
"""Maximum number of processes of a run."""
_NO_TASKS_STEP = 0xFFFFFFF0
"""SLURM's step numbers from here on are steps without tasks: the job's script, its shell, external steps."""


@dataclass(frozen=True)
class LaunchWorld:
    """The position of a process among those that were started together.

    Attributes:
        rank: rank of the process, from 0.
        size: number of processes.
        local_rank: rank among the processes of its machine; None: unknown.
        one_host: whether all processes are known to be on this machine.
        master: host on which rank 0 listens; None: unknown.
        port: port on which rank 0 listens.
        hosted: torchrun's agent listens there, so rank 0 need not.
        job: identifies the run among others that use the same store.
        source: launcher or variables that define all this, for messages.
        master_from: what defines the host of rank 0, for messages.
        attempt: how often the launcher has started the job again, so far.
    """

    rank: int
    size: int
    local_rank: int | None
    one_host: bool
    master: str | None
    port: int
    hosted: bool
    job: str
    source: str
    master_from: str
    attempt: int = 0

    @property
    def run(self) -> str:
        """Identifies the run and the attempt: the store may contain keys of the attempt before."""
        return f"{self.job}/{self.attempt}"


def find(environ: Mapping[str, str]) -> LaunchWorld | None:
    """Return the world of the process with these environment variables; None: it was not started as one of several.

    GOSSIPX_SIZE and its like take precedence, then torchrun's variables, then those of Open MPI and Flux, then SLURM's
    for the tasks of a step, then those of MPICH, Intel MPI and PALS. In a SLURM job other launchers start their own
    daemons as tasks: SLURM's variables count those, so the others' apply.

    Raises:
        UsageError: variables contradict each other; names them.
    """
    if environ.get(ENV_CONFIG):
        return None  # a peer of 'gossipx run', or its child process: GOSSIPX_CONFIG and GOSSIPX_RANK define it
    given = {name: value for name, value in environ.items() if value}
    for layer in (_gossipx, _torchrun, _open_mpi, _flux, _slurm, _pmi):
        found = layer(given)
        if found is not None:
            _check_own_rank(given, found)
            return found
    return None


def _check_own_rank(given: Mapping[str, str], found: LaunchWorld) -> None:
    """Check GOSSIPX_RANK, which without GOSSIPX_SIZE is a line of a hosts file, against the launcher's rank."""
    if found.size > 1 and given.get(ENV_RANK, str(found.rank)) != str(found.rank):
        raise UsageError(
            f"{ENV_RANK} is {given[ENV_RANK][:50]!r}, but by {found.source} this process is rank {found.rank}: also"
            f" set {ENV_SIZE}, or unset {ENV_RANK}"
        )


def why_none(environ: Mapping[str, str]) -> str:
    """Return advice for a user who expected a world, as the end of a message; empty: nothing suggests that one was
    expected."""
    if environ.get("SLURM_JOB_ID"):
        return "; in a SLURM job, 'srun' starts one process per peer"
    return ""


def rank_among(environ: Mapping[str, str], size: int, hosts: Path) -> int | None:
    """Return this process's rank in a given list of peers; None: the environment defines none, or only one process.

    Args:
        size: number of peers in the list.
        hosts: file of the list, for messages.

    Raises:
        UsageError: as :func:`find`; or the numbers of processes and peers differ.
    """
    world = find(environ)
    if world is None or world.size == 1:
        return None
    check_world_size(world, size, hosts)
    return world.rank


def check_world_size(world: LaunchWorld, size: int, hosts: Path) -> None:
    """Check that a hosts file of ``size`` peers has one for each process.

    Raises:
        UsageError: it does not.
    """
    if world.size != size:
        raise UsageError(
            f"names {size} peers, but {world.source} started {world.size} processes, one per peer: start as"
            " many, or leave the list out",
            hosts,
        )


# --- launchers ----------------------------------------------------------------------------------------


def _gossipx(given: Mapping[str, str]) -> LaunchWorld | None:
    if ENV_SIZE not in given:
        return None  # GOSSIPX_RANK alone is a line of a hosts file
    rank, size = _rank_of_size(given, ENV_RANK, ENV_SIZE)
    local = _number(given, ENV_LOCAL_SIZE, 1, size)
    return _world(given, rank, size, ENV_LOCAL_RANK, local == size, "gossipx", f"{ENV_RANK} and {ENV_SIZE}")


def _torchrun(given: Mapping[str, str]) -> LaunchWorld | None:
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return None
    rank, size = _rank_of_size(given, "RANK", "WORLD_SIZE")
    local = _number(given, "LOCAL_WORLD_SIZE", 1, size)
    is_torchrun = "TORCHELASTIC_RUN_ID" in given
    job = given.get("TORCHELASTIC_RUN_ID", "torch")
    attempt = _number(given, "TORCHELASTIC_RESTART_COUNT", 0, MOST) or 0
    source = "torchrun" if is_torchrun else "RANK and WORLD_SIZE"
    agent = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _world(given, rank, size, "LOCAL_RANK", local == size, job, source, attempt, agent)


def _slurm(given: Mapping[str, str]) -> LaunchWorld | None:
    if "SLURM_PROCID" not in given or not _is_task(given):
        return None
    # The step's number of tasks takes precedence, since the job's may differ.
    size_from = _first(given, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"))
    if given.get("PMI_SIZE", given.get(size_from)) != given.get(size_from):
        return None  # daemons of mpiexec; the tasks of srun --mpi=pmi2 have the same size twice
    rank, size = _rank_of_size(given, "SLURM_PROCID", size_from)
    nodes = given.get(_first(given, ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")))
    job = f"{given.get('SLURM_JOB_ID', '0')}.{_step(given) or '0'}"
    attempt = _number(given, "SLURM_RESTART_COUNT", 0, MOST) or 0
    return _world(given, rank, size, "SLURM_LOCALID", nodes == "1", job, "srun", attempt)


def _is_task(given: Mapping[str, str]) -> bool:
    """Return whether the process is a task of a step, and not the job's script or a shell, which also have SLURM_PROCID
    0."""
    step = _step(given)
    if step is None:
        return "SLURM_JOB_ID" not in given
    return not (step.isdigit() and int(step) >= _NO_TASKS_STEP)


def _step(given: Mapping[str, str]) -> str | None:
    """Return the step's number from its current variable, or from that of SLURM before 14.11."""
    return given.get("SLURM_STEP_ID", given.get("SLURM_STEPID"))


@dataclass(frozen=True)
class _Launcher:
    """The variables of a launcher that does not define the host of rank 0; of several names the first that is set.

    Attributes:
        source: its command, for messages.
        rank, size, local_rank: as in :class:`LaunchWorld`.
        hosts: number of machines.
        local_size: number of processes on this machine.
        run: identifies the job.
    """

    source: str
    rank: tuple[str, ...]
    size: str
    local_rank: tuple[str, ...]
    hosts: str = ""
    local_size: tuple[str, ...] = ()
    run: tuple[str, ...] = ()

    def __call__(self, given: Mapping[str, str]) -> LaunchWorld | None:
        rank_from = _first(given, self.rank)
        if rank_from not in given and self.size not in given:
            return None
        rank, size = _rank_of_size(given, rank_from, self.size)
        local = _number(given, _first(given, self.local_size), 1, size) if self.local_size else None
        one_host = local == size or given.get(self.hosts) == "1"
        run = given.get(_first(given, self.run), "mpi")
        return _world(given, rank, size, _first(given, self.local_rank), one_host, run, self.source)


def _first(given: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((name for name in names if name in given), names[0])


_open_mpi = _Launcher(
    "mpirun",
    ("OMPI_COMM_WORLD_RANK",),
    "OMPI_COMM_WORLD_SIZE",
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    run=("PMIX_NAMESPACE",),
)
_flux = _Launcher(
    "flux run",
    ("FLUX_TASK_RANK",),
    "FLUX_JOB_SIZE",
    ("FLUX_TASK_LOCAL_ID",),
    hosts="FLUX_JOB_NNODES",
    run=("FLUX_JOB_ID",),
)
# MPICH, Intel MPI, and PALS of Cray systems, which sets PMI_RANK and PMI_SIZE beside its own variables.
_pmi = _Launcher(
    "mpiexec",
    ("PMI_RANK", "PALS_RANKID"),
    "PMI_SIZE",
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
    local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
    run=("I_MPI_HYDRA_UUID", "PALS_APID", "PMI_JOBID"),
)


def _world(
    given: Mapping[str, str],
    rank: int,
    size: int,
    local_rank: str,
    one_host: bool,
    job: str,
    source: str,
    attempt: int = 0,
    agent: bool = False,
) -> LaunchWorld:
    """Return the world, with the host and port of rank 0, by the rules that all launchers share."""
    one_host = one_host or size == 1
    has_nodes = source in ("srun", "mpirun", "flux run", "mpiexec")
    port = PORTS[zlib.crc32(f"{job}/{attempt}".encode()) % len(PORTS)] if has_nodes else DEFAULT_PORT
    their_port = _number(given, "MASTER_PORT", 1, 65_535)
    master, master_from = None, ENV_MASTER
    if ENV_MASTER in given:
        master, own_port = address_of(given[ENV_MASTER], ENV_MASTER, 0)
        port = own_port or (None if agent else their_port) or port  # MASTER_PORT is the agent's own
        agent = False
    else:
        port = their_port or port
        if one_host and not agent:
            master, master_from = LOOPBACK, "all processes are on this machine"
        elif "MASTER_ADDR" in given:
            master, master_from = _host(given["MASTER_ADDR"]), "MASTER_ADDR"
        elif has_nodes:
            master, master_from = _first_node(given)
    if master is not None and is_everywhere(master) and not one_host:
        raise UsageError(f"{master_from} is {master}, by which each machine means itself: give the host of rank 0")
    one_host = one_host or (master is not None and is_loopback_name(master))
    local = _number(given, local_rank, 0, size - 1)
    return LaunchWorld(rank, size, local, one_host, master, port, agent, job, source, master_from, attempt)


def _rank_of_size(given: Mapping[str, str], rank_from: str, size_from: str) -> tuple[int, int]:
    for present, missing in ((rank_from, size_from), (size_from, rank_from)):
        if missing not in given:
            raise UsageError(f"{present} is set but {missing} is not: set both, or neither")
    size = _number(given, size_from, 1, MOST)
    assert size is not None
    rank = _number(given, rank_from, 0, MOST - 1)
    assert rank is not None
    if rank >= size:
        raise UsageError(f"{rank_from} is {rank}, but with {size_from} {size} ranks are 0 to {size - 1}")
    return rank, size


def _number(given: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not least <= int(text) <= most:
        raise UsageError(f"{name} is {text[:50]!r}, not an integer from {least} to {most}")
    return int(text)


def _host(text: str) -> str:
    """Return the host in MASTER_ADDR, which has no port, so an IPv6 address needs no brackets."""
    host = text.strip("[]")
    if not is_address(host) and not re.fullmatch(r"[^\s:/\[\]]+", host):
        raise UsageError(f"MASTER_ADDR is {text[:50]!r}, not a host name or address; the port is MASTER_PORT")
    return host


# --- SLURM's lists of nodes ---------------------------------------------------------------------------


def _first_node(given: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the first node of a job and the variable that names it; None and GOSSIPX_MASTER if none does."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if name in given:
            try:
                return next(hostnames(given[name])), name
            except UsageError as error:
                raise UsageError(f"{name}: {error}; or set {ENV_MASTER}=host[:port]") from None
    return None, ENV_MASTER


def hostnames(nodelist: str) -> Iterator[str]:
    """Yield the hosts of a list in SLURM's notation, in order: ``node[01-03,7],gpu[1-2]x`` starts with ``node01``.

    Numbers are padded like the start of their range. A name may have several brackets; the last one varies fastest.

    Raises:
        UsageError: it is not such a list.
    """
    wrong = UsageError(f"{nodelist[:50]!r} is not a list of hosts such as node[01-03,7],login")
    if not re.fullmatch(r"(?:[^\s,\[\]]|\[[^\s\[\]]+\])+(?:,(?:[^\s,\[\]]|\[[^\s\[\]]+\])+)*", nodelist):
        raise wrong
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist):
        parts = re.findall(r"\[[^\]]*\]|[^\[\]]+", entry)
        choices = [_numbers(part[1:-1], wrong) if part.startswith("[") else [part] for part in parts]
        yield from map("".join, itertools.product(*choices))


def _numbers(brackets: str, wrong: UsageError) -> list[str]:
    found: list[str] = []
    for span in brackets.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", span, re.ASCII)
        if match is None:
            raise wrong
        first, last = int(match[1]), int(match[2] or match[1])
        if not 0 <= last - first < MOST:
            raise wrong
        found += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return found
