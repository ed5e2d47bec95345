"""The contract of every transport: the protocols in gossipx.transports."""

from __future__ import annotations

import itertools
import os
import re
import select
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import streamed
from streamed import LONG, SHORT, InThread, read, soon

from gossipx.errors import GossipxError, PeerTimeoutError, PeerUnreachableError
from gossipx.memory import OBSERVED_PIECE
from gossipx.transports import Address, Listener, Stream, Transport, sockets, tcp, unix

tls, in_thread = streamed.tls, streamed.in_thread


Pair = tuple[Stream, Stream]

PLACES: dict[str, Address] = {
    "tcp": Address("127.0.0.1", 0),
    "tls": Address("127.0.0.1", 0),
    "unix": Address(f"gossipx-test-{os.getpid()}", 0),
}


@pytest.fixture(params=PLACES)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


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
def pair(transport: Transport, listener: Listener, in_thread: InThread) -> Iterator[Pair]:
    connecting = in_thread(transport.connect, listener.address, soon())
    theirs = listener.accept()
    first = in_thread(read, theirs, 1)  # the accepting side may not send any sooner
    ours = connecting.result(LONG)
    ours.send([b"."], soon())
    assert first.result(LONG) == b"."
    yield ours, theirs
    ours.abort()
    theirs.abort()


# --- the contract -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 65_536, 5_000_001])
def test_bytes_arrive_unchanged(pair: Pair, in_thread: InThread, size: int) -> None:
    ours, theirs = pair
    data = os.urandom(size)
    sent = in_thread(ours.send, [data], soon())
    assert read(theirs, size) == data
    sent.result(LONG)


def test_buffers_arrive_in_order_and_empty_ones_are_skipped(pair: Pair, in_thread: InThread) -> None:
    ours, theirs = pair
    buffers: list[bytes | memoryview] = [b"", b"first", memoryview(b""), memoryview(b"second..").cast("I")]
    buffers += [index.to_bytes(4, "big") for index in range(3000)]
    sent = in_thread(ours.send, buffers, soon())
    expected = b"".join(buffers)
    assert read(theirs, len(expected)) == expected
    ours.send([], soon())
    ours.send([b""], soon())
    for index in range(100):
        ours.send([index.to_bytes(4, "big")], soon())
    assert read(theirs, 400) == b"".join(index.to_bytes(4, "big") for index in range(100))
    sent.result(LONG)


def test_buffers_may_change_once_sent(pair: Pair) -> None:
    ours, theirs = pair
    data = bytearray(b"before")
    ours.send([memoryview(data)], soon())
    data[:] = b"after!"
    assert read(theirs, 6) == b"before"


def test_receiving_fills_no_more_than_the_buffer(pair: Pair) -> None:
    ours, theirs = pair
    ours.send([b"abcdef"], soon())
    buffer = bytearray(b"......")
    assert theirs.receive_into(memoryview(buffer)[2:3], soon()) == 1
    assert buffer == b"..a..."
    assert read(theirs, 5) == b"bcdef"


@pytest.mark.parametrize("size", [1, OBSERVED_PIECE, 7 * OBSERVED_PIECE + 5, 5_000_001])
def test_observers_see_all_sent_and_received_bytes_in_order(pair: Pair, in_thread: InThread, size: int) -> None:
    ours, theirs = pair
    data, given = os.urandom(size), bytearray()
    sent = in_thread(ours.send, [data[:7], data[7:100_000], data[100_000:], b"more"], soon(), given.extend)
    buffer, seen = memoryview(bytearray(size)), bytearray()
    assert theirs.receive_into(buffer, soon(), seen.extend) == size
    assert buffer == seen == data
    assert read(theirs, 4) == b"more"
    sent.result(LONG)
    assert given == data + b"more"


