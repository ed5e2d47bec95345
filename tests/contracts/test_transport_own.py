"""Behaviour of TCP and of TLS beyond the contract of transports.

Numbers in brackets are rows of the project's fault list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import random
import re
import select
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import streamed
from certificates import Authority
from streamed import LONG, SHORT, InThread, read, soon

from gossipx.errors import (
    GossipxError,
    NotAuthorisedError,
    PeerTimeoutError,
    PeerUnreachableError,
    ProtocolError,
    StrangerError,
)
from gossipx.transports import Address, Certified, Stream, Transport, sockets, tcp

tls, in_thread = streamed.tls, streamed.in_thread


# --- TCP ----------------------------------------------------------------------------------------


def test_addresses_read_as_people_write_them() -> None:
    assert str(Address("node1", 7000)) == "node1:7000"
    assert str(Address("fe80::1", 7000)) == "[fe80::1]:7000"


def test_ipv6() -> None:
    try:
        listening = tcp.listen(Address("::1", 0))
    except GossipxError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    assert str(listening.address).startswith("[::1]:")
    ours = tcp.connect(listening.address, soon())
    theirs = listening.accept()
    ours.send([b"six"], soon())
    assert read(theirs, 3) == b"six"
    for each in (ours, theirs):
        each.abort()
    listening.close()


def test_listening_at_an_address_of_another_machine_fails() -> None:
    with pytest.raises(GossipxError, match=r"192\.0\.2\.1:0: this machine does not have that address"):
        tcp.listen(Address("192.0.2.1", 0))


@pytest.mark.fault(7)
def test_a_half_closed_peer_can_still_be_answered() -> None:
    listening = tcp.listen(Address("127.0.0.1", 0))
    with socket.create_connection((listening.address.host, listening.address.port)) as peer:
        stream = listening.accept()
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerUnreachableError, match="closed the connection"):
            read(stream, 1)
        stream.send([b"answer"], soon())
        assert peer.recv(6) == b"answer"
    stream.abort()
    listening.close()


@pytest.mark.fault(7)
@pytest.mark.parametrize("sends_whole", [True, False])
def test_a_peer_that_closes_with_a_full_buffer_ends_the_send(
    sends_whole: bool, in_thread: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its window stays closed: without a look at the stream's end the sender would wait for the whole deadline."""
    listening = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(listening.getsockname())
    ours = listening.accept()[0]
    while select.select([], [ours], [], SHORT)[1]:  # until both buffers are full
        ours.send(bytes(2**20), socket.MSG_DONTWAIT)
    monkeypatch.setattr(sockets, "_STALLED", SHORT)
    stream = sockets.SocketStream(ours, "peer 1", sends_whole)
    sending = in_thread(lambda: stream.send([bytes(2**24)], soon()))
    peer.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerUnreachableError, match="peer 1 closed the connection"):
        sending.result()
    stream.abort()
    peer.close()
    listening.close()


def test_a_reset_connection_is_unreachable() -> None:
    listening = tcp.listen(Address("127.0.0.1", 0))
    peer = socket.create_connection((listening.address.host, listening.address.port))
    stream = listening.accept()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    peer.close()
    with pytest.raises(PeerUnreachableError, match="lost the connection"):
        read(stream, 1)
    stream.abort()
    listening.close()


@pytest.mark.fault(35)
def test_a_name_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, *rest: object, **named: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(PeerUnreachableError, match="cannot resolve node9:7000"):
        tcp.connect(Address("node9", 7000), soon())


@pytest.mark.parametrize("host", ["h" * 64, "two..dots", "\ud800"])
def test_a_name_that_no_resolver_can_be_asked_for(host: str) -> None:
    """It was a traceback at each attempt, as the errors are no OSError."""
    with pytest.raises(PeerUnreachableError, match="not a host name"):
        tcp.connect(Address(host, 7000), soon())
    with pytest.raises(GossipxError, match=r"cannot listen at .*not a host name"):
        tcp.listen(Address(host, 0))


def test_a_hanging_name_resolution_keeps_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hang(*given: object, flags: int = 0, **named: object) -> None:
        if not flags:
            over.wait(LONG)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with pytest.raises(PeerTimeoutError, match="node9:7000"):
        tcp.connect(Address("node9", 7000), soon(SHORT))
    over.set()


def test_a_listener_that_never_accepts_keeps_the_deadline() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        place = Address(*listening.getsockname())
        waiting = [socket.socket() for _ in range(4)]  # more than its accept queue holds
        for each in waiting:
            each.setblocking(False)
            assert each.connect_ex((place.host, place.port)) in (0, errno.EINPROGRESS)
        with pytest.raises(PeerTimeoutError, match=str(place)):
            tcp.connect(place, soon(SHORT))
        for each in waiting:
            each.close()


def test_a_socket_connected_to_itself_is_refused() -> None:
    with socket.socket() as alone:
        alone.bind(("127.0.0.1", 0))
        place = alone.getsockname()
        with pytest.raises(ConnectionRefusedError):
            tcp._connect(alone, place, Address(*place), soon())


