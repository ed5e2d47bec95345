"""Answers of peers to ``gossipx status``, which are another process's word."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from gossipx.cli import main
from gossipx.launch.hosts import peers_digest, read_hosts
from gossipx.peer.status import status
from gossipx.tools import query

FIGURES = {"waiting": False, "loss": 0.5, "accuracy": None, "bytes_received": 1, "seconds": 2.0, "blocked_seconds": 0.0}


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, healthy: dict[str, Any]) -> Any:
    """Return a function that shows the status of a run whose only peer answers with some other fields."""
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("127.0.0.1\n")
    peers = read_hosts(hosts)
    facts = {"role": "run", "peers": peers_digest(peers), "size": 1, "name": peers[0].name}

    def show(fields: dict[str, Any], *options: str) -> Any:
        @contextlib.contextmanager
        def probing(*given: Any) -> Iterator[Any]:
            yield SimpleNamespace(facts=facts, report=lambda part: {**healthy, **fields})

        monkeypatch.setattr(query, "connect_to_line", lambda prober, to: None)
        monkeypatch.setattr(query, "probing", probing)
        return CliRunner().invoke(main, ["status", "--peers", str(hosts), *options])

    return show


@pytest.fixture
def healthy() -> dict[str, Any]:
    from toy import world

    made = world(2)
    made.run(5.5)
    return {**status(made.peers[0].role, made.now), **FIGURES}


WRONG: list[dict[str, Any]] = [
    {"stage": 5},
    {"loss": "low"},
    {"seconds": "1", "blocked_seconds": None},
    {"lost": 7},
    {"lost": [[]]},
    {"last_exchange": [1], "last_exchange_seconds": "x"},
    {"joined": 7},
]


@pytest.mark.fault(80, 81)
@pytest.mark.parametrize("fields", WRONG, ids=str)
@pytest.mark.parametrize("options", [(), ("--json",)], ids=["table", "json"])
def test_a_status_of_another_form_is_told_in_its_line(shown: Any, fields: dict[str, Any], options: Any) -> None:
    found = shown(fields, *options)
    assert isinstance(found.exception, SystemExit) and found.exit_code == 1
    assert "its status cannot be read" in found.output


@pytest.mark.fault(80)
def test_a_newcomer_that_no_peer_can_be_is_not_asked(shown: Any) -> None:
    found = shown({"joined": ["7 99999999 127.0.0.1 x", "8 29400 -oX=y y", "9 x", f"{'9' * 5000} 1 a b"]})
    assert found.exit_code == 0 and "train" in found.output and "99999999" not in found.output
