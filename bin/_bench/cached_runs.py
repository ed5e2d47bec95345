"""Independent runs of a benchmark: several at a time, with results saved to a file as each run ends."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Job = dict[str, Any]
"""The parameters of a run, as JSON. Runs with equal jobs are the same run."""
PACKAGE = Path(__file__).parents[2] / "gossipx"


class CachedRuns:
    """The results of runs by their jobs.

    Args:
        file: a file with one line per run, which is read first and appended to; None: results are kept in memory only.
            If other code than today's has made some of them, this prints a line.
    """

    def __init__(self, file: Path | None):
        self._file = file
        self._made: dict[str, Any] = {}
        self._code, older = _digest(PACKAGE), 0
        for number, line in enumerate(file.read_text().splitlines() if file is not None and file.exists() else (), 1):
            try:
                kept = json.loads(line)
                self._made[_key(kept["job"])] = kept["made"]
                older += kept.get("code") != self._code
            except (ValueError, KeyError, TypeError):
                print(f"{file}, line {number} is invalid and skipped: it may be truncated", file=sys.stderr)
        if older:
            print(f"{file}: {older} of {len(self._made)} results are of other code in {PACKAGE.name}/", file=sys.stderr)

    def __getitem__(self, job: Job) -> Any:
        return self._made[_key(job)]

    def __contains__(self, job: Job) -> bool:
        return _key(job) in self._made

    def add(self, job: Job, made: Any) -> None:
        """Save the result of a run."""
        self._made[_key(job)] = made
        if self._file is not None:
            with self._file.open("a") as file:
                if file.tell() and not self._file.read_bytes().endswith(b"\n"):
                    file.write("\n")
                file.write(json.dumps({"job": job, "code": self._code, "made": made}) + "\n")

    def complete(self, jobs: Sequence[Job], work: Callable[[Job], Any], processes: int) -> None:
        """Run all ``jobs`` that have no result yet, in their order.

        Args:
            jobs: the jobs.
            work: a module-level function that runs a job and returns plain data.
            processes: number of parallel processes.
        """
        missing = [job for job in jobs if job not in self]
        for done, (job, made) in enumerate(_results(missing, work, processes), 1):
            self.add(job, made)
            print(f"{done} of {len(missing)}: {_key(job)}", file=sys.stderr)


def _results(jobs: Sequence[Job], work: Callable[[Job], Any], processes: int) -> Iterator[tuple[Job, Any]]:
    if processes == 1:
        yield from ((job, work(job)) for job in jobs)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(work, job): job for job in jobs}
        for future in as_completed(running):
            yield running[future], future.result()


def _digest(package: Path) -> str:
    """Return a hash of a package's source code."""
    files = sorted(package.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _key(job: Job) -> str:
    return json.dumps(job, sort_keys=True)
