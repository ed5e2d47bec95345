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

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import _plots
from _cached_runs import CachedRuns, Job
from _evidence_runs import job, run
from _evidence_systems import PERIODS, SHORT, SHORT_PERIOD, SYSTEMS, missing
from _evidence_table import Comparison, mean, stretched
from _evidence_task import WORKLOADS
from _report import report
from emulated import lacking

RATES = ("10mbit", "100mbit", "1000mbit")
FASTEST = RATES[-1]
"""The link on which periods are searched: there a run takes the least time."""
PEERS, SHORT_STEPS = 4, 200
TIMED_STEPS = 48
"""Steps that show the seconds of a synchronous system over a slower link; DDP takes 80 s for them at 10 Mbit/s."""


class Plan:
    """The runs of one task.

    Args:
        task: a key of ``WORKLOADS``.
        given: the options.
        absent: names of systems whose packages are not installed.
        kept: results.
    """

    def __init__(self, task: str, given: argparse.Namespace, absent: Collection[str], kept: CachedRuns):
        self.task, self.workload, self._absent = task, WORKLOADS[task], absent
        self.systems = systems = [name for name in given.systems if name not in absent]
        self.steps = given.steps or (WORKLOADS[task].steps if given.full else SHORT_STEPS)
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


def main() -> None:
    given = _options()
    reason = lacking()
    if reason is not None:
        sys.exit(f"bin/bench evidence: {reason}")
    absent = missing(given.systems)
    if absent:
        packages = " ".join(sorted(set(absent.values())))
        print(
            f"bin/bench evidence: {', '.join(absent)} left out: install {packages} by"
            f" '{sys.executable} -m pip install {packages}'",
            file=sys.stderr,
        )
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    kept = CachedRuns(None if given.keep is None else given.keep / "runs.jsonl")
    figures: list[Any] = []
    for task in given.task:
        plan = Plan(task, given, absent, kept)
        for rate in sorted(given.rate, key=RATES.index, reverse=True):  # FASTEST first, see Plan
            comparison = plan.compare(rate)
            figures += comparison.figures()
            if not given.json:
                report(comparison.title(), comparison.headings(), comparison.rows(), comparison.figures())
            if given.keep is not None:
                _plots.evidence(comparison, given.keep)
        if given.keep is not None and FASTEST in given.rate:
            _plots.periods(plan, given.keep)
    if given.json:
        print(json.dumps({"figures": figures}, indent=2))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bin/bench evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--task", type=_some_of(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--rate", type=_some_of(RATES), help=", ".join(RATES))
    parser.add_argument("--systems", type=_some_of(SYSTEMS), help=", ".join(SYSTEMS))
    parser.add_argument("--seeds", type=int, choices=range(1, 9), help="default: 1, with --full 3")
    parser.add_argument("--steps", type=int, help="default: 200, with --full 800, for LeNet 3000")
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--period", type=int, choices=PERIODS, help="default: the best one, without --full 50 or less")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    given.task = given.task or (list(WORKLOADS) if given.full else ["text"])
    given.rate = given.rate or (list(RATES) if given.full else ["100mbit"])
    given.systems = given.systems or list(SYSTEMS if given.full else SHORT)
    given.seeds = given.seeds or (3 if given.full else 1)
    given.keep = given.keep or (Path("runs/evidence") if given.full else None)
    return given


def _some_of(known: Any) -> Any:
    def names(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"'{name}' is not one of {', '.join(known)}")
        return chosen

    return names


if __name__ == "__main__":
    main()
