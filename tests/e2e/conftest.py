"""Folders for runs of two or three peers, and runs of one peer in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forks.client import commands
from ports import places
from served_loops import Join
from torch import nn

import gossipx
from gossipx.runtime.training.peer import Peer
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


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Folder]:
    """A folder for four peers."""
    with folder(tmp_path, 4) as made:
        yield made


@pytest.fixture
def forked_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hosts of emulated networks fork Python's processes, and start no new interpreters."""
    monkeypatch.setenv("FORKED_PYTHON", str(commands() / "python"))


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    """Join a run whose single peer is its own server."""
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(f"{places(1)[0]}\n")
    with contextlib.ExitStack() as undo:

        def joined(model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> Peer:
            given = {"mode": "server", "servers": "0", "peer_timeout": 20.0, "logdir": str(tmp_path), **settings}
            peer = gossipx.join(model, optimizer, peers=hosts, rank=0, **given)
            undo.callback(peer.close)
            return peer

        yield joined
