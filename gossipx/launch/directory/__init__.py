"""The directory of a run: it locks the run's name, and keeps a run to be overwritten until the new one trains."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossipx.errors import UsageError
from gossipx.metrics.aggregate import DIRECTORY as AGGREGATE
from gossipx.metrics.summary import FILE as SUMMARY_FILE
from gossipx.metrics.summary import Summary
from gossipx.settings import files as config_files
from gossipx.settings.sections import RunConfig
from gossipx.specs import suggest

log = logging.getLogger("gossipx")

CONFIG_FILE = "config.toml"
HOSTS_FILE = "hosts.txt"
SCRIPT_FILE = "script.json"
"""The user's script and its arguments, if there is one; ``--resume`` reads it."""
SCENARIO_FILE = "scenario.toml"
"""The scenario of a simulated run."""
WRITTEN = re.compile(
    "|".join(
        rf"{re.escape(name)}(\.tmp)?" for name in (CONFIG_FILE, HOSTS_FILE, SCRIPT_FILE, SCENARIO_FILE, SUMMARY_FILE)
    )
    + rf"|(config|joined)-\d+\.(toml|json)(\.tmp)?|{re.escape(SUMMARY_FILE)}\.\d+\.tmp|peer-\d+|{AGGREGATE}"
)
"""Names of the files that a run writes into its directory; nothing else in it is ever removed."""
_ATTEMPTS, _PAUSE = 3, 0.02
"""Attempts to lock a run's directory, and seconds between two."""
_SHOWN = 20
"""Maximum number of runs to list in a message."""


def run_directory(run: str, logdir: Path) -> Path:
    """Return the path of a run that is given by its directory or by its name in ``logdir``."""
    path, named = Path(run), logdir / run
    return named if named.is_dir() and not (path / CONFIG_FILE).exists() else path


def is_in_progress(run: Path) -> bool:
    """Return whether a process of this run holds its directory's lock; False where the file system has no locks."""
    lock = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def no_run(run: str, logdir: Path, having: str) -> UsageError:
    """Return the error for a run that does not exist; it says which runs there are.

    Args:
        run, logdir: as for :func:`run_directory`; it may also be a directory of runs.
        having: the file that the other runs must have to be suitable.
    """
    path = Path(run)
    place = path if path.is_dir() else logdir if path.name == run else path.parent
    known = sorted(found.parent.name for found in place.glob(f"*/{having}"))
    near = suggest(path.name, dict.fromkeys(known))
    there = ", ".join(known[:_SHOWN]) + (", …" if len(known) > _SHOWN else "") or "none"
    return UsageError(f"no such run{near}: {place} has {there}; give a run's directory, or its name and --logdir", path)


def refuse_simulated(run: Path) -> None:
    """Refuse the directory of a simulated run, for what needs the processes of a real one.

    Raises:
        UsageError: the run was simulated.
    """
    scenario = run / SCENARIO_FILE
    if scenario.is_file():
        raise UsageError(f"this run was simulated and has no processes; to repeat it: gossipx simulate {scenario}", run)


def checked_name(name: str | None) -> str:
    """Return the name of a run.

    Raises:
        UsageError: the name is missing or invalid.
    """
    if name is None or not re.fullmatch(r"[\w.,=+-]+", name) or name.startswith("."):
        raise UsageError(f"--name '{name}': a name consists of letters, digits and . , = + - _")
    return name


def settings_in(directory: Path) -> dict[str, Any]:
    """Return the settings with which a run began, as its settings file has them.

    Raises:
        UsageError: the file is missing, empty or invalid; names it.
    """
    file = directory / CONFIG_FILE
    if not file.is_file():
        raise UsageError("the settings of the run are missing: bring the file back, or start a new run", file)
    found = config_files.load(file)
    if not found:
        raise UsageError("it is empty, not the settings of a run: bring the file back, or start a new run", file)
    return found


