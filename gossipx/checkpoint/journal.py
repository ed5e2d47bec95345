"""Journals: append-only files of the records since a checkpoint, each record complete or absent.

Records survive the end of the process, but not of the machine, because writes are not flushed to the disk. A record is
two lengths, its words (a short description), its content, and a hash.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

LENGTHS = 4, 8
"""Bytes of the two length fields at the start of a record: of its words, and of its content."""
NAME = re.compile(r"journal-(\d{8,})")


class Journal:
    """A journal open for writing; for one thread at a time.

    Args:
        path: the file.
        goes_on: keep existing records; otherwise start with an empty file.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, goes_on: bool = False):
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = sum(size for *_, size in _entries(path)) if goes_on and path.exists() else 0
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
            len(part).to_bytes(size, "little") for part, size in zip((words, content), LENGTHS, strict=True)
        )
        for part in (lengths + words, content, digest.digest()):
            view = memoryview(part).cast("B") if len(part) else memoryview(b"")
            while view:  # one write accepts at most 2 GB
                view = view[self._file.write(view) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def path_of(directory: Path, clock: int) -> Path:
    """Return the path of the journal that follows the checkpoint of ``clock``."""
    return directory / f"journal-{clock:08d}"


def read(
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


def drop(directory: Path, before: int = 0, after: int | None = None) -> None:
    """Remove journals that no checkpoint needs: of checkpoints before one clock, or after another.

    Raises:
        OSError: a journal cannot be removed.
    """
    for begun, path in _journals(directory):
        if begun < before or (after is not None and begun > after):
            path.unlink()


def clocks(directory: Path) -> list[int]:
    """Return the clocks of the checkpoints that have a journal."""
    return [clock for clock, _ in _journals(directory)]


def _journals(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    named = ((NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(found[1]), path) for found, path in named if found)


def _entries(path: Path) -> Iterator[tuple[bytes, memoryview, int]]:
    """Yield each complete record and its size in bytes; stop at an incomplete or altered one."""
    with path.open("rb") as file:
        while True:
            head = file.read(sum(LENGTHS))
            words, content = (int.from_bytes(part, "little") for part in (head[: LENGTHS[0]], head[LENGTHS[0] :]))
            body = file.read(words + content) if words + content <= path.stat().st_size else b""
            end = file.read(8)
            if len(head) < sum(LENGTHS) or len(body) < words + content or end != xxhash.xxh3_64(body).digest():
                return
            yield body[:words], memoryview(bytearray(body[words:])), len(head) + len(body) + len(end)
