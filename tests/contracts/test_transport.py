"""What every transport keeps to (the protocols in gossipx.transports), and what is TCP's and TLS's own.

Numbers in brackets are rows of the project's fault list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import random
import re
import resource
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from certificates import Authority

from gossipx.errors import (
    GossipxError,
    NotAuthorisedError,
    PeerTimeoutError,
    PeerUnreachableError,
    ProtocolError,
    StrangerError,
)
from gossipx.memory import HOT
from gossipx.transports import Address, Certified, Listener, Stream, Transport, sockets, tcp, unix

Pair = tuple[Stream, Stream]
Beside = Callable[..., "Future[Any]"]

PLACES: dict[str, Address] = {
    "tcp": Address("127.0.0.1", 0),
    "tls": Address("127.0.0.1", 0),
    "unix": Address(f"gossipx-test-{os.getpid()}", 0),
}
LONG = 60.0  # seconds: ends a test that hangs
SHORT = 0.2  # seconds: a deadline that is meant to pass


def soon(seconds: float = LONG) -> float:
    return time.monotonic() + seconds


@pytest.fixture(params=PLACES)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Transport:
    return Authority(tmp_path_factory.mktemp("certificates")).issue().transport()


@pytest.fixture
def transport(kind: str, request: pytest.FixtureRequest) -> Transport:
    made: Transport = request.getfixturevalue("tls") if kind == "tls" else {"tcp": tcp, "unix": unix}[kind]
    return made


@pytest.fixture
def listener(transport: Transport, kind: str) -> Iterator[Listener]:
    listening = transport.listen(PLACES[kind])
    yield listening
    listening.close()


@pytest.fixture
def pair(transport: Transport, listener: Listener, beside: Beside) -> Iterator[Pair]:
    connecting = beside(transport.connect, listener.address, soon())
    theirs = listener.accept()
    first = beside(read, theirs, 1)  # who accepts may begin to talk no sooner
    ours = connecting.result(LONG)
    ours.send([b"."], soon())
    assert first.result(LONG) == b"."
    yield ours, theirs
    ours.abort()
    theirs.abort()


@pytest.fixture
def beside() -> Iterator[Beside]:
    """Runs a call in another thread."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def read(stream: Stream, count: int, deadline: float | None = None) -> bytes:
    data = memoryview(bytearray(count))
    done = 0
    while done < count:
        done += stream.receive_into(data[done:], deadline or soon())
    return bytes(data)


# --- the contract -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 65_536, 5_000_001])
def test_bytes_arrive_as_they_were(pair: Pair, beside: Beside, size: int) -> None:
    ours, theirs = pair
    data = os.urandom(size)
    sent = beside(ours.send, [data], soon())
    assert read(theirs, size) == data
    sent.result(LONG)


def test_buffers_arrive_in_order_and_empty_ones_are_nothing(pair: Pair, beside: Beside) -> None:
    ours, theirs = pair
    buffers: list[bytes | memoryview] = [b"", b"first", memoryview(b""), memoryview(b"second")]
    buffers += [index.to_bytes(4, "big") for index in range(3000)]
    sent = [beside(ours.send, buffers, soon())]
    expected = b"".join(buffers)
    assert read(theirs, len(expected)) == expected
    ours.send([], soon())
    ours.send([b""], soon())
    for index in range(100):
        ours.send([index.to_bytes(4, "big")], soon())
    assert read(theirs, 400) == b"".join(index.to_bytes(4, "big") for index in range(100))
    sent[0].result(LONG)


def test_views_of_numbers_are_sent_as_bytes(pair: Pair) -> None:
    ours, theirs = pair
    ours.send([memoryview(bytes(range(16))).cast("I")], soon())
    assert read(theirs, 16) == bytes(range(16))


def test_buffers_may_change_once_sent(pair: Pair) -> None:
    ours, theirs = pair
    data = bytearray(b"before")
    ours.send([memoryview(data)], soon())
    data[:] = b"after!"
    assert read(theirs, 6) == b"before"


