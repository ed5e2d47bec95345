"""The directory of a run: its name is one run's, and a run that is overwritten is kept until the new one trains."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from gossipx.config import files as config_files
from gossipx.config.settings import RunConfig
from gossipx.errors import UsageError
from gossipx.metrics.summary import FILE as SUMMARY_FILE
from gossipx.metrics.summary import Summary

CONFIG_FILE = "config.toml"
HOSTS_FILE = "hosts.txt"
SCRIPT_FILE = "script.json"
"""The script and its arguments, if one was given: a run that goes on needs to know."""
WRITTEN = re.compile(
    "|".join(rf"{re.escape(name)}(\.tmp)?" for name in (CONFIG_FILE, HOSTS_FILE, SCRIPT_FILE, SUMMARY_FILE))
    + rf"|config-\d+\.toml(\.tmp)?|{re.escape(SUMMARY_FILE)}\.\d+\.tmp|peer-\d+"
)
"""What a run writes into its directory; nothing else is ever removed from it."""


def run_directory(run: str, logdir: Path) -> Path:
    """Where a run is, by its directory or its name in ``logdir``."""
    path = Path(run)
    return path if path.is_dir() or not (logdir / run).is_dir() else logdir / run


def checked_name(name: str | None) -> str:
    """A run's name.

    Raises:
        UsageError: it is none.
    """
    if name is None or not re.fullmatch(r"[\w.,=+-]+", name) or name.startswith("."):
        raise UsageError(f"--name '{name}': letters, digits and . , = + - _ make a name")
    return name


class RunDirectory:
    """Made before anything is started; then either :meth:`keep` it, once the run trains, or :meth:`give_up`.

    Beside ``runs/name`` there may be, for the moment, ``runs/.name.replaced``, a whole run that is to be overwritten.
    It comes there and back by one rename, so that a process that is killed at any time leaves it whole; the next one
    that is given the name puts it back first.

    Args:
        settings: with a name.
        hosts: what the hosts file holds, which is copied.
        script: a script and its arguments, which are noted; empty: none.
        goes_on: the run is there, and goes on in its directory.

    Raises:
        UsageError: the name is in use, is none, or cannot be written; or the run that is to go on is under way.
    """

    def __init__(self, settings: RunConfig, hosts: bytes, script: Sequence[str] = (), goes_on: bool = False):
        self.path = _path_of(settings)
        self._replaced = _replaced_by(self.path)
        self._gone = self.path.with_name(f".{self.path.name}.gone")
        self._instead = "it goes on by itself" if goes_on else "give another --name"
        self._lock: int | None = None
        self._mine = False
        self._noted: dict[Path, bytes | None] = {}  # what a run that goes on had noted before; None: nothing
        with contextlib.ExitStack() as undo:
            undo.callback(self.give_up)
            try:
                if goes_on:
                    self._take()
                else:
                    self._make(settings.run.overwrite)
                self._write(settings, hosts, script)
            except OSError as error:
                raise UsageError(
                    f"cannot write the run: {error.strerror}; give another --logdir or --name", self.path
                ) from error
            undo.pop_all()  # it is made

    def _make(self, overwrite: bool) -> None:
        if self._replaced.is_dir():
            if self.path.is_dir():  # an attempt that was killed before it trained, if it is not under way
                self._take()
                self._clear()
            self._replaced.rename(self.path)
        if self.path.exists():
            _check_replaceable(self.path, self.path, overwrite)
            self._take()
            self.path.rename(self._replaced)
        try:
            self.path.mkdir(parents=True)
        except FileExistsError as error:
            raise UsageError("another run has taken that name just now: give another --name", self.path) from error
        self._mine = True
        self._take()

    def _write(self, settings: RunConfig, hosts: bytes, script: Sequence[str]) -> None:
        """Note what the run is, each file whole or as it was: a run that goes on has had others, perhaps."""
        files = {CONFIG_FILE: config_files.dump(settings).encode(), HOSTS_FILE: hosts}
        if script:
            files[SCRIPT_FILE] = json.dumps([str(Path(script[0]).absolute()), *script[1:]]).encode()
        if not self._mine:
            self._noted = {
                file: file.read_bytes() if file.is_file() else None for file in map(self.path.joinpath, files)
            }
        for name, content in files.items():
            replace(self.path / name, content)

    @property
    def config(self) -> Path:
        """Where its settings are noted."""
        return self.path / CONFIG_FILE

    def conclude(self, summary: Summary) -> bool:
        """Write the run's summary."""
        summary.write(self.path)
        return True

    def keep(self) -> None:
        """The run trains: what it replaces goes, but for what no run has written."""
        self._empty_gone()
        if self._replaced.is_dir():
            self._replaced.rename(self._gone)
            self._empty_gone()

    def give_up(self) -> None:
        """Nothing was trained: the name is free again, or the run's that was to be replaced or to go on."""
        with contextlib.suppress(OSError):  # what cannot be put back now is, by the next that is given this name
            if self._mine:
                self._clear()
            for file, content in self._noted.items():
                if content is None:
                    file.unlink(missing_ok=True)
                else:
                    replace(file, content)
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
            raise UsageError(f"a run '{self.path.name}' is under way: {self._instead}", self.path) from None
        except OSError:
            pass  # a file system without locks
        if self._lock is not None:
            os.close(self._lock)
        self._lock = lock


def check_name(settings: RunConfig) -> None:
    """See that a new run could have its name. Nothing is made or changed.

    Raises:
        UsageError: the name is in use, or is none, or nothing can be written there.
    """
    path = _path_of(settings)
    replaced = _replaced_by(path)
    if path.exists() or replaced.is_dir():
        _check_replaceable(path, replaced if replaced.is_dir() else path, settings.run.overwrite)
    there = next(one for one in path.absolute().parents if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write the run: {there} is not to be written to; give another --logdir", path)


def _path_of(settings: RunConfig) -> Path:
    return Path(settings.run.logdir) / checked_name(settings.run.name)


def _replaced_by(path: Path) -> Path:
    """Where the run whose name another has taken is, until that trains."""
    return path.with_name(f".{path.name}.replaced")


def _check_replaceable(path: Path, there: Path, overwrite: bool) -> None:
    if not overwrite:
        raise UsageError(f"a run '{path.name}' is there already: give another --name, or --overwrite", path)
    if not _is_replaceable(there):
        raise UsageError("not the directory of a run, so it is not overwritten: give another --name", path)


def _is_replaceable(directory: Path) -> bool:
    """Whether it is empty or a run's: many programs have a config.toml, a run's begins as :func:`config_files.dump`
    does."""
    if not directory.is_dir():
        return False
    if not any(directory.iterdir()):
        return True
    file = directory / CONFIG_FILE
    return file.is_file() and file.read_bytes().startswith(b"[run]\n") and (directory / HOSTS_FILE).is_file()


def replace(file: Path, content: bytes) -> None:
    """Write a file whole, or leave it as it was."""
    unfinished = file.with_name(f"{file.name}.tmp")
    unfinished.write_bytes(content)
    unfinished.replace(file)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()
