"""Runs of a benchmark that do not depend on each other: several at a time, and kept in a file as they end."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Job = dict[str, Any]
"""What a run is of, as JSON has it: two of equal jobs are the same."""


class CachedRuns:
    """What runs have made, by their jobs.

    Args:
        file: a line a run, read at first and added to; None: nothing outlasts this process.
    """

    def __init__(self, file: Path | None):
        self._file = file
        self._made: dict[str, Any] = {}
        for number, line in enumerate(file.read_text().splitlines() if file is not None and file.exists() else (), 1):
            try:
                kept = json.loads(line)
                self._made[_key(kept["job"])] = kept["made"]
            except (ValueError, KeyError, TypeError):
                print(f"{file}, line {number} is no run, and left out: it may have been cut off", file=sys.stderr)

    def __getitem__(self, job: Job) -> Any:
        return self._made[_key(job)]

    def __contains__(self, job: Job) -> bool:
        return _key(job) in self._made

    def add(self, job: Job, made: Any) -> None:
        """A run has ended."""
        self._made[_key(job)] = made
        if self._file is not None:
            with self._file.open("a") as file:
                if file.tell() and not self._file.read_bytes().endswith(b"\n"):
                    file.write("\n")
                file.write(json.dumps({"job": job, "made": made}) + "\n")

    def complete(self, jobs: Sequence[Job], work: Callable[[Job], Any], processes: int) -> None:
        """Have all ``jobs`` done that are not here yet, in their order.

        Args:
            work: a function of a module, which makes plain data.
            processes: that do so at a time.
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


def _key(job: Job) -> str:
    return json.dumps(job, sort_keys=True)
