"""Runs of bin/bench evidence: one process per peer, each in a network namespace behind a shaped link."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from _bench.cached_runs import Job
from _bench.processes import command_of
from _evidence_systems import SYSTEMS, System
from _evidence_task import Assignment, curve
from emulated import EmulatedNetwork
from emulated.runs import train

SCRIPT = Path(__file__).with_name("_evidence_programs.py")
LONGEST = 4 * 3600.0
"""Maximum seconds of a run: DDP with 800 steps of 1.4 MB over 10 Mbit/s takes about half an hour."""


def job(workload: str, system: str, rate: str, peers: int, seed: int, steps: int, period: int | None) -> Job:
    """Return the job of one run."""
    of = SYSTEMS[system]
    options = of.arguments(workload, period, peers) if of.is_gossipx else of.options
    return {
        "task": workload,
        "system": system,
        "options": options,
        "rate": rate,
        "peers": peers,
        "seed": seed,
        "steps": steps,
        "period": period if of.periodic else None,
    }


def run(one: Job) -> list[dict[str, Any]]:
    """Run a job, and return its points; see :func:`_evidence_task.curve`."""
    system = SYSTEMS[one["system"]]
    with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(one["peers"], one["rate"]) as net:
        folder = Path(scratch)
        options = {"period": one["period"], **(system.options if isinstance(system.options, dict) else {})}
        addresses = [host.address for host in net.hosts]
        made = Assignment(folder, one["task"], one["seed"], one["steps"], one["peers"], options, addresses)
        made.write()
        if system.is_gossipx:
            own = system.arguments(one["task"], one["period"], one["peers"])
            train(net, folder, "run", "--seed", str(one["seed"]), *own, SCRIPT, folder, longest=LONGEST)
        else:
            _train(net, folder, system)
        return curve(made)


def _train(net: EmulatedNetwork, folder: Path, system: System) -> None:
    """Run a system's program on every host, until all have ended or one has failed.

    Raises:
        RuntimeError: a program has failed; has its output.
    """
    started = []
    for rank, host in enumerate(net.hosts):
        output = folder / f"output-{rank}.txt"
        command = command_of(system.program, str(folder), rank)
        # Without it, gloo would listen on the address of the host's name, which is not in the namespace.
        inside = ["env", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1", *command]
        with output.open("w") as written:
            started.append((host.popen(inside, stdout=written, stderr=subprocess.STDOUT), output))
    until, running = time.monotonic() + LONGEST, True
    while running:
        running = any(process.poll() is None for process, _ in started)
        for process, output in started:
            if process.poll():
                ended = f"{system.program.__name__} ended with {process.returncode}"
                raise RuntimeError(f"{ended}:\n{output.read_text()}")
        if time.monotonic() > until:
            raise RuntimeError(f"{system.program.__name__} has not ended within {LONGEST:g} s")
        time.sleep(0.1)
