"""Checkpoints on disk: named parts of tensors and plain data, each checkpoint complete or absent; and journals.

A checkpoint of one peer is a directory, named by its iteration, below the peer's ``checkpoints``. Each part is up to
two files: ``NAME.safetensors`` with its tensors, if it has any, and ``NAME.json`` with the rest. The caller chooses the
parts: a peer has ``model``, ``optimizer``, ``random`` and ``peer``, and other modules add their own. Nested state, such
as an optimizer's, is split into named tensors and plain data that JSON represents exactly. Floats are written with
enough digits to restore the same bits; NaN and the infinities as Python's json writes them, ``NaN`` and ``Infinity``.
What JSON does not have is an object with the reserved key ``$``. Loading never unpickles anything.

``manifest.json`` is written last, with the size and hash of every file; a directory without a matching manifest is not
a checkpoint. A checkpoint becomes valid by one rename of its manifest, after all its files are on the disk. So a killed
process, a full disk or a power failure at any time leaves earlier checkpoints intact, and at most one directory without
a manifest, which the next save removes.

A *journal* is an append-only file of the records since a checkpoint, each record complete or absent. Records survive
the end of the process, but not of the machine, because writes are not flushed to the disk. A record is two lengths, its
words (a short description), its content, and a hash.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gossipx.errors import MALFORMED, GossipxError, UsageError
from gossipx.memory import PIECE
from gossipx.model.safetensors_file import DTYPES, StoredFile, safetensors_of, write_durably

# --- nested state as a part -----------------------------------------------------------------------------------------

TAG = "$"
"""Key of an object that represents a tensor, a tuple, or a dict with keys other than text."""
SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class CheckpointPart:
    """One named part of a checkpoint.

    Attributes:
        tensors: tensors by name, in host memory; they must not change until they are written.
        state: JSON data: None, booleans, numbers, text, and lists and dicts (with text keys) of these.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    state: Any = None


def pack(tree: object, called: str = "state") -> CheckpointPart:
    """Copy nested state into a part; later changes by the caller do not affect it.

    Args:
        tree: dense tensors, numbers, text, None, numpy scalars, and lists, tuples and dicts of these to any depth.
        called: name of the state in messages.

    Raises:
        UsageError: it contains something else; the message says where.
    """
    tensors: dict[str, Tensor] = {}
    return CheckpointPart(tensors, _packed(tree, (called,), tensors))


def unpack(part: CheckpointPart) -> Any:
    """Return the state given to :func:`pack`.

    Tensors are in host memory, mappings have become dicts, and numpy scalars have become Python numbers.
    """
    return _unpacked(part.state, part.tensors)


