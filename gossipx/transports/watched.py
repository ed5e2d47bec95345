"""Files that may be replaced during a run, such as secrets and certificates."""

from __future__ import annotations

from pathlib import Path


class WatchedFiles:
    """Tells whether files have changed, at the cost of one system call per file.

    Args:
        files: read by the caller after this object was made, so that no change is missed.
    """

    def __init__(self, *files: Path):
        self._files = files
        self._seen = self._look()

    def have_changed(self) -> bool:
        """Return whether a file was written, replaced or removed since the last call."""
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> list[tuple[int, ...] | None]:
        return [_state(file) for file in self._files]


def _state(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
