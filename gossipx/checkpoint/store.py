"""The checkpoint store of one peer, which keeps the newest checkpoints, each complete or absent.

A checkpoint becomes valid by one rename of its manifest, after all its files are on the disk. So a killed process, a
full disk or a power failure at any time leaves earlier checkpoints intact, and at most one directory without a
manifest, which the next save removes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file

from gossipx.checkpoint import files
from gossipx.checkpoint.plain import Part
from gossipx.errors import MALFORMED, GossipxError

log = logging.getLogger("gossipx")

FORMAT = 2
"""Format version; increased when older readers could not read what is written."""
MANIFEST = "manifest.json"
KEEP = 2
"""Checkpoints kept: if the newest is damaged, there is an older one."""
PART = re.compile(r"[\w-][\w.-]*", re.ASCII)
"""Valid names of parts, which become file names."""
_Listed: TypeAlias = dict[Annotated[str, msgspec.Meta(pattern=rf"(?a)\A{PART.pattern}\Z")], files.Measured]


class CheckpointError(GossipxError):
    """A checkpoint could not be written; earlier ones are intact."""


class NotRemovedError(GossipxError):
    """A checkpoint was written, but an older one could not be removed."""


class DamagedError(GossipxError):
    """A directory is not a complete checkpoint; the message names the bad file and the problem."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read.

    Attributes:
        path: its directory.
        iteration: the iteration at which it was taken.
        parts: parts by name.
    """

    path: Path
    iteration: int
    parts: dict[str, Part]


class Store:
    """The checkpoints in one directory; for one thread at a time.

    Args:
        directory: used for checkpoints only; created by the first save.
        keep: number of checkpoints to keep, at least 1.
    """

    def __init__(self, directory: Path, keep: int = KEEP):
        self.directory = directory
        self._keep = keep

    # --- writing ------------------------------------------------------------------------------------

    def save(self, iteration: int, parts: Mapping[str, Part]) -> None:
        """Write a checkpoint, then remove the oldest ones and incomplete ones.

        Existing checkpoints of this or a later iteration are removed, too: training was resumed from an earlier one.

        Args:
            iteration: iterations done, from 0.
            parts: parts by name: letters, digits and . - _.

        Raises:
            CheckpointError: it cannot be written, for example because the disk is full; no part of it remains.
            NotRemovedError: it is written, but an old one cannot be removed.
        """
        target = self.directory / f"{iteration:08d}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if target.exists():
                _remove(target)
            target.mkdir()
            written = {}
            for name, part in parts.items():
                if not PART.fullmatch(name):
                    raise CheckpointError(f"'{name}' is not a valid part name: use letters, digits and . - _")
                written[f"{name}.json"] = files.write(target / f"{name}.json", [files.plain(part.state)])
                if part.tensors:
                    tensors = files.safetensors(part.tensors)
                    written[f"{name}.safetensors"] = files.write(target / f"{name}.safetensors", tensors)
            _commit(target, {"format": FORMAT, "iteration": iteration, "files": written})
            files.sync(self.directory)
        except OSError as error:
            with contextlib.suppress(OSError):
                _remove(target)
            raise CheckpointError(
                f"{target}: the checkpoint cannot be written ({error.strerror}); make room, or change "
                "--checkpoint-every or --keep-checkpoints"
            ) from error
        self._drop_all_but(iteration)

    def _drop_all_but(self, iteration: int) -> None:
        """Keep only the newest checkpoints up to ``iteration``."""
        complete = [path for path in self._newest_first() if (path / MANIFEST).exists() and int(path.name) <= iteration]
        kept = complete[: self._keep]
        try:
            for path in self._newest_first():
                if path not in kept:
                    _remove(path)
        except OSError as error:
            raise NotRemovedError(
                f"{error.filename}: an old checkpoint cannot be removed ({error.strerror})"
            ) from error

    def clean(self) -> None:
        """Remove incomplete checkpoints that a killed process has left."""
        for path in self._newest_first():
            if not (path / MANIFEST).exists():
                with contextlib.suppress(OSError):  # if it matters, the next save reports it
                    _remove(path)

    # --- reading ------------------------------------------------------------------------------------

    def load(self, at: int | None = None) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None; one line is logged about each newer, damaged one.

        Args:
            at: the iteration to load; None: any.
        """
        paths = [path for path in self._newest_first() if at is None or int(path.name) == at]
        for number, path in enumerate(paths, 1):
            try:
                return _read(path)
            except DamagedError as damage:
                then = "trying the checkpoint before it" if number < len(paths) else "no older checkpoint exists"
                log.warning("%s; %s", damage, then)
        return None

    def find(self) -> int | None:
        """Return the iteration of the checkpoint that :meth:`load` would return, without logging."""
        for path in self._newest_first():
            with contextlib.suppress(DamagedError):
                _verify(path)
                return int(path.name)
        return None

    def fault(self) -> str:
        """Return what is wrong with the newest checkpoint that :meth:`load` would not return; empty: none is."""
        for path in self._newest_first():
            try:
                _verify(path)
            except DamagedError as damage:
                return str(damage)
        return ""

    def find_complete(self, log_damaged: bool = False) -> set[int]:
        """Return the iterations of all complete checkpoints.

        Args:
            log_damaged: whether to log one line about each damaged one.
        """
        found = set()
        for path in self._newest_first():
            try:
                _verify(path)
                found.add(int(path.name))
            except DamagedError as damage:
                if log_damaged:
                    log.warning("%s; this checkpoint is not used", damage)
        return found

    def oldest(self) -> int | None:
        """Return the iteration of the oldest checkpoint that was completed, even if it was damaged since."""
        return min((int(path.name) for path in self._newest_first() if (path / MANIFEST).exists()), default=None)

    def _newest_first(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.iterdir() if re.fullmatch(r"\d{8,}", path.name) and path.is_dir()]
        return sorted(found, key=lambda path: int(path.name), reverse=True)