@pytest.mark.parametrize("size", [1, HOT, 7 * HOT + 5])
def test_a_look_is_told_of_all_that_is_sent_in_order(pair: Pair, beside: Beside, size: int) -> None:
    ours, theirs = pair
    data, seen = os.urandom(size), bytearray()
    receiving = beside(read, theirs, size)
    ours.send([data], soon(), seen.extend)
    assert receiving.result(LONG) == data == seen


def test_receiving_takes_no_more_than_there_is_room_for(pair: Pair) -> None:
    ours, theirs = pair
    ours.send([b"abcdef"], soon())
    room = bytearray(b"......")
    assert theirs.receive_into(memoryview(room)[2:3], soon()) == 1
    assert room == b"..a..."
    assert read(theirs, 5) == b"bcdef"


@pytest.mark.parametrize("size", [1, 300_001, 5_000_001])
def test_who_looks_sees_all_that_fills_the_room_in_order(pair: Pair, beside: Beside, size: int) -> None:
    ours, theirs = pair
    data = os.urandom(size)
    sent = beside(ours.send, [data[:7], data[7:100_000], data[100_000:], b"more"], soon())
    room, seen = memoryview(bytearray(size)), bytearray()
    assert theirs.receive_into(room, soon(), seen.extend) == size
    assert room == seen == data
    assert read(theirs, 4) == b"more"
    sent.result(LONG)


