"""Real file systems with room for 1 MB, which tests fill up and make read-only."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated import namespaces

SIZE = 1 << 20


class SmallDisk:
    """A mounted file system of :data:`SIZE` bytes.

    Attributes:
        path: where it is mounted.
    """

    def __init__(self, path: Path):
        self.path = path

    def fill(self) -> None:
        """Leave no byte free."""
        with contextlib.suppress(OSError), (self.path / "filler").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """Undo :meth:`fill`."""
        (self.path / "filler").unlink()

    def allow_writing(self, allowed: bool) -> None:
        """Make it read-only, or writable again."""
        _mount("-o", f"remount,{'rw' if allowed else 'ro'}", str(self.path))


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[SmallDisk]:
    """Yield a file system that is mounted at ``place``; skip the test where mounting is not permitted."""
    _sweep()
    place.mkdir()
    source = f"{namespaces.unique_prefix()}-disk"
    try:
        _mount("-t", "tmpfs", "-o", f"size={SIZE}", source, str(place))
    except (OSError, namespaces.NetworkUnavailableError) as error:
        pytest.skip(f"this system mounts no small disk for tests: {error}")
    try:
        yield SmallDisk(place)
    finally:
        namespaces.run("umount", "--lazy", str(place))


def keep_old_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each removal of a checkpoint fail as on a read-only disk."""

    def fail(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("gossipx.checkpoint._remove", fail)


def _mount(*arguments: str) -> None:
    namespaces.run("mount", *arguments)


def _sweep() -> None:
    """Unmount what killed tests have left."""
    for line in Path("/proc/mounts").read_text().splitlines() if Path("/proc/mounts").exists() else ():
        source, place, *_ = line.split()
        match = namespaces.NAME.fullmatch(source)
        if match is not None and namespaces.start_time(int(match["pid"])) != int(match["began"]):
            subprocess.run(["umount", "--lazy", place], check=False, timeout=30)
