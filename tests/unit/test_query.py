"""Answers to ``gossipx status`` and ``gossipx doctor``: the word of another process, or of a port of something else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from certificates import Authority, Identity
from click.testing import CliRunner

from gossipx.cli import main
from gossipx.errors import GossipxError
from gossipx.launch.hosts import PeerLine, peers_digest, read_hosts
from gossipx.peer.status import status
from gossipx.settings.sections import ExchangeSettings
from gossipx.tools import query
from gossipx.tools.doctor.probe import ProbeSettings, try_line
from gossipx.transports import Address, Listener, tcp
from gossipx.transports.access import grant
from gossipx.transports.link import Links
from gossipx.wire import Hello

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


# --- a port that answers, but not to them -----------------------------------------------------------


Asking = Callable[[Authority, Path], Identity | None]


def no_certificate(_: Authority, __: Path) -> None:
    return None


def same_authority(authority: Authority, _: Path) -> Identity:
    return authority.issue()


def other_authority(_: Authority, folder: Path) -> Identity:
    return Authority(folder / "other").issue()


@contextlib.contextmanager
def listening(listen: Callable[[Address], Listener]) -> Iterator[int]:
    """Yield the port of a listener that closes each connection once it has read from it."""
    listener = listen(Address("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(GossipxError):
            while True:
                stream = listener.accept()
                with contextlib.suppress(GossipxError):
                    stream.receive_into(memoryview(bytearray(1)), 10**9)
                stream.abort()

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        yield listener.address.port
    finally:
        listener.close()
        serving.join()


@pytest.mark.parametrize(
    ("has_tls", "days", "asking", "state", "told", "authorised"),
    [
        (False, 30, same_authority, "closed", "closes the connection: it may need", True),
        (True, 30, no_certificate, "closed", "closes the connection: it may need", True),
        (True, 30, other_authority, "authorised", "was not signed by a CA in --tls-ca", False),
        (True, -1, same_authority, "authorised", "has expired", False),
    ],
    ids=["no TLS there", "no TLS here", "other CA", "expired there"],
)
def test_a_port_that_answers_is_not_taken_for_an_ended_peer(
    tmp_path: Path, has_tls: bool, days: int, asking: Asking, state: str, told: str, authorised: bool
) -> None:
    authority = Authority(tmp_path / "own")
    identity = asking(authority, tmp_path)
    given = ExchangeSettings()
    if identity is not None:
        tls = {"tls_cert": identity.certificate, "tls_key": identity.key, "tls_ca": identity.authority}
        given = ExchangeSettings(**{name: str(file) for name, file in tls.items()})
    with listening(authority.issue(days=days).transport().listen if has_tls else tcp.listen) as port:
        peer = PeerLine(0, "127.0.0.1", port, None, f"127.0.0.1:{port}", 1)
        me, links = Hello(1, "other", 2, "digest", ""), Links("doctor", 0, 10.0)
        probes = ProbeSettings(me=me, peers=[peer], access=grant(given, "127.0.0.1"), links=links)
        found = try_line(probes, peer)
        links.abort()
        (seen,) = query.query([peer], given, "status", [peer])
    assert found.state == state, found
    assert told in seen.why and seen.authorised is authorised, seen