def test_what_is_there_is_received_however_slow_this_thread_is(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two looks at the clock it may be off the processor for longer than the clock is left alone."""
    ours, theirs = pair
    data = os.urandom(2_000_000)
    ours.send([data[:100_000]], soon())
    began, looks = time.monotonic(), itertools.count()
    room, seen = memoryview(bytearray(100_000)), bytearray()
    with monkeypatch.context() as patched:
        patched.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: began + 0.1 * next(looks)))
        assert theirs.receive_into(room, began + LONG, seen.extend) == 100_000
    assert seen == data[:100_000]


def test_a_room_that_is_not_filled_is_an_error_whoever_looks(pair: Pair) -> None:
    ours, theirs = pair
    ours.send([bytes(400_000)], soon())
    ours.abort()
    seen = bytearray()
    with pytest.raises(PeerUnreachableError, match="closed the connection"):
        theirs.receive_into(memoryview(bytearray(400_001)), soon(), seen.extend)
    assert len(seen) == 400_000


def test_both_ways_at_once(pair: Pair, beside: Beside) -> None:
    there, back = os.urandom(6_000_000), os.urandom(6_000_000)
    ours, theirs = pair
    sent = [beside(ours.send, [there], soon()), beside(theirs.send, [back], soon())]
    received = beside(read, ours, len(back))
    assert read(theirs, len(there)) == there
    assert received.result(LONG) == back
    for each in sent:
        each.result(LONG)


def test_64_connections_at_once(transport: Transport, listener: Listener) -> None:
    def call(number: int) -> bytes:
        stream = transport.connect(listener.address, soon())
        stream.send([number.to_bytes(4, "big") * 1000], soon())
        try:
            return read(stream, 4)
        finally:
            stream.abort()

    with ThreadPoolExecutor(64) as pool:
        calls = [pool.submit(call, number) for number in range(64)]
        accepted = [listener.accept() for _ in calls]
        for stream in accepted:
            stream.send([read(stream, 4000)[-4:]], soon())
        assert [int.from_bytes(each.result(LONG), "big") for each in calls] == list(range(64))
    for stream in accepted:
        stream.abort()


def test_what_was_sent_before_closing_still_arrives(pair: Pair) -> None:
    ours, theirs = pair
    ours.send([b"last words"], soon())
    ours.abort()
    assert read(theirs, 10) == b"last words"
    with pytest.raises(PeerUnreachableError, match="closed the connection"):
        read(theirs, 1)
    assert not theirs.quiet()


def test_sending_to_one_who_has_gone_ends(pair: Pair) -> None:  # [2]
    ours, theirs = pair
    theirs.abort()
    with pytest.raises(PeerUnreachableError):
        ours.send([bytes(64_000_000)], soon())


def test_nothing_comes_by_the_deadline(pair: Pair) -> None:  # [7]
    ours, theirs = pair
    with pytest.raises(PeerTimeoutError):
        read(theirs, 1, soon(SHORT))
    ours.send([b"late"], soon())
    assert read(theirs, 4) == b"late"


def test_a_deadline_that_has_passed_ends_at_once(pair: Pair) -> None:
    ours, theirs = pair
    with pytest.raises(PeerTimeoutError):
        ours.send([b"a"], time.monotonic())
    with pytest.raises(PeerTimeoutError):
        read(theirs, 1, time.monotonic())


def test_a_trickle_does_not_stretch_the_deadline(pair: Pair, beside: Beside) -> None:  # [8]
    ours, theirs = pair
    more, over = threading.Semaphore(1), threading.Event()

    def trickle() -> None:
        while more.acquire(timeout=LONG) and not over.is_set():
            ours.send([b"a"], soon())

    sender = beside(trickle)
    deadline, received = soon(SHORT), 0
    with pytest.raises(PeerTimeoutError):
        while True:
            received += theirs.receive_into(memoryview(bytearray(1)), deadline)
            more.release()
    over.set()
    more.release()
    sender.result(LONG)
    assert received > 0


def test_a_trickle_does_not_stretch_the_deadline_of_who_looks(pair: Pair, beside: Beside) -> None:  # [8]
    ours, theirs = pair
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(SHORT / 100):
            ours.send([b"a"], soon())

    sender = beside(trickle)
    with pytest.raises(PeerTimeoutError):
        theirs.receive_into(memoryview(bytearray(5_000_000)), soon(SHORT), lambda part: None)
    over.set()
    sender.result(LONG)


def test_a_receiver_that_never_reads_ends_the_sending(pair: Pair) -> None:  # [9]
    with pytest.raises(PeerTimeoutError):
        pair[0].send([bytes(64_000_000)], soon(SHORT))


def test_a_receiver_that_sips_does_not_stretch_the_deadline(pair: Pair, beside: Beside) -> None:  # [9]
    ours, theirs = pair
    over = threading.Event()

    def sip() -> int:
        count = 0
        while not over.is_set():
            count += theirs.receive_into(memoryview(bytearray(10)), soon())
        return count

    sipped = beside(sip)
    with pytest.raises(PeerTimeoutError):
        ours.send([bytes(256_000_000)], soon(SHORT))
    over.set()
    assert sipped.result(LONG) > 0


@pytest.mark.parametrize("blocked", ["receive", "send"])
def test_abort_wakes_a_blocked_call(pair: Pair, beside: Beside, blocked: str) -> None:
    ours, theirs = pair
    started = threading.Event()

    def block() -> None:
        started.set()
        if blocked == "send":
            ours.send([bytes(64_000_000)], soon())
        else:
            read(ours, 1)

    call = beside(block)
    assert started.wait(LONG)
    if blocked == "send":
        read(theirs, 1)  # it is under way
    ours.abort()
    with pytest.raises(PeerUnreachableError):
        call.result(LONG)
    ours.abort()
    with pytest.raises(PeerUnreachableError):
        ours.send([b"a"], soon())
    with pytest.raises(PeerUnreachableError):
        read(ours, 1)
    assert not ours.quiet()


def test_quiet_until_something_comes(pair: Pair) -> None:
    ours, theirs = pair
    assert theirs.quiet()
    ours.send([b"ab"], soon())
    assert read(theirs, 1) == b"a"
    assert not theirs.quiet()
    assert read(theirs, 1) == b"b"
    assert theirs.quiet()


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_who_has_hung_up_is_known_before_all_is_read(pair: Pair, monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """What a giver said last is read once its model has come by the carrier: if it died, that never comes.

    Where the system does not tell (``POLLRDHUP``), it is known when all was read.
    """
    if not told:
        monkeypatch.setattr("gossipx.transports.sockets._HANG_UP", 0)
    ours, theirs = pair
    assert not theirs.hung_up()
    ours.send([b"last words"], soon())
    assert read(theirs, 1) == b"l"
    assert not theirs.hung_up()
    ours.abort()
    if told and hasattr(select, "POLLRDHUP"):
        assert theirs.hung_up()
    assert read(theirs, 9) == b"ast words"
    assert theirs.hung_up()
    assert ours.hung_up(), "closed here is closed, too"


def test_closing_wakes_a_blocked_accept(listener: Listener, beside: Beside) -> None:
    accepting = beside(listener.accept)
    listener.close()
    with pytest.raises(GossipxError):
        accepting.result(LONG)
    listener.close()
    with pytest.raises(GossipxError):
        listener.accept()


def test_nobody_listens(transport: Transport, listener: Listener) -> None:
    place = listener.address
    listener.close()
    with pytest.raises(PeerUnreachableError, match=re.escape(str(place))):
        transport.connect(place, soon())
    again = transport.listen(place)  # and the place is free
    again.close()


def test_an_address_in_use_is_named(transport: Transport, listener: Listener) -> None:  # [33]
    with pytest.raises(GossipxError, match=f"{re.escape(str(listener.address))}.* in use.* another") as caught:
        transport.listen(listener.address)
    assert caught.value.exit_code == 1


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


def test_an_address_of_another_machine_cannot_be_listened_at() -> None:
    with pytest.raises(GossipxError, match=r"192\.0\.2\.1:0: this machine has no such address"):
        tcp.listen(Address("192.0.2.1", 0))


def test_a_half_closed_peer_can_still_be_answered() -> None:  # [7]
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


def test_a_name_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:  # [35]
    def unknown(host: str, *rest: object, **named: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(PeerUnreachableError, match="no address is known for node9:7000"):
        tcp.connect(Address("node9", 7000), soon())


def test_a_look_up_that_hangs_keeps_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
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
        waiting = [socket.socket() for _ in range(4)]  # more than its queue takes
        for each in waiting:
            each.setblocking(False)
            assert each.connect_ex((place.host, place.port)) in (0, errno.EINPROGRESS)
        with pytest.raises(PeerTimeoutError, match=str(place)):
            tcp.connect(place, soon(SHORT))
        for each in waiting:
            each.close()


def test_a_socket_connected_to_itself_is_nobody() -> None:
    with socket.socket() as alone:
        alone.bind(("127.0.0.1", 0))
        place = alone.getsockname()
        with pytest.raises(ConnectionRefusedError):
            tcp._connect(alone, place, Address(*place), soon())


def test_out_of_descriptors_accepting_fails_and_recovers() -> None:  # [40]
    listening = tcp.listen(Address("127.0.0.1", 0))
    peer = socket.create_connection((listening.address.host, listening.address.port))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(GossipxError, match="Too many open files"):
            listening.accept()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    stream = listening.accept()
    peer.sendall(b"here")
    assert read(stream, 4) == b"here"
    stream.abort()
    peer.close()
    listening.close()


# --- TLS ----------------------------------------------------------------------------------------


def meeting(
    server: Transport, client: Transport, beside: Beside, by: str = "127.0.0.1"
) -> tuple[Stream | str, Stream | str]:
    """Each side's stream after one byte both ways, or what it was refused by; ``by``: the server's name to clients."""
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

    connecting = beside(talk, lambda: client.connect(Address(by, listening.address.port), soon()))
    accepted = talk(listening.accept)
    connected = connecting.result(LONG)
    listening.close()
    for each in streams:
        each.abort()
    return accepted, connected


@dataclass(frozen=True)
class Bad:
    """What is wrong with a certificate, and how both sides put it where the client has it, and where the server."""

    of_client: tuple[str, str]
    of_server: tuple[str, str]


BAD = {
    "expired": Bad(
        ("certificate of 127.0.0.1:.* has expired", "says that the certificate of this peer has expired"),
        ("says that the certificate of this peer has expired", "certificate of 127.0.0.1:.* has expired"),
    ),
    "foreign": Bad(
        (
            "was not signed by a CA in --tls-ca",
            "(does not know the CA that signed|refuses) the certificate of this peer",
        ),
        (
            "(does not know the CA that signed|refuses) the certificate of this peer",
            "was not signed by a CA in --tls-ca",
        ),
    ),
    "for another use": Bad(
        (
            "is not for this use: it needs both",
            "refuses the certificate of this peer: it needs serverAuth and clientAuth",
        ),
        (
            "refuses the certificate of this peer: it needs serverAuth and clientAuth",
            "is not for this use: it needs both",
        ),
    ),
}


@pytest.mark.parametrize("whose", ["client", "server"])
@pytest.mark.parametrize("name", ["a foreign CA", "tests' CA"])
@pytest.mark.parametrize("what", BAD)
def test_a_bad_certificate_is_refused_and_both_say_why(  # [20]
    what: str, name: str, whose: str, tmp_path: Path, beside: Beside
) -> None:
    authority, foreign = Authority(tmp_path / "own"), Authority(tmp_path / "foreign", name)
    good = authority.issue()
    bad = {
        "expired": lambda: authority.issue(days=-1),
        "foreign": lambda: dataclasses.replace(foreign.issue(), authority=authority.file),
        "for another use": lambda: authority.issue(uses=("server" if whose == "client" else "client",)),
    }[what]()
    server, client = (good, bad) if whose == "client" else (bad, good)
    told = meeting(server.transport(), client.transport(), beside)
    for text, pattern in zip(told, BAD[what].of_client if whose == "client" else BAD[what].of_server, strict=True):
        assert isinstance(text, str)
        assert re.search(pattern, text), told


def test_a_client_without_a_certificate_is_refused_and_both_say_so(tmp_path: Path, beside: Beside) -> None:  # [20]
    good = Authority(tmp_path).issue()
    client = good.transport()
    client._client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client._client.load_verify_locations(good.authority)
    accepted, connected = meeting(good.transport(), client, beside)
    assert re.search("127.0.0.1:.* gave no certificate", str(accepted))
    assert "asks for a certificate, and this peer gave none" in str(connected)


@pytest.mark.parametrize("host", ["127.0.0.2", "localhost", "*.0.0.1", "node1"])
def test_a_certificate_for_another_host_is_refused_by_who_connects(  # [20]
    host: str, tmp_path: Path, beside: Beside
) -> None:
    authority = Authority(tmp_path)
    accepted, connected = meeting(authority.issue(host).transport(), authority.issue().transport(), beside)
    assert "is not for '127.0.0.1', the host in the hosts file" in str(connected)
    assert "refuses the certificate of this peer: is it for its host in the hosts file?" in str(accepted)


def test_a_common_name_is_no_host_to_who_connects(tmp_path: Path, beside: Beside) -> None:  # [20]
    """A certificate that names its host as the subject only, as were made before alternative names."""
    authority = Authority(tmp_path)
    server, client = authority.issue("localhost", alternative=False), authority.issue()
    told = meeting(server.transport(), client.transport(), beside, by="localhost")
    assert "is not for 'localhost', the host in the hosts file" in str(told[1])
    accepted, _ = meeting(client.transport(), server.transport(), beside)
    assert isinstance(accepted, Certified)
    assert not accepted.speaks_for("localhost")


def test_who_accepts_can_ask_for_whom_the_certificate_is(tmp_path: Path, beside: Beside) -> None:
    authority = Authority(tmp_path)
    for host, also in (("node1", "NODE1"), ("fd00::7", "fd00:0:0:0:0:0:0:7"), ("10.0.0.7", "10.0.0.7")):
        accepted, _ = meeting(authority.issue().transport(), authority.issue(host).transport(), beside)
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
def test_who_speaks_no_tls_is_refused(tls: Transport, beside: Beside, first: bytes) -> None:  # [15]
    listening = tls.listen(Address("127.0.0.1", 0))
    with socket.create_connection((listening.address.host, listening.address.port)) as peer:
        stream = listening.accept()
        peer.sendall(first)
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises((ProtocolError, PeerUnreachableError), match="TLS"):
            read(stream, 1)
    stream.abort()
    listening.close()


def test_an_older_tls_is_refused(tmp_path: Path, beside: Beside) -> None:  # [16]
    good = Authority(tmp_path).issue()
    listening = good.transport().listen(Address("127.0.0.1", 0))
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_cert_chain(good.certificate, good.key)
    old.load_verify_locations(good.authority)

    def connect() -> None:
        with socket.create_connection((listening.address.host, listening.address.port)) as peer:
            old.wrap_socket(peer, server_hostname="127.0.0.1")

    connecting = beside(connect)
    stream = listening.accept()
    with pytest.raises(ProtocolError, match=r"does not speak TLS 1\.3 as it should \(unsupported protocol\)"):
        read(stream, 1)
    stream.abort()
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        connecting.result(LONG)
    listening.close()


def test_a_listener_without_tls_is_told_from_one_that_is_gone(tls: Transport, beside: Beside) -> None:
    listening = tcp.listen(Address("127.0.0.1", 0))
    connecting = beside(tls.connect, listening.address, soon())
    listening.accept().abort()
    with pytest.raises(PeerUnreachableError, match="in the TLS handshake"):
        connecting.result(LONG)
    listening.close()


def test_a_stranger_that_says_nothing_holds_up_nobody_and_has_a_deadline(  # [25]
    tls: Transport, beside: Beside
) -> None:
    listening = tls.listen(Address("127.0.0.1", 0))
    with socket.create_connection((listening.address.host, listening.address.port)):
        silent = listening.accept()
        connecting = beside(tls.connect, listening.address, soon())
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


def test_what_a_sender_writes_before_it_closes_is_not_lost(tls: Transport, beside: Beside) -> None:  # [42]
    """The client has read nothing when it closes: tickets that lay unread would make TCP take its bytes back."""
    data = os.urandom(3_000_000)
    listening = tls.listen(Address("127.0.0.1", 0))

    def write_and_close() -> None:
        stream = tls.connect(listening.address, soon())
        stream.send([data], soon())
        stream.abort()

    for _ in range(5):
        writing = beside(write_and_close)
        stream = listening.accept()
        assert read(stream, len(data)) == data
        writing.result(LONG)
        stream.abort()
    listening.close()


def test_a_byte_changed_on_the_way_ends_the_stream(tls: Transport, beside: Beside) -> None:  # [12]
    listening, changing = tls.listen(Address("127.0.0.1", 0)), tcp.listen(Address("127.0.0.1", 0))

    def pass_on(source: Stream, target: Stream, change: threading.Event) -> None:
        room = memoryview(bytearray(100_000))
        with contextlib.suppress(PeerUnreachableError):
            while True:
                count = source.receive_into(room, soon())
                if change.is_set():
                    room[count - 1] ^= 1
                target.send([room[:count]], soon())

    connecting = beside(tls.connect, changing.address, soon())
    middle = changing.accept(), tcp.connect(listening.address, soon())
    change, never = threading.Event(), threading.Event()
    passing = [beside(pass_on, *middle, change), beside(pass_on, *reversed(middle), never)]
    theirs = listening.accept()
    first = beside(read, theirs, 5)
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