def _packed(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in SCALARS:
        return value
    if isinstance(value, Tensor):
        return _packed_tensor(value, path, tensors)
    if isinstance(value, list):
        return [_packed(item, (*path, str(index)), tensors) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {TAG: "tuple", "of": _packed(list(value), path, tensors)}
    if isinstance(value, Mapping):
        if all(type(key) is str and key != TAG for key in value):
            return {key: _packed(item, (*path, key), tensors) for key, item in value.items()}
        for key in value:
            if type(key) not in SCALARS:
                raise UsageError(f"{'.'.join(path)} has a key of type {type(key).__name__}: keys are text or numbers")
        return {TAG: "dict", "of": [[key, _packed(item, (*path, str(key)), tensors)] for key, item in value.items()]}
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise UsageError(
        f"{'.'.join(path)} is of type {kind}: a checkpoint keeps tensors, numbers, text, None, lists, tuples and dicts"
    )


def _packed_tensor(tensor: Tensor, path: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Any]:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPES:
        found = f"a tensor of layout {tensor.layout}, dtype {tensor.dtype} on {tensor.device}"
        raise UsageError(f"{'.'.join(path)} is {found}: a checkpoint keeps dense tensors of the usual dtypes")
    whole: object = tensor
    if is_traceable_wrapper_subclass(whole):  # made of other tensors
        raise UsageError(
            f"{'.'.join(path)} is a {type(tensor).__name__}: a checkpoint keeps plain tensors; leave out"
            " --checkpoint-every, or use an optimizer with plain tensors in its state"
        )
    copied = copy_of(tensor)
    name = ".".join(path[1:]) or "tensor"
    while name in tensors or name == "__metadata__":  # a reserved name of the format
        name += "_"
    tensors[name] = copied
    # safetensors keeps no strides; unpack restores the layout in memory.
    strides = {} if copied.is_contiguous() else {"strides": list(copied.stride())}
    return {TAG: "tensor", "name": name, **strides}


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy in host memory; it has the same strides if the elements neither overlap nor leave gaps."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.preserve_format).resolve_conj()


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(TAG):
        case None:
            return {key: _unpacked(item, tensors) for key, item in value.items()}
        case "tuple":
            return tuple(_unpacked(value["of"], tensors))
        case "dict":
            return {key: _unpacked(item, tensors) for key, item in value["of"]}
        case _:
            tensor = tensors[value["name"]]
            if "strides" not in value:
                return tensor
            owned = torch.empty_like(tensor.view(-1))  # no larger, whatever the strides say
            return owned.as_strided(tensor.shape, value["strides"]).copy_(tensor)


# --- files ----------------------------------------------------------------------------------------------------------

HASH = "xxh3_128"
"""A fast hash that detects damage by disks and copies; it does not protect against deliberate changes."""


def measured(path: Path) -> StoredFile:
    """Return the size and hash of an existing file.

    Raises:
        OSError: the file is missing or cannot be read.
    """
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            size += len(piece)
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def sync_directory(directory: Path) -> None:
    """Wait until new, renamed and removed entries of ``directory`` are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain_json(state: Any) -> bytes:
    """Encode plain data as JSON.

    Raises:
        TypeError: JSON cannot represent it.
    """
    return json.dumps(state).encode()


_STATE_LENGTH = 8
"""Bytes of the leading length of the plain data, which follows; the tensors come last."""


def to_bytes(tree: object) -> bytes:
    """Encode nested state; errors as those of :func:`~gossipx.checkpoint.pack`."""
    part = pack(tree)
    state = plain_json(part.state)
    return b"".join([len(state).to_bytes(_STATE_LENGTH, "little"), state, *safetensors_of(part.tensors)])


def from_bytes(packed: memoryview) -> Any:
    """Decode the output of :func:`to_bytes`, with tensors in host memory.

    Raises:
        ValueError: the bytes are not such output.
    """
    end = _STATE_LENGTH + int.from_bytes(packed[:_STATE_LENGTH], "little")
    try:
        return unpack(CheckpointPart(load(bytes(packed[end:])), json.loads(bytes(packed[_STATE_LENGTH:end]))))
    except (SafetensorError, *MALFORMED) as error:
        raise ValueError(f"it cannot be read: {error}") from error


# --- the store ------------------------------------------------------------------------------------------------------

log = logging.getLogger("gossipx")

FORMAT = 2
"""Format version; increased when older readers could not read what is written."""
MANIFEST = "manifest.json"
KEEP = 2
"""Checkpoints kept: if the newest is damaged, there is an older one."""
PART = re.compile(r"[\w-][\w.-]*", re.ASCII)
"""Valid names of parts, which become file names."""
_Listed: TypeAlias = dict[Annotated[str, msgspec.Meta(pattern=rf"(?a)\A{PART.pattern}\Z")], StoredFile]


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
    parts: dict[str, CheckpointPart]


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

    def save(self, iteration: int, parts: Mapping[str, CheckpointPart]) -> None:
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
                written[f"{name}.json"] = write_durably(target / f"{name}.json", [plain_json(part.state)])
                if part.tensors:
                    tensors = safetensors_of(part.tensors)
                    written[f"{name}.safetensors"] = write_durably(target / f"{name}.safetensors", tensors)
            _commit(target, {"format": FORMAT, "iteration": iteration, "files": written})
            sync_directory(self.directory)
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
        return next((iteration for iteration, damage in self._verified() if damage is None), None)

    def fault(self) -> str:
        """Return what is wrong with the newest checkpoint that :meth:`load` would not return; empty: none is."""
        return next((str(damage) for _, damage in self._verified() if damage is not None), "")

    def find_complete(self, log_damaged: bool = False) -> set[int]:
        """Return the iterations of all complete checkpoints.

        Args:
            log_damaged: whether to log one line about each damaged one.
        """
        verified = list(self._verified())
        for _, damage in verified:
            if damage is not None and log_damaged:
                log.warning("%s; this checkpoint is not used", damage)
        return {iteration for iteration, damage in verified if damage is None}

    def _verified(self) -> Iterator[tuple[int, DamagedError | None]]:
        """Yield the iteration of each checkpoint, newest first, and what is wrong with it."""
        for path in self._newest_first():
            try:
                _verify(path)
                yield int(path.name), None
            except DamagedError as damage:
                yield int(path.name), damage

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
    text = json.dumps({**manifest, HASH: _digest(manifest)}, indent=1).encode()
    unfinished = target / f"{MANIFEST}.tmp"
    write_durably(unfinished, [text])
    unfinished.rename(target / MANIFEST)
    sync_directory(target)


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
            parts[name] = CheckpointPart(load_file(path / tensors) if tensors in listed else {}, state)
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
            found = measured(file)
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
        matches = found.pop(HASH, None) == _digest(found)
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


# --- journals -------------------------------------------------------------------------------------------------------

_RECORD_LENGTHS = 4, 8
"""Bytes of the two length fields at the start of a record: of its words, and of its content."""
_JOURNAL_NAME = re.compile(r"journal-(\d{8,})")


class JournalFile:
    """A journal open for writing; for one thread at a time.

    Args:
        path: the file.
        append: keep existing records; otherwise start with an empty file.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, append: bool = False):
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = sum(size for *_, size in _entries(path)) if append and path.exists() else 0
        self._file = path.open("ab", buffering=0)
        self._file.truncate(whole)  # records behind an incomplete one could not be read

    def append(self, words: bytes, content: memoryview) -> None:
        """Append a record.

        Raises:
            OSError: it cannot be written completely.
        """
        digest = xxhash.xxh3_64(words)
        digest.update(content)
        lengths = b"".join(
            len(part).to_bytes(size, "little") for part, size in zip((words, content), _RECORD_LENGTHS, strict=True)
        )
        for part in (lengths + words, content, digest.digest()):
            view = memoryview(part).cast("B") if len(part) else memoryview(b"")
            while view:  # one write accepts at most 2 GB
                view = view[self._file.write(view) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def journal_path(directory: Path, clock: int) -> Path:
    """Return the path of the journal that follows the checkpoint of ``clock``."""
    return directory / f"journal-{clock:08d}"


def records_of(
    directory: Path, clock: int, report: Callable[[str], None] = lambda line: None
) -> Iterator[tuple[int, bytes, memoryview]]:
    """Yield all records since the checkpoint of ``clock``, in order, each with the clock of its journal.

    Args:
        directory: where the journals are.
        clock: of the checkpoint.
        report: called with a line about each journal that ends with bytes that are no complete record: a damaged one
            hides all that follow.
    """
    for begun, path in _journals(directory):
        if begun >= clock:
            whole = 0
            for words, content, size in _entries(path):
                whole += size
                yield begun, words, content
            if rest := path.stat().st_size - whole:
                report(f"{path}: the last {rest} bytes, from byte {whole}, are damaged or not complete")


def drop_journals(directory: Path, before: int = 0, after: int | None = None) -> None:
    """Remove journals that no checkpoint needs: of checkpoints before one clock, or after another.

    Raises:
        OSError: a journal cannot be removed.
    """
    for begun, path in _journals(directory):
        if begun < before or (after is not None and begun > after):
            path.unlink()


def journal_clocks(directory: Path) -> list[int]:
    """Return the clocks of the checkpoints that have a journal."""
    return [clock for clock, _ in _journals(directory)]


def _journals(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    named = ((_JOURNAL_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(found[1]), path) for found, path in named if found)


def _entries(path: Path) -> Iterator[tuple[bytes, memoryview, int]]:
    """Yield each complete record and its size in bytes; stop at an incomplete or altered one."""
    with path.open("rb") as file:
        while True:
            head = file.read(sum(_RECORD_LENGTHS))
            words, content = (
                int.from_bytes(part, "little") for part in (head[: _RECORD_LENGTHS[0]], head[_RECORD_LENGTHS[0] :])
            )
            body = file.read(words + content) if words + content <= path.stat().st_size else b""
            end = file.read(8)
            if len(head) < sum(_RECORD_LENGTHS) or len(body) < words + content or end != xxhash.xxh3_64(body).digest():
                return
            yield body[:words], memoryview(bytearray(body[words:])), len(head) + len(body) + len(end)
