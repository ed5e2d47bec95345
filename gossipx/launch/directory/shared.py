"""The directory of a run of which each process is one peer: any of them may end first, and writes the summary."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gossipx.errors import UsageError
from gossipx.launch.directory import CONFIG_FILE, Directory, RunDirectory, replace
from gossipx.metrics.summary import FILE as SUMMARY_FILE
from gossipx.metrics.summary import Summary, read
from gossipx.settings import files
from gossipx.settings.sections import RunConfig

log = logging.getLogger("gossipx")

LOCK_INTERVAL = 0.05
"""Seconds between two attempts to lock the summary, which others write within milliseconds."""


class SharedDirectory(Directory):
    """The directory of a run into which several processes write: nothing is undone, as others may train here.

    Args:
        path: the run's directory.
        created: its lock and cleanup, if this process created it; None: another process did.
        rank: rank of this process's peer.
        settings: settings of this process, which may differ from those recorded in the directory.
    """

    def __init__(self, path: Path, created: RunDirectory | None, rank: int, settings: RunConfig):
        self.path = path
        self._created = created
        self._rank = rank
        self._patience = settings.exchange.peer_timeout
        self._summary_before = self._summary()  # present if the run resumes
        own = path / f"config-{rank:02d}.toml"
        content, common = files.dump(settings).encode(), path / CONFIG_FILE
        if content == common.read_bytes():
            own.unlink(missing_ok=True)  # left over if the run resumes
            self.config = common
        else:
            replace(own, content)
            self.config = own

    def begin(self) -> None:
        """Keep the directory once all have met: others may train here now, so an overwritten run is removed."""
        if self._created is not None:
            self._created.keep()

    def release(self) -> None:
        """Release the lock, if this process has it."""
        if self._created is not None:
            self._created.release()

    def conclude(self, summary: Summary) -> bool:
        """Write the summary, unless there is one that lacks no more peers: any process may end first, or be lost.

        Processes that are stopped know only their own figures, which are added to those that are there.
        """
        with self._locked():
            if self._summary() != self._summary_before:
                with contextlib.suppress(UsageError):
                    there = read(self.path)
                    summary = summary.completed(there)
                    if len(there.lost) <= len(summary.lost):
                        return False
            summary.write(self.path, by=self._rank)
            return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Let processes that end at once write one after the other. Continue without the lock if there are no locks, or
        if another process, which may have been stopped meanwhile, holds it for ``peer_timeout``."""
        until = time.monotonic() + self._patience
        with contextlib.ExitStack() as opened:
            try:
                file = opened.enter_context((self.path / CONFIG_FILE).open("rb"))
                while not _has_locked(file):
                    if time.monotonic() > until:
                        raise TimeoutError(0, f"another process has held it for {self._patience:g} s")
                    time.sleep(LOCK_INTERVAL)
            except OSError as error:
                log.warning(
                    "%s: writing it without a lock (%s): it may lack figures of peers that end at the same time",
                    self.path / SUMMARY_FILE,
                    error.strerror,
                )
            yield

    def _summary(self) -> bytes | None:
        with contextlib.suppress(OSError):
            return (self.path / SUMMARY_FILE).read_bytes()
        return None


def _has_locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
