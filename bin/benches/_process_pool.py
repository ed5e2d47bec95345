"""A pool of processes that run one job after another together, each as the same peer of every run.

Starting a process and importing torch takes longer than most measurements of bin/bench server, so it happens once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from _bench.peers import HERE, reserved
from _bench.processes import Spawned
from emulated import Host
from torch import nn

import gossipx
from gossipx.runtime.training.peer import Peer

SERVERS, WORKERS = 2, 4
"""Roles in all figures of bin/bench server: the first two processes serve one shard each, the others train."""
LONGEST = 300.0
"""Timeout of a job, in seconds."""
Job = dict[str, Any]
Done = dict[str, Any]


class ProcessPool:
    """A pool of processes on loopback, or each on its own host of an emulated network.

    Args:
        size: number of processes.
        hosts: hosts of the network, one per process; None: loopback.
    """

    def __init__(self, size: int = SERVERS + WORKERS, hosts: Sequence[Host] | None = None):
        self._hosts = hosts
        self._jobs = 0
        self._undo = contextlib.ExitStack()
        self._ports = self._undo.enter_context(contextlib.ExitStack())
        self._folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory()))
        self._secret = self._folder / "secret"
        self._secret.touch(mode=0o600)
        self._secret.write_text(os.urandom(32).hex())
        inside = [subprocess.Popen] * size if hosts is None else [host.popen for host in hosts]
        self._processes = [Spawned(run_jobs, inside=each) for each in inside]

    def run(self, work: Callable[[Job], Done], ranks: Sequence[int] | None = None, **job: Any) -> list[Done]:
        """Run a job in the processes at the same time, and return their results.

        Args:
            work: a module-level function that receives the job and returns plain data.
            ranks: the processes, in the order of the run's peers; None: all.
            job: the job's parameters, in addition to ``rank``, ``hosts`` (the hosts file), ``ports`` and ``settings``.

        Raises:
            SystemExit: a process failed and reported the error on standard error.
        """
        ranks = range(len(self._processes)) if ranks is None else ranks
        taking, places = [self._processes[rank] for rank in ranks], self._places(ranks)
        file = self._folder / f"hosts-{self._jobs}.txt"
        file.write_text("".join(f"{host}:{port}\n" for host, port in places))
        named = f"{work.__module__}:{work.__name__}"
        for rank, process in enumerate(taking):
            own: dict[str, Any] = {"logdir": str(self._folder / "runs"), "save_model": False, **job.get("settings", {})}
            if self._hosts is not None:
                own |= {"bind": places[rank][0], "secret_file": str(self._secret)}
            told = {**job, "work": named, "rank": rank, "hosts": str(file), "places": places, "settings": own}
            process.tell(json.dumps(told))
        return self._answers(taking)

    def _places(self, ranks: Sequence[int]) -> list[tuple[str, int]]:
        """Return an address and a port for each process, which no earlier run used."""
        self._jobs += 1
        if self._hosts is not None:
            return [(self._hosts[rank].address, 29400 + self._jobs) for rank in ranks]
        self._ports.close()  # of the job before
        first = self._ports.enter_context(reserved(len(ranks)))
        return [(HERE, first + number) for number in range(len(ranks))]

    def _answers(self, taking: Sequence[Spawned]) -> list[Done]:
        """Collect the results as they arrive, so that one failure ends the job although others still wait for it."""
        done: dict[int, Done] = {}
        while len(done) < len(taking):
            waiting = {one.process.stdout: number for number, one in enumerate(taking) if number not in done}
            there, _, _ = select.select(list(waiting), [], [], LONGEST)
            if not there:
                raise SystemExit("bin/bench server: its processes did not finish in time")
            for number in (waiting[pipe] for pipe in there):
                line = taking[number].line()
                if not line:
                    raise SystemExit("bin/bench server: one of its processes has failed")
                done[number] = json.loads(line)
        return [done[number] for number in range(len(taking))]

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.close(kill=error is not None)
        self._undo.close()


# --- in each process ------------------------------------------------------------------------------------


def join(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Peer | None:
    """Join the job's run. Return None for a server, after the run has ended."""
    with contextlib.suppress(SystemExit):
        return gossipx.join(model, optimizer, peers=job["hosts"], rank=job["rank"], **job["settings"])
    return None


def run_jobs() -> None:
    """Run jobs from standard input, one per line, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # all other output goes to standard error
    for line in sys.stdin:
        job = json.loads(line)
        module, _, name = job["work"].partition(":")
        done = getattr(importlib.import_module(module), name)(job)
        answers.write(json.dumps(done) + "\n")
        answers.flush()
        gc.collect()  # a finished peer is in reference cycles, which keep its tables alive
