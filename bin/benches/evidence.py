"""gossipx and other systems side by side: loss against bytes and seconds, over emulated links.

bin/bench evidence          text, 200 steps, 100 Mbit/s, one seed, some systems (under 10 minutes on 2 cores)
bin/bench evidence --full   all tasks, links and systems, three seeds, each system with its best period (hours)

    --task, --rate, --systems    parts of it, separated by commas
    --seeds, --steps, --peers    numbers: 1 to 8 seeds, steps of each peer, peers
    --period                     of the systems that have one, in place of the best one
    --keep FOLDER                results of finished runs, which are not repeated, even if the code has changed; and the
                                 pictures; default: runs/evidence with --full, else none

It needs root on Linux with ip and tc (Debian's iproute2). docs/figures-evidence.md describes the method.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from _bench.cached_runs import CachedRuns, Job
from _bench.cli import Given, bench, some_of
from _bench.processes import command_of
from _bench.tables import Table
from _evidence_systems import DDP, PERIODS, SHORT, SHORT_PERIOD, SYSTEMS, System, missing
from _evidence_table import Comparison, mean, stretched
from _evidence_task import WORKLOADS, Assignment, curve
from emulated import EmulatedNetwork, NetworkUnavailableError, lacking
from emulated.runs import train

RATES = ("10mbit", "100mbit", "1000mbit")
FASTEST = RATES[-1]
"""The link on which periods are searched: there a run takes the least time."""
PEERS, SHORT_STEPS = 4, 200
TIMED_STEPS = 48
"""Steps that show the seconds of a synchronous system over a slower link; DDP takes 80 s for them at 10 Mbit/s."""


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
    """Run a job, a process per host of an emulated network; return its points, see :func:`_evidence_task.curve`."""
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


class Plan:
    """The runs of one task.

    Args:
        task: a key of ``WORKLOADS``.
        given: the options, complete.
        absent: names of systems whose packages are not installed.
        kept: results.
    """

    def __init__(self, task: str, given: Given, absent: Collection[str], kept: CachedRuns):
        self.task, self.workload, self._absent = task, WORKLOADS[task], absent
        self.systems = systems = [name for name in given.systems if name not in absent]
        self.steps = given.steps or WORKLOADS[task].steps
        self.peers, self.seeds, self._rates = given.peers, range(given.seeds), given.rate
        self._kept = kept
        periodic = [name for name in systems if SYSTEMS[name].periodic]
        self.periods = {name: given.period or self._default_period(name, given.full) for name in periodic}

    def compare(self, rate: str) -> Comparison:
        """Run what is missing at one rate, and return the comparison of the systems all of whose runs succeeded."""
        jobs = {
            name: [self._job(name, rate, seed, self.periods.get(name)) for seed in self.seeds] for name in self.systems
        }
        for seed in self.seeds:
            self._complete([each[seed] for each in jobs.values()])
        made = {
            name: [self._points(name, one) for one in each]
            for name, each in jobs.items()
            if all(self._is_made(name, one) for one in each)
        }
        ends = {name: self.ends(name, but=self.periods.get(name)) for name in made} if rate == FASTEST else {}
        left_out = [name for name in (*self._absent, *self.systems) if name not in made]
        return Comparison(self.task, rate, self.peers, self.steps, made, self.periods, ends, left_out)

    def _job(self, name: str, rate: str, seed: int, period: int | None) -> Job:
        steps = min(self.steps, TIMED_STEPS) if self._is_timed(name, rate) else self.steps
        return job(self.task, name, rate, self.peers, seed, steps, period)

    def _is_timed(self, name: str, rate: str) -> bool:
        """Return whether a system's losses at this rate are those of the fastest link, so that only a part is run."""
        return SYSTEMS[name].is_synchronous and rate != FASTEST and FASTEST in self._rates

    def ends(self, name: str, but: int | None = 0) -> list[dict[str, float]]:
        """Return a system's last points over the fastest link, means over seeds, by period.

        Args:
            name: of the system.
            but: a period that is left out. So are those that not all seeds have a run of.
        """
        periods: tuple[int | None, ...] = PERIODS if SYSTEMS[name].periodic else (None,)
        each = [[self._job(name, FASTEST, seed, one) for seed in self.seeds] for one in periods if one != but]
        return [mean([self._kept[job][-1] for job in jobs]) for jobs in each if all(job in self._kept for job in jobs)]

    def _is_made(self, name: str, one: Job) -> bool:
        return one in self._kept and (not self._is_timed(name, one["rate"]) or self._whole(name, one) in self._kept)

    def _points(self, name: str, one: Job) -> Any:
        if not self._is_timed(name, one["rate"]):
            return self._kept[one]
        return stretched(self._kept[self._whole(name, one)], self._kept[one])

    def _whole(self, name: str, timed: Job) -> Job:
        return self._job(name, FASTEST, timed["seed"], timed["period"])

    def _complete(self, jobs: Sequence[Job]) -> None:
        """Run the jobs that have no result. One that fails is reported and has none, so that the others still run."""
        for one in jobs:
            if one in self._kept:
                continue
            print(" ".join(f"{key}={value}" for key, value in one.items() if value is not None), file=sys.stderr)
            try:
                self._kept.add(one, run(one))
            except RuntimeError as error:
                print(
                    f"bin/bench evidence: {one['system']} is left out, since a run of it failed: {error}",
                    file=sys.stderr,
                )

    def _default_period(self, name: str, full: bool) -> int:
        if full:
            return self._best_period(name)
        return max((one for one in PERIODS if one <= min(SHORT_PERIOD, self.steps // 4)), default=PERIODS[0])

    def _best_period(self, name: str) -> int:
        """Return the longest period that is as good as the best but for noise, with one seed on the fastest link."""
        jobs = {period: self._job(name, FASTEST, 0, period) for period in PERIODS if period <= self.steps}
        self._complete(list(jobs.values()))
        errors = {
            period: WORKLOADS[self.task].error(self._kept[one][-1]) for period, one in jobs.items() if one in self._kept
        }
        enough = min(errors.values(), default=0.0) + WORKLOADS[self.task].noise
        return max((period for period, error in errors.items() if error <= enough), default=SHORT_PERIOD)


def evidence(given: Given) -> Iterator[Table]:
    """Yield a table per task and link, and write pictures of them if results are kept."""
    if (reason := lacking()) is not None:
        raise NetworkUnavailableError(reason)
    _complete(given)
    absent = missing(given.systems)
    if absent:
        packages = " ".join(sorted(set(absent.values())))
        left_out = f"bin/bench evidence: {', '.join(absent)} left out: install {packages}"
        print(f"{left_out} by '{sys.executable} -m pip install {packages}'", file=sys.stderr)
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    kept = CachedRuns(None if given.keep is None else given.keep / "runs.jsonl")
    for task in given.task:
        plan = Plan(task, given, absent, kept)
        for rate in sorted(given.rate, key=RATES.index, reverse=True):  # FASTEST first, see Plan
            comparison = plan.compare(rate)
            yield comparison.table()
            if given.keep is not None:
                import _evidence_plots  # imports matplotlib only when needed

                _evidence_plots.evidence(comparison, given.keep)
        if given.keep is not None and FASTEST in given.rate:
            _evidence_plots.periods(plan, given.keep)


def _complete(given: Given) -> None:
    """Set the options that are not given."""
    given.task = given.task or given.of(["fashion-mnist"], ["text"], list(WORKLOADS))
    given.rate = given.rate or given.of([FASTEST], ["100mbit"], list(RATES))
    given.systems = given.systems or list(given.of((DDP, "tau:10"), SHORT, SYSTEMS))
    given.steps = given.steps or given.of(12, SHORT_STEPS, None)
    given.peers = given.peers or given.of(2, PEERS, PEERS)
    given.seeds = given.seeds or given.of(1, 1, 3)
    given.keep = given.keep or (Path("runs/evidence") if given.full else None)


OPTIONS: dict[str, dict[str, Any]] = {
    "--task": {"type": some_of(WORKLOADS), "help": ", ".join(WORKLOADS)},
    "--rate": {"type": some_of(RATES), "help": ", ".join(RATES)},
    "--systems": {"type": some_of(SYSTEMS), "help": ", ".join(SYSTEMS)},
    "--seeds": {"type": int, "choices": range(1, 9), "help": "default: 1, with --full 3"},
    "--steps": {"type": int, "help": "default: 200, with --full 800, for LeNet 3000"},
    "--peers": {"type": int, "help": f"default: {PEERS}"},
    "--period": {"type": int, "choices": PERIODS, "help": "default: the best one, without --full 50 or less"},
    "--keep": {"type": Path},
}


if __name__ == "__main__":
    bench(__file__, __doc__, evidence, OPTIONS)
