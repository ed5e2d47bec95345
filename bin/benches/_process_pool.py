"""Processes that do one piece of work after another together, each as the same peer of every run.

Starting a process and loading torch takes longer than most of what bin/bench server measures; here that is done once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from _remote import HERE, end_with_parent
from emulated import Host
from torch import nn

import gossipx
from gossipx.runtime.peer import Peer

SERVERS, WORKERS = 2, 4
"""Of all figures of bin/bench server: the first two processes hold a shard each, and the others train."""
LONGEST = 300.0
"""Seconds that a piece of work may take."""
Job = dict[str, Any]
Done = dict[str, Any]


class ProcessPool:
    """So many processes, on loopback or each on its host of an emulated network.

    Args:
        size: how many.
        hosts: of the network, one a process; None: loopback.
    """

    def __init__(self, size: int = SERVERS + WORKERS, hosts: Sequence[Host] | None = None):
        self._hosts = hosts
        self._size = size
        self._jobs = 0
        self._undo = contextlib.ExitStack()
        self._folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory()))
        self._secret = self._folder / "secret"
        self._secret.touch(mode=0o600)
        self._secret.write_text(os.urandom(32).hex())
        self._processes = [self._start(rank) for rank in range(size)]

    def _start(self, rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, __file__]
        piped: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        if self._hosts is None:
            return subprocess.Popen(command, **piped)
        inside: subprocess.Popen[str] = self._hosts[rank].popen(command, **piped)
        return inside

    def run(self, work: str, ranks: Sequence[int] | None = None, **job: Any) -> list[Done]:
        """Have the processes do a piece of work at the same time.

        Args:
            work: ``module:function``, which is given the job, and gives what is to be told of it as plain data.
            ranks: the processes, in the order in which they are the peers of the run; None: all.
            job: what the work is told, beside ``rank``, ``hosts`` (the hosts file), ``ports`` and ``settings``.

        Raises:
            SystemExit: one has failed; why, it has told on standard error.
        """
        taking = [self._processes[rank] for rank in (range(self._size) if ranks is None else ranks)]
        places = self._places(ranks or range(self._size))
        file = self._folder / f"hosts-{self._jobs}.txt"
        file.write_text("".join(f"{host}:{port}\n" for host, port in places))
        for rank, process in enumerate(taking):
            own: dict[str, Any] = {"logdir": str(self._folder / "runs"), "save_model": False, **job.get("settings", {})}
            if self._hosts is not None:
                own |= {"bind": places[rank][0], "secret_file": str(self._secret)}
            told = {**job, "work": work, "rank": rank, "hosts": str(file), "places": places, "settings": own}
            assert process.stdin is not None
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.flush()
        return self._answers(taking)

    def _places(self, ranks: Sequence[int]) -> list[tuple[str, int]]:
        """An address and a port for each, which no earlier run had."""
        self._jobs += 1
        if self._hosts is not None:
            return [(self._hosts[rank].address, 29400 + self._jobs) for rank in ranks]
        return [(HERE, port) for port in _free_ports(len(ranks))]

    def _answers(self, taking: Sequence[subprocess.Popen[str]]) -> list[Done]:
        """What each has to tell, as it comes: where one has failed the others may wait for it for long."""
        done: dict[int, Done] = {}
        while len(done) < len(taking):
            waiting = {process.stdout: number for number, process in enumerate(taking) if number not in done}
            there, _, _ = select.select(list(waiting), [], [], LONGEST)
            if not there:
                raise SystemExit("bin/bench server: what its processes do does not come to an end")
            for pipe in there:
                line = pipe.readline()
                if not line:
                    raise SystemExit("bin/bench server: one of its processes has failed")
                done[waiting[pipe]] = json.loads(line)
        return [done[number] for number in range(len(taking))]

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            if error is not None:
                process.kill()
            process.stdin.close()  # its end
        for process in self._processes:
            process.wait(LONGEST)
            assert process.stdout is not None
            process.stdout.close()
        self._undo.close()


def _free_ports(count: int) -> list[int]:
    """Ports that can be listened at, none of them one that the system gives to outgoing connections: after hundreds of
    these, some that nobody listens at are still in use."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HERE, port))
            found += [port] if port not in found else []
    return found


# --- in each process ------------------------------------------------------------------------------------


def join(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Peer | None:
    """Take part in the job's run; None: as a server, and it is over."""
    with contextlib.suppress(SystemExit):
        return gossipx.join(model, optimizer, peers=job["hosts"], rank=job["rank"], **job["settings"])
    return None


def delayed_pulls(peer: Peer) -> int:
    """DPRs of all shards, once the peer has finished: what ``gossipx run`` reads from the same reports."""
    role = peer._role
    reports = [role.report, *(other.report for other in role.members.others.values())]
    return sum(int((report or {}).get("delayed_pulls", 0)) for report in reports)


def main() -> None:
    """Do what standard input asks for, a line a job, until it ends."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    for line in sys.stdin:
        job = json.loads(line)
        module, _, name = job["work"].partition(":")
        done = getattr(importlib.import_module(module), name)(job)
        answers.write(json.dumps(done) + "\n")
        answers.flush()
        gc.collect()  # a peer that is done is in reference cycles, and holds its tables as long as these last


if __name__ == "__main__":
    main()
