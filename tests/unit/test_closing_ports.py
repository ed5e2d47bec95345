"""The answers of ``gossipx status`` and ``gossipx doctor`` about a port that answers, but not to them.

It is without TLS, or with certificates of another CA, or its certificate has expired.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from certificates import Authority, Identity

from gossipx.errors import GossipxError
from gossipx.launch.hosts import PeerLine
from gossipx.settings.sections import ExchangeSettings
from gossipx.tools.doctor.probe import ProbeSettings, try_line
from gossipx.tools.query import query
from gossipx.transports import Address, Listener, tcp
from gossipx.transports.access import grant
from gossipx.transports.link import Links
from gossipx.wire import Hello

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
        (seen,) = query([peer], given, "status", [peer])
    assert found.state == state, found
    assert told in seen.why and seen.authorised is authorised, seen
