"""The directory of a run: its name is one run's, and a run that is overwritten is kept until the new one trains."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from pathlib import Path

from gossipx import config
from gossipx.config import RunConfig
from gossipx.errors import UsageError
from gossipx.metrics.summary import FILE as SUMMARY_FILE

CONFIG_FILE = "config.toml"
HOSTS_FILE = "hosts.txt"
WRITTEN = re.compile(rf"{re.escape(CONFIG_FILE)}|{re.escape(HOSTS_FILE)}|{re.escape(SUMMARY_FILE)}(\.tmp)?|peer-\d+")
"""What a run writes into its directory; nothing else is ever removed from it."""


class RunDirectory:
    """Made before anything is started; then either :meth:`keep` it, once the run trains, or :meth:`give_up`.

    Beside ``runs/name`` there may be, for the moment, ``runs/.name.replaced``, a whole run that is to be overwritten.
    It comes there and back by one rename, so that a process that is killed at any time leaves it whole; the next one
    that is given the name puts it back first.

    Args:
        settings: with a name.
        hosts: the hosts file, which is copied.

    Raises:
        UsageError: the name is in use, is none, or cannot be written.
    """

    def __init__(self, settings: RunConfig, hosts: Path):
        name = settings.run.name
        if name is None or not re.fullmatch(r"[\w.,=+-]+", name) or name.startswith("."):
            raise UsageError(f"--name '{name}': letters, digits and . , = + - _ make a name")
        self.path = Path(settings.run.logdir) / name
        self._replaced = self.path.with_name(f".{name}.replaced")
        self._gone = self.path.with_name(f".{name}.gone")
        self._lock: int | None = None
        self._mine = False
        with contextlib.ExitStack() as undo:
            undo.callback(self.give_up)
            try:
                self._make(settings, hosts.read_bytes())
            except OSError as error:
                raise UsageError(
                    f"cannot write the run: {error.strerror}; give another --logdir or --name", self.path
                ) from error
            undo.pop_all()  # it is made

    def _make(self, settings: RunConfig, hosts: bytes) -> None:
        if self._replaced.is_dir():
            if self.path.is_dir():  # an attempt that was killed before it trained, if it is not under way
                self._take()
                self._clear()
            self._replaced.rename(self.path)
        if self.path.exists():
            if not settings.run.overwrite:
                raise UsageError(
                    f"a run '{self.path.name}' is there already: give another --name, or --overwrite", self.path
                )
            if not _is_replaceable(self.path):
                raise UsageError("not the directory of a run, so it is not overwritten: give another --name", self.path)
            self._take()
            self.path.rename(self._replaced)
        try:
            self.path.mkdir(parents=True)
        except FileExistsError as error:
            raise UsageError("another run has taken that name just now: give another --name", self.path) from error
        self._mine = True
        self._take()
        (self.path / CONFIG_FILE).write_text(config.dump(settings), encoding="utf-8")
        (self.path / HOSTS_FILE).write_bytes(hosts)

    def keep(self) -> None:
        """The run trains: what it replaces goes, but for what no run has written."""
        self._empty_gone()
        if self._replaced.is_dir():
            self._replaced.rename(self._gone)
            self._empty_gone()

    def give_up(self) -> None:
        """Nothing was trained: the name is free again, or the run's that was to be replaced."""
        with contextlib.suppress(OSError):  # what cannot be put back now is, by the next that is given this name
            if self._mine:
                self._clear()
            if self._replaced.is_dir() and not self.path.exists():
                self._replaced.rename(self.path)
        self.release()

    def release(self) -> None:
        """The run has ended: another may replace it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _clear(self) -> None:
        """Remove what an attempt has written; what else is there stays, with the run that comes back."""
        for entry in self.path.iterdir():
            if WRITTEN.fullmatch(entry.name):
                _remove(entry)
            elif self._replaced.is_dir():
                entry.rename(self._replaced / entry.name)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def _empty_gone(self) -> None:
        if self._gone.is_dir():
            for entry in self._gone.iterdir():
                if not WRITTEN.fullmatch(entry.name):
                    entry.rename(self.path / entry.name)
            shutil.rmtree(self._gone, ignore_errors=True)

    def _take(self) -> None:
        """Lock the directory, as long as this process lives: no other may replace a run that is under way."""
        lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UsageError(f"a run '{self.path.name}' is under way: give another --name", self.path) from None
        except OSError:
            pass  # a file system without locks
        if self._lock is not None:
            os.close(self._lock)
        self._lock = lock


def _is_replaceable(directory: Path) -> bool:
    """Whether it is empty or a run's: many programs have a config.toml, a run's begins as :func:`config.dump` does."""
    if not directory.is_dir():
        return False
    if not any(directory.iterdir()):
        return True
    file = directory / CONFIG_FILE
    return file.is_file() and file.read_bytes().startswith(b"[run]\n") and (directory / HOSTS_FILE).is_file()


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()
