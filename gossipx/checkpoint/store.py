"""One peer's checkpoints: the newest ones, each whole or none.

A checkpoint's manifest comes into being by one rename, after all its files are on the disk. So a process that is
killed, a disk that is full or a machine that loses power at any time leaves the checkpoints of before as they are, and
beside them at most a directory without a manifest, which is removed as the next checkpoint is saved.
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
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file

from gossipx.checkpoint import files
from gossipx.checkpoint.plain import Part
from gossipx.errors import GossipxError

log = logging.getLogger("gossipx")

FORMAT = 1
"""Raised when a reader of today could not make sense of what is written."""
MANIFEST = "manifest.json"
KEEP = 2
"""Checkpoints that are kept: where the newest turns out to be damaged there is one before it."""
PART = re.compile(r"[\w-][\w.-]*", re.ASCII)
"""Names of parts, which are names of files."""


class CheckpointError(GossipxError):
    """A checkpoint could not be written; those of before are as they were."""


class DamagedError(GossipxError):
    """A directory holds no whole checkpoint; says which file is wrong, and how."""


@dataclass(frozen=True)
class Checkpoint:
    """What was read.

    Attributes:
        path: its directory.
        iteration: at which it was taken.
        parts: by name.
    """

    path: Path
    iteration: int
    parts: dict[str, Part]


class Store:
    """The checkpoints in one directory; for one thread at a time.

    Args:
        directory: theirs alone; made with the first.
        keep: how many are kept, from 1.
    """

    def __init__(self, directory: Path, keep: int = KEEP):
        self.directory = directory
        self._keep = keep

    # --- writing ------------------------------------------------------------------------------------

    def save(self, iteration: int, parts: Mapping[str, Part]) -> None:
        """Write a checkpoint, and then remove what it makes superfluous: the oldest, and what was cut short.

        One that is there at this iteration or a later one is of a training that has been gone back from: it goes, too.

        Args:
            iteration: from 0.
            parts: by name: letters, digits and . - _.

        Raises:
            CheckpointError: it cannot be written, for lack of room, say; nothing of it is left.
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
                    raise CheckpointError(f"'{name}' names no part of a checkpoint: letters, digits and . - _")
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
                f"{target}: the checkpoint cannot be written ({error.strerror}); make room, or give another "
                "--checkpoint-every or --keep-checkpoints"
            ) from error
        self._drop_all_but(iteration)

    def _drop_all_but(self, iteration: int) -> None:
        """Keep the newest up to ``iteration``."""
        whole = [path for path in self._newest_first() if (path / MANIFEST).exists() and int(path.name) <= iteration]
        kept = whole[: self._keep]
        try:
            for path in self._newest_first():
                if path not in kept:
                    _remove(path)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename}: an old checkpoint cannot be removed ({error.strerror})"
            ) from error

    def clean(self) -> None:
        """Remove what a process that was killed has left half done."""
        for path in self._newest_first():
            if not (path / MANIFEST).exists():
                with contextlib.suppress(OSError):  # the next save says so, if it is in its way
                    _remove(path)

    # --- reading ------------------------------------------------------------------------------------

    def load(self, at: int | None = None) -> Checkpoint | None:
        """The newest that is whole; what is wrong with each newer one is told in one log line. None: there is none.

        Args:
            at: the iteration; None: whatever it is.
        """
        paths = [path for path in self._newest_first() if at is None or int(path.name) == at]
        for number, path in enumerate(paths, 1):
            try:
                return _read(path)
            except DamagedError as damage:
                then = "the checkpoint before it is looked at" if number < len(paths) else "there is none before it"
                log.warning("%s; %s", damage, then)
        return None

    def find(self) -> int | None:
        """The iteration of the newest that is whole, as :meth:`load` would read it, without a word."""
        for path in self._newest_first():
            with contextlib.suppress(DamagedError):
                _verify(path)
                return int(path.name)
        return None

    def whole(self, told: bool = False) -> set[int]:
        """The iterations of all that are whole.

        Args:
            told: what is wrong with each other one is told in one log line; else nothing is said.
        """
        found = set()
        for path in self._newest_first():
            try:
                _verify(path)
                found.add(int(path.name))
            except DamagedError as damage:
                if told:
                    log.warning("%s; this checkpoint is not used", damage)
        return found

    def oldest(self) -> int | None:
        """The iteration of the oldest that was written whole, whatever has become of it."""
        return min((int(path.name) for path in self._newest_first() if (path / MANIFEST).exists()), default=None)

    def _newest_first(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.iterdir() if re.fullmatch(r"\d{8,}", path.name) and path.is_dir()]
        return sorted(found, key=lambda path: int(path.name), reverse=True)


def _commit(target: Path, manifest: dict[str, Any]) -> None:
    """Make what is in ``target`` a checkpoint."""
    text = json.dumps({**manifest, files.HASH: _digest(manifest)}, indent=1).encode()
    unfinished = target / f"{MANIFEST}.tmp"
    files.write(unfinished, [text])
    unfinished.rename(target / MANIFEST)
    files.sync(target)


def _digest(manifest: dict[str, Any]) -> str:
    """The hash of a manifest, which stands in it, too: of all the rest."""
    return xxhash.xxh3_128(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _remove(path: Path) -> None:
    """Remove a checkpoint: the manifest first, so that it is whole or none at any moment."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def _read(path: Path) -> Checkpoint:
    parts, listed = {}, _verify(path)
    for name in (file.removesuffix(".json") for file in listed if file.endswith(".json")):
        tensors = f"{name}.safetensors"
        try:
            state = json.loads((path / f"{name}.json").read_bytes())
            parts[name] = Part(load_file(path / tensors) if tensors in listed else {}, state)
        except (OSError, ValueError, SafetensorError) as error:  # it is as it was written, but is none of ours
            raise DamagedError(f"{path}: its part '{name}' cannot be read ({error})") from error
    return Checkpoint(path, int(path.name), parts)


def _verify(path: Path) -> list[str]:
    """See that the checkpoint at ``path`` is whole.

    Returns:
        The names of its files.

    Raises:
        DamagedError: it is not; names the file.
    """
    listed = _manifest(path)["files"]
    for name, expected in listed.items():
        file = path / name
        try:
            found = files.look(file)
        except FileNotFoundError:
            raise DamagedError(f"{file}: is not there any more") from None
        except OSError as error:
            raise DamagedError(f"{file}: cannot be read ({error.strerror})") from error
        if found["bytes"] != expected["bytes"]:
            raise DamagedError(f"{file}: has {found['bytes']} bytes, not the {expected['bytes']} that were written")
        if found != expected:
            raise DamagedError(f"{file}: its hash is {found[files.HASH]}, not {expected[files.HASH]}: it was altered")
    return list(listed)


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise DamagedError(f"{file}: is not there: the checkpoint was cut short") from None
    except OSError as error:
        raise DamagedError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError:
        raise DamagedError(f"{file}: is not JSON: it was altered or cut short") from None
    if not isinstance(found, dict) or found.pop(files.HASH, None) != _digest(found):
        raise DamagedError(f"{file}: its hash is not that of what it says: it was altered")
    if found.get("format") != FORMAT:
        raise DamagedError(f"{file}: is of format {found.get('format')}, and this gossipx reads format {FORMAT}")
    if found["iteration"] != int(path.name):
        raise DamagedError(f"{file}: is that of iteration {found['iteration']}: it was moved here")
    return found
