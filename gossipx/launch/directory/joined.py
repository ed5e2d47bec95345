"""The directory of a run on the machine of a peer that joins it under way."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossipx.errors import UsageError
from gossipx.launch.directory import HOSTS_FILE, Directory, checked_name, replace
from gossipx.launch.hosts import PeerLine, peers_digest, read_hosts
from gossipx.metrics.summary import Summary
from gossipx.peer.joining.admission import Admission
from gossipx.settings import files
from gossipx.settings.sections import RunConfig


class NewcomerDirectory(Directory):
    """The directory of the run on this machine, shared with the run's own peers if they are here too.

    The newcomer's settings have its rank in their name.

    Args:
        own: settings of this machine.
        given: those of them that a user has given, by name.

    Attributes:
        settings: of the newcomer: those of the run, and its own.
        admission: path of the file with the admission.
        summary: the figures of the newcomer; None until it has ended.

    Raises:
        UsageError: the directory belongs to another run, or cannot be written.
    """

    def __init__(self, admission: Admission, own: RunConfig, given: Mapping[str, Any]):
        logdir, rank = Path(own.run.logdir), admission.rank
        self.summary: Summary | None = None
        self._is_new = False  # whether nothing of a peer of this rank was there before
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: self.revert())
            self.path = self.config = self.admission = logdir  # until the name of the run is known
            self._created: list[Path] = []
            try:
                logdir.mkdir(parents=True, exist_ok=True)
                unnamed = logdir / f".{admission.own.port}.toml"
                self._write(unnamed, admission.settings.encode())
                of_run = files.load(unnamed)
                self.path = logdir / checked_name(str(of_run.get("name", "joined")))
                self._check(admission)
                self._peer = self.path / f"peer-{rank:02d}"
                self._is_new = not self._peer.exists()
                self.path.mkdir(exist_ok=True)
                place = {"name": self.path.name, "logdir": str(logdir)}
                self.settings = files.resolve(of_run, given, place)
                self.config, self.admission = self.path / f"config-{rank}.toml", self.path / f"joined-{rank}.json"
                self._write(self.admission, admission.encoded())
                self._write(self.config, files.dump(self.settings).encode())
                unnamed.unlink()
            except OSError as error:
                raise UsageError(f"cannot write the run: {error.strerror}; give another --logdir", self.path) from error
            undo.pop_all()

    def _write(self, file: Path, content: bytes) -> None:
        self._created.append(file)
        replace(file, content)

    def _check(self, admission: Admission) -> None:
        """Check that a directory of that name, if there is one, is of the same run."""
        hosts = self.path / HOSTS_FILE
        if not self.path.exists() or not any(self.path.iterdir()):
            return
        begun = [PeerLine(rank, host, port, None, name, 0) for rank, (name, host, port) in enumerate(admission.begun)]
        if hosts.is_file():
            same = peers_digest(read_hosts(hosts)) == peers_digest(begun)
        else:
            before = [Admission.decoded(one.read_bytes()).begun for one in self.path.glob("joined-*.json")]
            same = admission.begun in before
        if not same:
            raise UsageError(
                f"it is of another run named '{self.path.name}': give --logdir DIR, in which no run has that name",
                self.path,
            )

    def keep(self) -> None:
        """Keep the files, as the newcomer trains."""
        self._created.clear()

    def revert(self) -> None:
        """Remove the files, as nothing was trained."""
        for file in self._created:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        if self._is_new:
            shutil.rmtree(self._peer, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty
            self.path.rmdir()

    def conclude(self, summary: Summary) -> bool:
        """Keep the figures; the summary of the run is written by the machines that began it."""
        self.summary = summary
        return False
