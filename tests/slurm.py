"""A SLURM cluster of this machine alone, for tests: in its own folder, on its own ports, and stopped by process id."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ports import free_ports

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
WITHIN = 60.0
"""Seconds that it may take to start, and to stop."""


@functools.cache
def lacking() -> str | None:
    """Return what SLURM needs and this system lacks, in a sentence; None: nothing."""
    needs = "a SLURM of one machine needs root on Linux, with Debian's slurmctld, slurmd, slurm-client and munge"
    if sys.platform != "linux":
        return f"{needs}: this is {sys.platform}"
    missing = [tool for tool in TOOLS if _tool(tool) is None]
    if missing:
        return f"{needs}: {', '.join(missing)} not found"
    return f"{needs}: this is user {os.geteuid()}" if os.geteuid() else None


@dataclass(frozen=True)
class Shell:
    """Runs commands in an environment, such as one in which those of a cluster reach it."""

    environment: Mapping[str, str]

    def run(self, command: Sequence[str | Path], cwd: Path, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; kill it if it takes too long."""
        return subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )


def environment_with(bin_directory: Path) -> dict[str, str]:
    """Return environment variables without those of a launcher, and with the commands of a directory."""
    launchers = ("GOSSIPX_", "SLURM_", "SBATCH_", "OMPI_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return {**kept, "PATH": f"{bin_directory}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def one_machine(folder: Path, bin_directory: Path) -> Iterator[Shell]:
    """Start a cluster whose jobs have ``bin_directory`` first in their PATH.

    Raises:
        RuntimeError: it does not start; has the output of its daemons.
    """
    with contextlib.ExitStack() as undo:
        # Paths of sockets must be short, but a test's folder may have a long name.
        socket_folder = Path(undo.enter_context(_short_folder()))
        munge = socket_folder / "munge"
        _start(undo, folder, "munged", _munged(folder, munge))
        _until(lambda: munge.exists(), folder)
        conf = folder / "slurm.conf"
        conf.write_text(_configuration(folder, munge))
        for name in ("state", "spool"):
            (folder / name).mkdir()
        for daemon in ("slurmctld", "slurmd"):
            _start(undo, folder, daemon, [_tool(daemon) or daemon, "-D", "-f", str(conf)])
        slurm = Shell({**environment_with(bin_directory), "SLURM_CONF": str(conf)})
        _until(lambda: slurm.run(["sinfo", "-h", "-o", "%T"], folder, 30).stdout.strip() == "idle", folder)
        yield slurm


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _munged(folder: Path, place: Path) -> list[str]:
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(64))
    files = {"key": key, "socket": place, "pid": folder / "munged.pid", "log": folder / "munge.log"}
    files["seed"] = folder / "munge.seed"
    options = [f"--{name}-file={file}" if name != "socket" else f"--socket={file}" for name, file in files.items()]
    # Other users may be able to write to a test's folder.
    return [_tool("munged") or "munged", "--foreground", "--force", "--num-threads=2", *options]


def _configuration(folder: Path, munge: Path) -> str:
    host = socket.gethostname().partition(".")[0]
    ports = free_ports(2)
    return "\n".join(
        [
            "ClusterName=gossipx",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            f"SlurmdPort={ports[1]}",
            f"FirstJobId={ports[0]}",  # a run's port follows from the job number, which must be unique
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={munge},cred_expire=20",  # a job that is requeued waits so long, by default two minutes
            f"StateSaveLocation={folder / 'state'}",
            f"SlurmdSpoolDir={folder / 'spool'}",
            *(f"{name.capitalize()}PidFile={folder / name}.pid" for name in ("slurmctld", "slurmd")),
            # No control groups: containers have none.
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "SelectType=select/linear",
            "KillOnBadExit=1",  # the strictest setting of a cluster
            "ReturnToService=2",
            f"NodeName={host} NodeAddr=127.0.0.1 CPUs={max(2, os.cpu_count() or 1)} State=UNKNOWN",
            "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
            "",
        ]
    )


def _start(undo: contextlib.ExitStack, folder: Path, name: str, command: Sequence[str]) -> None:
    with (folder / f"{name}.out").open("w") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    undo.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _short_folder() -> Iterator[str]:
    folder = Path("/tmp") / f"gossipx-{os.getpid()}-{secrets.token_hex(3)}"
    folder.mkdir(mode=0o755)
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _until(there: Callable[[], bool], folder: Path) -> None:
    by = time.monotonic() + WITHIN
    while not there():
        if time.monotonic() > by:
            said = "\n".join(file.read_text()[-2000:] for file in folder.glob("*.out"))
            raise RuntimeError(f"SLURM did not come up:\n{said}")
        time.sleep(0.05)
