"""Folders for runs of two or three peers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runs import Folder, folder


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Folder]:
    """A folder for two peers."""
    with folder(tmp_path, 2) as made:
        yield made


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Folder]:
    """A folder for three peers."""
    with folder(tmp_path, 3) as made:
        yield made
