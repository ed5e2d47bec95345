"""Journals: what has happened since a checkpoint, each entry whole or not there.

What was appended outlives the process, however that ends, but not the machine: nothing waits for the disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import xxhash

LENGTHS = 4, 8
"""Bytes of the numbers that an entry begins with: of its words, and of its content. Its hash comes last, 8 bytes."""
NAME = re.compile(r"journal-(\d{8,})")


class Journal:
    """One journal that is being written; for one thread at a time.

    Args:
        path: of its file.
        goes_on: what is there stays; else it begins anew.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, goes_on: bool = False):
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = sum(size for *_, size in _entries(path)) if goes_on and path.exists() else 0
        self._file = path.open("ab", buffering=0)
        self._file.truncate(whole)  # an entry that was cut short would hide what comes after it

    def append(self, words: bytes, content: memoryview) -> None:
        """Add an entry.

        Raises:
            OSError: it cannot be written whole.
        """
        digest = xxhash.xxh3_64(words)
        digest.update(content)
        lengths = b"".join(
            len(part).to_bytes(size, "little") for part, size in zip((words, content), LENGTHS, strict=True)
        )
        for part in (lengths + words, content, digest.digest()):
            view = memoryview(part).cast("B") if len(part) else memoryview(b"")
            while view:  # one write takes 2 GB at most
                view = view[self._file.write(view) :]

    def close(self) -> None:
        """Write no more."""
        self._file.close()


def path_of(directory: Path, clock: int) -> Path:
    """Where the journal of what follows the checkpoint of ``clock`` is."""
    return directory / f"journal-{clock:08d}"


def read(directory: Path, clock: int) -> Iterator[tuple[int, bytes, memoryview]]:
    """All entries since the checkpoint of ``clock``, in order, each with the clock of the journal that it is from."""
    for begun, path in _journals(directory):
        if begun >= clock:
            for words, content, _ in _entries(path):
                yield begun, words, content


def drop(directory: Path, before: int = 0, after: int | None = None) -> None:
    """Remove journals that no checkpoint needs: those of checkpoints before one clock, or after another.

    Raises:
        OSError: one cannot be removed.
    """
    for begun, path in _journals(directory):
        if begun < before or (after is not None and begun > after):
            path.unlink()


def clocks(directory: Path) -> list[int]:
    """Those of the checkpoints that journals follow."""
    return [clock for clock, _ in _journals(directory)]


def _journals(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    named = ((NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(found[1]), path) for found, path in named if found)


def _entries(path: Path) -> Iterator[tuple[bytes, memoryview, int]]:
    """Each whole entry, and how many bytes it takes; it ends where one is cut short or altered."""
    with path.open("rb") as file:
        while True:
            head = file.read(sum(LENGTHS))
            words, content = (int.from_bytes(part, "little") for part in (head[: LENGTHS[0]], head[LENGTHS[0] :]))
            body = file.read(words + content) if words + content <= path.stat().st_size else b""
            end = file.read(8)
            if len(head) < sum(LENGTHS) or len(body) < words + content or end != xxhash.xxh3_64(body).digest():
                return
            yield body[:words], memoryview(bytearray(body[words:])), len(head) + len(body) + len(end)