def _commit(target: Path, manifest: dict[str, Any]) -> None:
    """Turn the contents of ``target`` into a valid checkpoint."""
    text = json.dumps({**manifest, files.HASH: _digest(manifest)}, indent=1).encode()
    unfinished = target / f"{MANIFEST}.tmp"
    files.write(unfinished, [text])
    unfinished.rename(target / MANIFEST)
    files.sync(target)


def _digest(manifest: dict[str, Any]) -> str:
    """Return the hash of a manifest without its own hash field."""
    return xxhash.xxh3_128(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _remove(path: Path) -> None:
    """Remove a checkpoint, its manifest first, so that a partial removal leaves no valid checkpoint."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def _read(path: Path) -> Checkpoint:
    parts, listed = {}, _verify(path)
    for name in (file.removesuffix(".json") for file in listed if file.endswith(".json")):
        tensors = f"{name}.safetensors"
        try:
            state = json.loads((path / f"{name}.json").read_bytes())
            parts[name] = Part(load_file(path / tensors) if tensors in listed else {}, state)
        except (OSError, *MALFORMED, SafetensorError) as error:  # unchanged since it was written, but not by this store
            raise DamagedError(f"{path}: its part '{name}' cannot be read ({error})") from error
    return Checkpoint(path, int(path.name), parts)


def _verify(path: Path) -> list[str]:
    """Check that the checkpoint at ``path`` is complete.

    Returns:
        The names of its files.

    Raises:
        DamagedError: it is not; the message names the file.
    """
    listed = _files_listed(path)
    for name, expected in listed.items():
        file = path / name
        try:
            found = files.measure(file)
        except FileNotFoundError:
            raise DamagedError(f"{file}: is missing") from None
        except OSError as error:
            raise DamagedError(f"{file}: cannot be read ({error.strerror})") from error
        if found["bytes"] != expected["bytes"]:
            raise DamagedError(f"{file}: has {found['bytes']} bytes, not the {expected['bytes']} that were written")
        if found != expected:
            raise DamagedError(f"{file}: its hash is {found['xxh3_128']}, not {expected['xxh3_128']}: it was altered")
    return list(listed)


def _files_listed(path: Path) -> _Listed:
    """Return what the manifest at ``path`` says of each file."""
    file = path / MANIFEST
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise DamagedError(f"{file}: is missing: the checkpoint is incomplete") from None
    except OSError as error:
        raise DamagedError(f"{file}: cannot be read ({error.strerror})") from error
    except MALFORMED:
        raise DamagedError(f"{file}: is not JSON: it was altered or truncated") from None
    try:
        matches = found.pop(files.HASH, None) == _digest(found)
    except MALFORMED:  # not an object, or nested as deeply as can only just be read
        matches = False
    if not matches:
        raise DamagedError(f"{file}: does not match its own hash: it was altered")
    if found.get("format") != FORMAT:
        reads = f"this gossipx reads format {FORMAT}: resume with the version that wrote it"
        raise DamagedError(f"{file}: has format {found.get('format')}, but {reads}")
    if found.get("iteration") != int(path.name):
        raise DamagedError(f"{file}: is of iteration {found.get('iteration')}: it was moved here")
    try:
        return msgspec.convert(found.get("files"), _Listed)
    except msgspec.ValidationError:
        raise DamagedError(f"{file}: does not list files with their sizes and hashes") from None
