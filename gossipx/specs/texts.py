"""Files that somebody names. Those that are read have bounds: a device, a pipe or a file without an end is refused at
once."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from gossipx.errors import UsageError

MOST = 2**22
"""Bytes of a file: a hosts file of 65,536 lines has half as many."""


def found(path: Path) -> Literal["file", "folder", ""]:
    """Return what is at a path, which may be anything; empty: nothing can be read there."""
    try:
        return "folder" if path.is_dir() else "file" if path.exists() else ""
    except (OSError, ValueError):  # too long for a name, or with a zero byte
        return ""


def read(path: Path, what: str, most: int = MOST, missing: str = "") -> str:
    """Return the text of a file.

    Args:
        what: it is, for messages.
        most: bytes that it may have.
        missing: what to say if it is not found.

    Raises:
        UsageError: it cannot be read, is no regular file, is too large, or is not UTF-8.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for the writer of a pipe
        with os.fdopen(descriptor, "rb") as file:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            content = file.read(most + 1) if regular else b""
        text = content.decode("utf-8-sig")  # Windows editors write a byte order mark
    except FileNotFoundError as error:
        raise UsageError(missing or f"cannot read the {what}: {error.strerror}", path) from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a zero byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else reason
        raise UsageError(f"cannot read the {what}: {reason}", path) from error
    if not regular or len(content) > most:
        reason = f"more than {most >> 10} KiB" if regular else "not a regular file"
        raise UsageError(f"cannot read the {what}: {reason}", path)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_target(option: str, path: Path, suffixes: Sequence[str] = ()) -> None:
    """Check that a file can be written to ``path``, before any work is done.

    Args:
        option: the option that names it, for messages.
        suffixes: with one of which its name must end; none: with anything.

    Raises:
        UsageError: it has another suffix, is a directory, or is in a directory that does not exist.
    """
    if suffixes and path.suffix.lower() not in suffixes:
        raise UsageError(f"{option} must name a file that ends with {' or '.join(suffixes)}", path)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{option} must name a file in an existing directory", path)