def test_available_bytes_are_received_even_by_a_slow_thread(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may be suspended between two clock reads for longer than the timeout is left unrefreshed."""
    ours, theirs = pair
    data = os.urandom(2_000_000)
    ours.send([data[:100_000]], soon())
    began, looks = time.monotonic(), itertools.count()
    buffer, seen = memoryview(bytearray(100_000)), bytearray()
    with monkeypatch.context() as patched:
        patched.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: began + 0.1 * next(looks)))
        assert theirs.receive_into(buffer, began + LONG, seen.extend) == 100_000
    assert seen == data[:100_000]


def test_a_buffer_that_is_not_filled_is_an_error_with_any_observer(pair: Pair) -> None:
    ours, theirs = pair
    ours.send([bytes(400_000)], soon())
    ours.abort()
    seen = bytearray()
    with pytest.raises(PeerUnreachableError, match="closed the connection"):
        theirs.receive_into(memoryview(bytearray(400_001)), soon(), seen.extend)
    assert len(seen) == 400_000


def test_both_directions_at_once(pair: Pair, in_thread: InThread) -> None:
    there, back = os.urandom(6_000_000), os.urandom(6_000_000)
    ours, theirs = pair
    sent = [in_thread(ours.send, [there], soon()), in_thread(theirs.send, [back], soon())]
    received = in_thread(read, ours, len(back))
    assert read(theirs, len(there)) == there
    assert received.result(LONG) == back
    for each in sent:
        each.result(LONG)


def test_what_was_sent_before_closing_still_arrives(pair: Pair) -> None:
    ours, theirs = pair
    ours.send([b"last words"], soon())
    ours.abort()
    assert read(theirs, 10) == b"last words"
    with pytest.raises(PeerUnreachableError, match="closed the connection"):
        read(theirs, 1)
    assert not theirs.quiet()


@pytest.mark.fault(2)
def test_sending_to_a_closed_peer_fails(pair: Pair) -> None:
    ours, theirs = pair
    theirs.abort()
    with pytest.raises(PeerUnreachableError):
        ours.send([bytes(64_000_000)], soon())


@pytest.mark.fault(7)
def test_nothing_comes_by_the_deadline(pair: Pair) -> None:
    ours, theirs = pair
    with pytest.raises(PeerTimeoutError):
        read(theirs, 1, soon(SHORT))
    ours.send([b"late"], soon())
    assert read(theirs, 4) == b"late"
    with pytest.raises(PeerTimeoutError):
        ours.send([b"a"], time.monotonic())
    with pytest.raises(PeerTimeoutError):
        read(theirs, 1, time.monotonic())


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.fault(8)
def test_a_trickle_does_not_extend_the_deadline(pair: Pair, in_thread: InThread, observed: bool) -> None:
    ours, theirs = pair
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(SHORT / 100):
            ours.send([b"a"], soon())

    sender, deadline, received = in_thread(trickle), soon(SHORT), bytearray()
    with pytest.raises(PeerTimeoutError):
        if observed:
            theirs.receive_into(memoryview(bytearray(5_000_000)), deadline, received.extend)
        while True:
            theirs.receive_into(buffer := memoryview(bytearray(1)), deadline)
            received += buffer
    over.set()
    sender.result(LONG)
    assert received


@pytest.mark.parametrize("sips", [False, True])
@pytest.mark.fault(9)
def test_a_receiver_that_never_reads_or_slowly_ends_the_sending(pair: Pair, in_thread: InThread, sips: bool) -> None:
    ours, theirs = pair
    over = threading.Event()

    def sip() -> int:
        count = 0
        while sips and not over.is_set():
            count += theirs.receive_into(memoryview(bytearray(10)), soon())
        return count

    sipped = in_thread(sip)
    with pytest.raises(PeerTimeoutError):
        ours.send([bytes(256_000_000)], soon(SHORT))
    over.set()
    assert (sipped.result(LONG) > 0) is sips


@pytest.mark.parametrize("blocked", ["receive", "send"])
def test_abort_wakes_a_blocked_call(pair: Pair, in_thread: InThread, blocked: str) -> None:
    ours, theirs = pair
    started = threading.Event()

    def block() -> None:
        started.set()
        if blocked == "send":
            ours.send([bytes(64_000_000)], soon())
        else:
            read(ours, 1)

    call = in_thread(block)
    assert started.wait(LONG)
    if blocked == "send":
        read(theirs, 1)  # the transfer has begun
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
def test_a_closed_peer_is_detected_before_all_bytes_are_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """A sender's last message is read after its model has arrived by the carrier; if the sender died, it never arrives.

    Without ``POLLRDHUP`` the end is known once everything has been read.
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
    assert ours.hung_up(), "a locally closed stream counts as closed"


def test_closing_wakes_a_blocked_accept(listener: Listener, in_thread: InThread) -> None:
    accepting = in_thread(listener.accept)
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
    again = transport.listen(place)  # the address is free again
    again.close()


@pytest.mark.fault(33)
def test_an_address_in_use_is_named(transport: Transport, listener: Listener) -> None:
    with pytest.raises(GossipxError, match=f"{re.escape(str(listener.address))}.* in use.* another") as caught:
        transport.listen(listener.address)
    assert caught.value.exit_code == 1