# --- TLS ----------------------------------------------------------------------------------------


def meeting(
    server: Transport, client: Transport, in_thread: InThread, by: str = "127.0.0.1"
) -> tuple[Stream | str, Stream | str]:
    """Return each side's stream after one byte both ways, or its error; ``by``: host that clients connect to."""
    listening = server.listen(Address("127.0.0.1", 0))
    streams: list[Stream] = []

    def talk(make: Callable[[], Stream]) -> Stream | str:
        try:
            streams.append(stream := make())
            stream.send([b"."], soon())
            read(stream, 1)
        except (NotAuthorisedError, StrangerError) as error:
            for each in streams:
                each.abort()
            assert error.exit_code == 5
            assert "\n" not in str(error)
            return str(error)
        return stream

    connecting = in_thread(talk, lambda: client.connect(Address(by, listening.address.port), soon()))
    accepted = talk(listening.accept)
    connected = connecting.result(LONG)
    listening.close()
    for each in streams:
        each.abort()
    return accepted, connected


BAD = {
    "expired": ("certificate of 127.0.0.1:.* has expired", "says that the certificate of this peer has expired"),
    "not valid yet": (
        "certificate of 127.0.0.1:.* is not valid yet",
        "says that the certificate of this peer is not valid yet",
    ),
    "foreign": (
        "was not signed by a CA in --tls-ca",
        "(does not know the CA that signed|refuses) the certificate of this peer",
    ),
    "for another use": (
        "is not for this use: it needs both",
        "refuses the certificate of this peer: it needs serverAuth and clientAuth",
    ),
}
"""Faults of a certificate: what the peer that refuses it says, and what its owner says."""


@pytest.mark.fault(20, 63)
@pytest.mark.parametrize("whose", ["client", "server"])
@pytest.mark.parametrize("name", ["a foreign CA", "tests' CA"])
@pytest.mark.parametrize("what", BAD)
def test_a_bad_certificate_is_refused_and_both_say_why(
    what: str, name: str, whose: str, tmp_path: Path, in_thread: InThread
) -> None:
    authority, foreign = Authority(tmp_path / "own"), Authority(tmp_path / "foreign", name)
    good = authority.issue()
    bad = {
        "expired": lambda: authority.issue(days=-1),
        "not valid yet": lambda: authority.issue(begins=1),
        "foreign": lambda: dataclasses.replace(foreign.issue(), authority=authority.file),
        "for another use": lambda: authority.issue(uses=("server" if whose == "client" else "client",)),
    }[what]()
    server, client = (good, bad) if whose == "client" else (bad, good)
    told = meeting(server.transport(), client.transport(), in_thread)
    for text, pattern in zip(told if whose == "client" else reversed(told), BAD[what], strict=True):
        assert isinstance(text, str)
        assert re.search(pattern, text), told


@pytest.mark.fault(20)
def test_a_client_without_a_certificate_is_refused_and_both_say_so(tmp_path: Path, in_thread: InThread) -> None:
    good = Authority(tmp_path).issue()
    client = good.transport()
    client._client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client._client.load_verify_locations(good.authority)
    accepted, connected = meeting(good.transport(), client, in_thread)
    assert re.search("127.0.0.1:.* gave no certificate", str(accepted))
    assert "asks for a certificate, and this peer gave none" in str(connected)


@pytest.mark.parametrize("host", ["127.0.0.2", "localhost", "*.0.0.1", "node1"])
@pytest.mark.fault(20)
def test_a_certificate_for_another_host_is_refused_by_the_connecting_side(
    host: str, tmp_path: Path, in_thread: InThread
) -> None:
    authority = Authority(tmp_path)
    accepted, connected = meeting(authority.issue(host).transport(), authority.issue().transport(), in_thread)
    assert "is not for '127.0.0.1', the host in the hosts file" in str(connected)
    assert "refuses the certificate of this peer: is it for its host in the hosts file?" in str(accepted)


@pytest.mark.fault(20)
def test_a_common_name_is_not_accepted_as_host(tmp_path: Path, in_thread: InThread) -> None:
    """A certificate with its host only as the subject, as before alternative names were introduced."""
    authority = Authority(tmp_path)
    server, client = authority.issue("localhost", alternative=False), authority.issue()
    told = meeting(server.transport(), client.transport(), in_thread, by="localhost")
    assert "is not for 'localhost', the host in the hosts file" in str(told[1])
    accepted, _ = meeting(client.transport(), server.transport(), in_thread)
    assert isinstance(accepted, Certified)
    assert not accepted.speaks_for("localhost")


def test_the_accepting_side_can_check_the_certificates_host(tmp_path: Path, in_thread: InThread) -> None:
    authority = Authority(tmp_path)
    for host, also in (("node1", "NODE1"), ("fd00::7", "fd00:0:0:0:0:0:0:7"), ("10.0.0.7", "10.0.0.7")):
        accepted, _ = meeting(authority.issue().transport(), authority.issue(host).transport(), in_thread)
        assert isinstance(accepted, Certified)
        assert accepted.speaks_for(host)
        assert accepted.speaks_for(also)
        assert not any(accepted.speaks_for(other) for other in ("node", "node12", "10.0.0.70", "fd00::70", "", "*"))