class Directory:
    """The directory of a run, as a process that follows its peers uses it; here for one that others have made.

    Attributes:
        path: the directory.
        config: the settings file of this process's peers.
    """

    path: Path
    config: Path

    def record(self, settings: RunConfig) -> None:
        """Replace the settings file, as some settings are known only since the run trains."""
        try:
            replace(self.config, config_files.dump(settings).encode())
        except OSError as error:  # the run continues
            log.warning("%s: not up to date, as it cannot be written (%s)", self.config, error.strerror)

    def keep(self) -> None:
        """Keep the directory, as the run trains."""

    def revert(self) -> None:
        """Undo everything, as nothing was trained."""

    def release(self) -> None:
        """Release the lock, as the run has ended."""

    def conclude(self, summary: Summary) -> bool:
        """Write the run's summary; return False if another process writes one that is at least as complete."""
        summary.write(self.path)
        return True


class RunDirectory(Directory):
    """A run's directory, created before any peer starts; then call :meth:`keep` once the run trains, or
    :meth:`revert`.

    While a run ``runs/name`` replaces another one, the old run is kept whole in ``runs/.name.replaced``. It is moved
    there and back by a single rename, so that a process that is killed at any time leaves it whole; the next run with
    that name first moves it back.

    Args:
        settings: settings of the run, with a name.
        hosts: content of the hosts file, which is copied.
        script: the user's script and its arguments, which are recorded; empty: the built-in task.
        resumes: the run exists and continues in its directory.
        scenario: text of the scenario of a simulated run; empty: the run is real.

    Raises:
        UsageError: the name is in use or invalid, the directory cannot be written, or the run to resume is in progress.
    """

    def __init__(
        self, settings: RunConfig, hosts: bytes, script: Sequence[str] = (), resumes: bool = False, scenario: str = ""
    ):
        self.path = _path_of(settings)
        self.config = self.path / CONFIG_FILE
        self._replaced = _replaced_by(self.path)
        self._discarded = self.path.with_name(f".{self.path.name}.gone")
        self._advice = "it needs no --resume" if resumes else "give another --name"
        self._lock: int | None = None
        self._created = False
        self._previous: dict[Path, bytes | None] = {}  # files of a resumed run before this start; None: absent
        with contextlib.ExitStack() as undo:
            undo.callback(self.revert)
            try:
                if resumes:
                    self._acquire_lock()
                else:
                    self._make(settings.run.overwrite)
                self._write(settings, hosts, script, scenario)
            except OSError as error:
                what_to_do = "make room, or check its permissions" if resumes else "give another --logdir or --name"
                raise UsageError(f"cannot write the run: {error.strerror}; {what_to_do}", self.path) from error
            undo.pop_all()

    def _make(self, overwrite: bool) -> None:
        if self._replaced.is_dir():
            if self.path.is_dir():  # an attempt that was killed before it trained, unless it is in progress
                self._acquire_lock()
                self._clear()
            self._replaced.rename(self.path)
        if self.path.exists():
            _check_replaceable(self.path, self.path, overwrite)
            self._acquire_lock()
            self.path.rename(self._replaced)
        try:
            self.path.mkdir(parents=True)
        except FileExistsError as error:
            raise UsageError("another run has just taken that name: give another --name", self.path) from error
        self._created = True
        self._acquire_lock()

    def _write(self, settings: RunConfig, hosts: bytes, script: Sequence[str], scenario: str) -> None:
        """Write settings, hosts and script, each file atomically; the previous files of a resumed run
        are remembered."""
        files = {CONFIG_FILE: config_files.dump(settings).encode(), HOSTS_FILE: hosts}
        if script:
            files[SCRIPT_FILE] = json.dumps([str(Path(script[0]).absolute()), *script[1:]]).encode()
        if scenario:
            files[SCENARIO_FILE] = scenario.encode()
        if not self._created:
            self._previous = {
                file: file.read_bytes() if file.is_file() else None for file in map(self.path.joinpath, files)
            }
        for name, content in files.items():
            replace(self.path / name, content)

    def keep(self) -> None:
        """Remove the replaced run, except for files that no run has written; called once this run trains."""
        try:
            self._empty_discarded()
            if self._replaced.is_dir():
                self._replaced.rename(self._discarded)
                self._empty_discarded()
        except OSError as error:  # the new run continues
            log.warning(
                "%s: the replaced run cannot be removed (%s): remove it by hand", self._replaced, error.strerror
            )

    def revert(self) -> None:
        """Undo everything, as nothing was trained: free the name, or restore the run to replace or resume."""
        with contextlib.suppress(OSError):  # if it fails, the next run with this name moves the old run back
            if self._created:
                self._clear()
            for file, content in self._previous.items():
                if content is None:
                    file.unlink(missing_ok=True)
                else:
                    replace(file, content)
            if self._replaced.is_dir() and not self.path.exists():
                self._replaced.rename(self.path)
        self.release()

    def release(self) -> None:
        """Release the lock at the end of the run, so that another run may replace this one."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _clear(self) -> None:
        """Remove the files of an attempt; other files stay, and are moved to the replaced run, which
        will be restored."""
        for entry in self.path.iterdir():
            if WRITTEN.fullmatch(entry.name):
                _remove(entry)
            elif self._replaced.is_dir():
                entry.rename(self._replaced / entry.name)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def _empty_discarded(self) -> None:
        if self._discarded.is_dir():
            for entry in self._discarded.iterdir():
                if not WRITTEN.fullmatch(entry.name):
                    entry.rename(self.path / entry.name)
            shutil.rmtree(self._discarded, ignore_errors=True)

    def _acquire_lock(self) -> None:
        """Lock the directory for the life of this process, so that no other process replaces a run in progress."""
        lock = os.open(self.path, os.O_RDONLY)
        try:
            for _ in range(_ATTEMPTS):  # is_in_progress() holds a lock for a moment
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(_PAUSE)
            else:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UsageError(f"a run '{self.path.name}' is in progress: {self._advice}", self.path) from None
        except OSError:
            pass  # the file system has no locks
        if self._lock is not None:
            os.close(self._lock)
        self._lock = lock


def check_name(settings: RunConfig) -> None:
    """Check that a new run could use its name. Nothing is created or changed.

    Raises:
        UsageError: the name is in use or invalid, or its directory cannot be written.
    """
    path = _path_of(settings)
    replaced = _replaced_by(path)
    if path.exists() or replaced.is_dir():
        _check_replaceable(path, replaced if replaced.is_dir() else path, settings.run.overwrite)
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write the run: {parent} is not writable; give another --logdir", path)


def _path_of(settings: RunConfig) -> Path:
    return Path(settings.run.logdir) / checked_name(settings.run.name)


def _replaced_by(path: Path) -> Path:
    """Return where the old run of the same name is kept until the new one trains."""
    return path.with_name(f".{path.name}.replaced")


def _check_replaceable(path: Path, there: Path, overwrite: bool) -> None:
    if not overwrite:
        raise UsageError(
            f"a run '{path.name}' already exists: give another --name, or --overwrite; --resume continues it", path
        )
    if not _is_replaceable(there):
        raise UsageError("not the directory of a run, so it is not overwritten: give another --name", path)


def _is_replaceable(directory: Path) -> bool:
    """Return whether the directory is empty or belongs to a run. Other programs also have a config.toml, but a run's
    begins as :func:`config_files.dump` writes it."""
    if not directory.is_dir():
        return False
    if not any(directory.iterdir()):
        return True
    file = directory / CONFIG_FILE
    return file.is_file() and file.read_bytes().startswith(b"[run]\n") and (directory / HOSTS_FILE).is_file()


def replace(file: Path, content: bytes) -> None:
    """Replace the content of a file atomically."""
    unfinished = file.with_name(f"{file.name}.tmp")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()