STRANGERS = {
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "a peer without TLS": b"GSPX\0\1" + bytes(60),
    "random": random.Random(0).randbytes(100),
    "zeros": bytes(100),
}


@pytest.mark.parametrize("first", STRANGERS.values(), ids=STRANGERS)
@pytest.mark.fault(15)
def test_a_peer_without_tls_is_refused(tls: Transport, in_thread: InThread, first: bytes) -> None:
    listening = tls.listen(Address("127.0.0.1", 0))
    with socket.create_connection((listening.address.host, listening.address.port)) as peer:
        stream = listening.accept()
        peer.sendall(first)
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises((ProtocolError, PeerUnreachableError), match="TLS"):
            read(stream, 1)
    stream.abort()
    listening.close()


@pytest.mark.fault(16)
def test_an_older_tls_is_refused(tmp_path: Path, in_thread: InThread) -> None:
    good = Authority(tmp_path).issue()
    listening = good.transport().listen(Address("127.0.0.1", 0))
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_cert_chain(good.certificate, good.key)
    old.load_verify_locations(good.authority)

    def connect() -> None:
        with socket.create_connection((listening.address.host, listening.address.port)) as peer:
            old.wrap_socket(peer, server_hostname="127.0.0.1")

    connecting = in_thread(connect)
    stream = listening.accept()
    with pytest.raises(ProtocolError, match=r"violated the TLS 1\.3 protocol \(unsupported protocol\)"):
        read(stream, 1)
    stream.abort()
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        connecting.result(LONG)
    listening.close()


def test_a_listener_without_tls_is_distinguished_from_a_closed_one(tls: Transport, in_thread: InThread) -> None:
    listening = tcp.listen(Address("127.0.0.1", 0))
    connecting = in_thread(tls.connect, listening.address, soon())
    listening.accept().abort()
    with pytest.raises(PeerUnreachableError, match="in the TLS handshake"):
        connecting.result(LONG)
    listening.close()


@pytest.mark.fault(25)
def test_a_silent_stranger_blocks_no_other_and_has_a_deadline(tls: Transport, in_thread: InThread) -> None:
    listening = tls.listen(Address("127.0.0.1", 0))
    with socket.create_connection((listening.address.host, listening.address.port)):
        silent = listening.accept()
        connecting = in_thread(tls.connect, listening.address, soon())
        stream = listening.accept()
        stream.send([b"a"], soon())
        assert read(connecting.result(LONG), 1) == b"a"
        with pytest.raises(PeerTimeoutError):
            read(silent, 1, soon(SHORT))
    with pytest.raises(PeerTimeoutError):
        tls.connect(listening.address, soon(SHORT))
    for each in (silent, stream, connecting.result()):
        each.abort()
    listening.close()


@pytest.mark.fault(42)
def test_bytes_written_before_closing_are_not_lost(tls: Transport, in_thread: InThread) -> None:
    """The client closes without reading: unread session tickets would make TCP discard what it wrote."""
    data = os.urandom(3_000_000)
    listening = tls.listen(Address("127.0.0.1", 0))

    def write_and_close() -> None:
        stream = tls.connect(listening.address, soon())
        stream.send([data], soon())
        stream.abort()

    for _ in range(5):
        writing = in_thread(write_and_close)
        stream = listening.accept()
        assert read(stream, len(data)) == data
        writing.result(LONG)
        stream.abort()
    listening.close()


@pytest.mark.fault(12)
def test_a_byte_changed_in_transit_ends_the_stream(tls: Transport, in_thread: InThread) -> None:
    listening, changing = tls.listen(Address("127.0.0.1", 0)), tcp.listen(Address("127.0.0.1", 0))

    def pass_on(source: Stream, target: Stream, change: threading.Event) -> None:
        buffer = memoryview(bytearray(100_000))
        with contextlib.suppress(PeerUnreachableError):
            while True:
                count = source.receive_into(buffer, soon())
                if change.is_set():
                    buffer[count - 1] ^= 1
                target.send([buffer[:count]], soon())

    connecting = in_thread(tls.connect, changing.address, soon())
    middle = changing.accept(), tcp.connect(listening.address, soon())
    change, never = threading.Event(), threading.Event()
    passing = [in_thread(pass_on, *middle, change), in_thread(pass_on, *reversed(middle), never)]
    theirs = listening.accept()
    first = in_thread(read, theirs, 5)
    ours = connecting.result(LONG)
    ours.send([b"right"], soon())
    assert first.result(LONG) == b"right"
    change.set()
    ours.send([b"wrong"], soon())
    with pytest.raises(ProtocolError, match="bad record mac"):
        read(theirs, 1)
    for each in (ours, theirs, *middle):
        each.abort()
    for each in passing:
        each.result(LONG)
    for each in (listening, changing):
        each.close()
