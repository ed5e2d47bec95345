"""Several CommManagers in one process, over real sockets.

Numbers in brackets are rows of the project's fault list.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from framed import joined
from managers import LONG, MANIFEST, SHORT, Host, Model, Run, ended, runs, settings_of, shares_memory, soon

from gossipx.errors import (
    CancelledError,
    GossipxError,
    LocalFaultError,
    ModelMismatchError,
    PeerTimeoutError,
    PeerUnreachableError,
    ProtocolError,
    RefusedError,
    UsageError,
)
from gossipx.memory import PIECE, Memory, Source
from gossipx.messages import (
    ArriveRequest,
    HereReply,
    LeaveRequest,
    ModelReply,
    NotReadyReply,
    PullRequest,
    Reply,
    Request,
    Stage,
)
from gossipx.transports import Address, tcp, unix
from gossipx.transports.link import Link
from gossipx.transports.sockets import SocketStream
from gossipx.wire import Bytes, Hello, Refused, Sink, Welcome, frames


@pytest.fixture
def start() -> Iterator[Callable[[int], Run]]:
    """Makes runs; all end with the test and leave no thread."""
    with runs() as make:
        yield make


@pytest.fixture
def two(start: Callable[[int], Run]) -> tuple[Host, Host]:
    run = start(2)
    return run.host(0), run.host(1)


class Heard(logging.Handler):
    """Log records of gossipx, to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.records: queue.Queue[logging.LogRecord] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.put(record)

    def wait(self, text: str, failed: bool = False) -> logging.LogRecord:
        while True:
            record = self.records.get(timeout=LONG)
            assert failed or record.exc_info is None
            if text in record.getMessage():
                return record


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler, log = Heard(), logging.getLogger("gossipx")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield handler
    log.setLevel(level)
    log.removeHandler(handler)


def knock(host: Host) -> socket.socket:
    address = host.comm.address
    return socket.create_connection((address.host, address.port), timeout=LONG)


def frame(message: Any, number: int = 0) -> bytes:
    return joined(frames.encode(message, number))


def read_frame(stream: socket.socket, payload: Bytes | None = None) -> frames.Frame | None:
    """The next frame; None at the end of the stream."""
    decoder = frames.Decoder(lambda message, request: payload)
    while True:
        count = stream.recv_into(decoder.next_buffer())
        if not count:
            return None
        found = decoder.received(count)
        if found is not None:
            return found


def introduced(host: Host, rank: int, names: Sequence[str]) -> socket.socket:
    """A connection past its handshake, by someone who says he is ``rank``."""
    stream = knock(host)
    model = host.comm._member.me.model
    stream.sendall(frame(Hello(rank, names[rank], len(names), "the same list", model)))
    assert read_frame(stream) is not None
    return stream


# --- requests and answers -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 3_000_001])
def test_a_model_is_pulled(two: tuple[Host, Host], size: int) -> None:
    a, b = two
    model, room = os.urandom(size), bytearray(size)
    b.serve(model)
    for step in (1, 2):
        results = a.ask(1, PullRequest(step, 30.0), room)
        assert results.get(timeout=LONG) == ModelReply(step)
        assert room == model
        assert b.received.get(timeout=LONG)[::2] == (0, PullRequest(step, 30.0))
        assert b.answered.get(timeout=LONG) is True
        assert results.empty()
        room[:] = bytes(size)
    overhead = a.comm.bytes_received - 2 * size
    assert 0 < overhead < 1000
    ended(a, b)
    assert b.comm.bytes_sent == a.comm.bytes_received
    assert a.comm.bytes_sent == b.comm.bytes_received


def test_a_message_is_answered_later_and_others_meanwhile(two: tuple[Host, Host]) -> None:
    a, b = two
    first = a.ask(1, ArriveRequest(Stage.START, 1))
    _, first_key, _ = b.received.get(timeout=LONG)
    second = a.ask(1, LeaveRequest())
    _, second_key, _ = b.received.get(timeout=LONG)
    b.answer(second_key, HereReply(Stage.TRAIN, {"accuracy": 0.5}))
    assert second.get(timeout=LONG) == HereReply(Stage.TRAIN, {"accuracy": 0.5})
    assert first.empty()
    b.answer(first_key, NotReadyReply("not yet"))
    assert first.get(timeout=LONG) == NotReadyReply("not yet")


def test_an_answer_that_lasts_longer_than_a_look_at_the_requester(
    two: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, quiet = threading.Semaphore(0), SocketStream.quiet

    def look(stream: SocketStream) -> bool:
        looks.release()
        return quiet(stream)

    monkeypatch.setattr("gossipx.comm.answering._LOOK", 0.01)
    monkeypatch.setattr(SocketStream, "quiet", look)
    a, b = two
    results = a.ask(1, LeaveRequest())
    _, key, _ = b.received.get(timeout=LONG)
    for _ in range(3):
        assert looks.acquire(timeout=LONG)
    b.answer(key, HereReply(Stage.TRAIN))
    assert results.get(timeout=LONG) == HereReply(Stage.TRAIN)


def test_a_key_is_answered_once(two: tuple[Host, Host]) -> None:
    a, b = two
    results = a.ask(1, LeaveRequest())
    _, key, _ = b.received.get(timeout=LONG)
    b.answer(key, HereReply(Stage.TRAIN))
    assert b.answered.get(timeout=LONG) is True
    b.answer(key, HereReply(Stage.TRAIN))
    assert b.answered.get(timeout=LONG) is False
    assert results.get(timeout=LONG) == HereReply(Stage.TRAIN)


def test_what_no_peer_would_accept_is_refused_where_it_is_said(two: tuple[Host, Host]) -> None:
    a, b = two
    with pytest.raises(ValueError, match="step"):
        a.ask(1, PullRequest(-1, 30.0))
    for to in (2, -1):  # rank 0 is itself: a request to oneself is a request
        with pytest.raises(ValueError, match=f"rank {to}"):
            a.ask(to, PullRequest(1, 30.0))
    results = a.ask(1, LeaveRequest())
    _, key, _ = b.received.get(timeout=LONG)
    with pytest.raises(ValueError, match="reason"):
        b.answer(key, NotReadyReply("two\nlines"))
    b.answer(key, NotReadyReply("one line"))
    assert results.get(timeout=LONG) == NotReadyReply("one line")


def test_a_model_of_another_size_is_refused(two: tuple[Host, Host]) -> None:  # [24]
    a, b = two
    b.serve(b"12345")
    room = bytearray(4)
    error = a.ask(1, PullRequest(1, 30.0), room).get(timeout=LONG)
    assert isinstance(error, ProtocolError)
    assert "peer-01" in str(error)
    assert room == bytes(4)
    assert isinstance(a.ask(1, PullRequest(1, 30.0)).get(timeout=LONG), ProtocolError)


@pytest.mark.parametrize("way", ["tcp", "tcp, secret", "gloo"])
def test_models_leave_no_faster_than_max_rate_whoever_asks(
    start: Callable[[int], Run], way: str, tmp_path: Path
) -> None:
    """Two pull at once: together they get the rate, and the small burst that is saved up."""
    run = start(3)
    giver = run.host(0, max_rate=4e6, **settings_of(way, tmp_path))
    pullers = [run.host(rank, **settings_of(way, tmp_path)) for rank in (1, 2)]
    giver.serve(b"1234")
    for one in pullers:  # from here on nothing is built any more
        assert one.ask(0, PullRequest(1, 30.0), bytearray(4)).get(timeout=LONG) == ModelReply(1)
    model = bytes(range(256)) * 4_000
    giver.serve(model)
    rooms = [bytearray(len(model)) for _ in pullers]
    began = time.monotonic()
    asked = [one.ask(0, PullRequest(1, 30.0), room) for one, room in zip(pullers, rooms, strict=True)]
    assert [one.get(timeout=LONG) for one in asked] == [ModelReply(1)] * 2
    assert time.monotonic() - began >= 2 * len(model) / 4e6 - 0.1
    assert rooms == [model] * 2


def test_what_max_rate_cannot_send_in_time_is_given_up(start: Callable[[int], Run]) -> None:
    run = start(2)
    giver, puller = run.host(0, max_rate=1e3, share_memory=False), run.host(1, share_memory=False)
    result = puller.ask(0, PullRequest(1, 30.0), bytearray(100_000))
    _, key, _ = giver.received.get(timeout=LONG)
    giver.comm.answer(key, ModelReply(1), payload=Model(bytes(100_000)), deadline=soon(0.5), done=giver.answered.put)
    assert isinstance(result.get(timeout=LONG), GossipxError)
    assert giver.answered.get(timeout=LONG) is False
    pace = giver.comm._member.links.pace
    assert pace is not None
    assert pace.reserve(0.0) < 6.0, "of two pieces of 4.1 seconds, the one that was sent has been paid for"


def test_callbacks_may_call_the_manager(two: tuple[Host, Host]) -> None:
    a, b = two
    b.serve(b"")
    results: queue.Queue[object] = queue.Queue()

    def again(reply: object) -> None:
        a.comm.request(1, LeaveRequest(), deadline=soon(), payload=None, done=lambda reply: chain(reply))

    def chain(reply: object) -> None:
        results.put(reply)
        a.comm.close()

    a.comm.request(1, LeaveRequest(), deadline=soon(), payload=None, done=again)
    assert results.get(timeout=LONG) == HereReply(Stage.TRAIN)


def test_a_callback_that_fails_is_logged_and_its_answer_told(two: tuple[Host, Host], heard: Heard) -> None:
    a, b = two

    def react(key: Hashable, request: Request) -> None:
        b.answer(key, HereReply(Stage.TRAIN))
        raise RuntimeError("a driver's mistake")

    def done(result: Reply | GossipxError) -> None:
        assert isinstance(result, PeerUnreachableError)
        raise RuntimeError("another mistake")

    b.react = react
    a.comm.request(1, LeaveRequest(), deadline=soon(), payload=None, done=done)
    assert b.answered.get(timeout=LONG) is False
    texts = [str(heard.wait(text, failed=True).exc_info) for text in ("failed", "failed")]
    assert any("a driver's mistake" in text for text in texts)
    assert any("another mistake" in text for text in texts)


# --- deadlines and deaths -----------------------------------------------------------------------


def test_no_answer_within_the_deadline(two: tuple[Host, Host]) -> None:
    a, b = two
    error = a.ask(1, PullRequest(1, 30.0), bytearray(4), SHORT).get(timeout=LONG)
    assert isinstance(error, PeerTimeoutError)
    assert str(error).startswith("peer-01: ")
    _, key, _ = b.received.get(timeout=LONG)
    b.comm.answer(key, ModelReply(1), payload=Model(b"1234"), deadline=0.0, done=b.answered.put)
    assert b.answered.get(timeout=LONG) is False


def test_a_requester_that_hangs_up_is_noticed(  # [2]
    two: tuple[Host, Host], heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossipx.comm.answering._LOOK", 0.01)
    a, b = two
    a.ask(1, PullRequest(1, 30.0), bytearray(4))
    _, key, _ = b.received.get(timeout=LONG)
    a.comm.close()
    heard.wait("hung up before its request was answered")
    b.answer(key, ModelReply(1), b"1234")
    assert b.answered.get(timeout=LONG) is False


def test_a_requester_that_never_reads_is_given_up(start: Callable[[int], Run]) -> None:  # [9]
    run = start(2)
    a = run.host(0)
    with introduced(a, 1, run.names) as stream:
        stream.sendall(frame(PullRequest(1, 30.0), 5))
        _, key, _ = a.received.get(timeout=LONG)
        model = Model(bytes(64_000_000))
        a.comm.answer(key, ModelReply(1), payload=model, deadline=soon(SHORT), done=a.answered.put)
        assert a.answered.get(timeout=LONG) is False


def test_a_sender_that_dies_in_mid_transfer(start: Callable[[int], Run]) -> None:  # [1]
    run = start(2)
    a = run.host(0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        run.addresses[1] = Address(*listening.getsockname())
        room = bytearray(1000)
        results = a.ask(1, PullRequest(1, 30.0), room)
        stream, _ = listening.accept()
        with stream:
            hello = read_frame(stream)
            assert hello is not None
            assert isinstance(hello.message, Hello)
            stream.sendall(frame(Welcome(1, run.names[1], hello.message.model)))
            request = read_frame(stream)
            assert request is not None
            model = frames.encode(ModelReply(1), request.request, Source(memoryview(bytes(1000))))
            stream.sendall(joined(model)[:-500])
    error = results.get(timeout=LONG)
    assert isinstance(error, PeerUnreachableError)
    assert "closed the connection" in str(error)
    assert results.empty()


def test_nobody_listens(start: Callable[[int], Run]) -> None:
    run = start(2)
    error = run.host(0).ask(1, PullRequest(1, 30.0), bytearray(4)).get(timeout=LONG)
    assert isinstance(error, PeerUnreachableError)
    assert "peer-01: cannot connect to 127.0.0.1:1" in str(error)


def test_a_peer_that_restarted_is_asked_anew(start: Callable[[int], Run]) -> None:  # [36]
    run = start(2)
    a, b = run.host(0), run.host(1)
    for _ in range(3):
        b.serve(b"model")
        room = bytearray(5)
        assert a.ask(1, PullRequest(1, 30.0), room).get(timeout=LONG) == ModelReply(1)
        b.comm.close()
        b = run.host(1, bind=b.comm.address)


def test_a_request_whose_connection_dies_under_it_is_tried_once_more(
    start: Callable[[int], Run],
) -> None:
    run = start(2)
    a = run.host(0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        run.addresses[1] = Address(*listening.getsockname())

        def accept() -> socket.socket:
            stream, _ = listening.accept()
            hello = read_frame(stream)
            assert hello is not None
            assert isinstance(hello.message, Hello)
            stream.sendall(frame(Welcome(1, run.names[1], hello.message.model)))
            return stream

        def request(stream: socket.socket) -> int:
            found = read_frame(stream)
            assert found is not None
            return found.request

        first = a.ask(1, LeaveRequest())
        old = accept()
        old.sendall(frame(HereReply(Stage.TRAIN), request(old)))
        assert first.get(timeout=LONG) == HereReply(Stage.TRAIN)
        second = a.ask(1, LeaveRequest())
        request(old)  # on the connection that was kept ...
        old.close()  # ... which ends without a word
        with accept() as new:
            new.sendall(frame(HereReply(Stage.DONE), request(new)))
            assert second.get(timeout=LONG) == HereReply(Stage.DONE)
        third = a.ask(1, LeaveRequest())
        with accept() as new:
            request(new)  # a new connection that fails is not tried again
        assert isinstance(third.get(timeout=LONG), PeerUnreachableError)


def test_closing_ends_all_that_is_pending(two: tuple[Host, Host]) -> None:
    a, b = two
    asked = [a.ask(1, PullRequest(1, 30.0), bytearray(4)) for _ in range(5)]
    asking = [b.ask(0, ArriveRequest(Stage.START, 1)) for _ in range(5)]
    keys = [b.received.get(timeout=LONG)[1] for _ in asked]
    for _ in asking:
        a.received.get(timeout=LONG)
    b.comm.close()
    b.comm.close()
    for results in asking + asked:
        assert isinstance(results.get(timeout=LONG), PeerUnreachableError)
        assert results.empty()
    for key in keys:
        b.answer(key, ModelReply(1), b"1234")
        assert b.answered.get(timeout=LONG) is False
    error = b.ask(0, LeaveRequest()).get(timeout=LONG)
    assert "peer-01 has ended its connections" in str(error)


def test_closing_does_not_wait_for_a_connection_that_is_being_opened(
    start: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossipx.comm._CLOSE", 0.1)
    entered, over = threading.Event(), threading.Event()

    class Slow:
        def listen(self, address: Address) -> Any:
            return tcp.listen(address)

        def connect(self, address: Address, deadline: float) -> Any:
            entered.set()
            over.wait(LONG)
            raise PeerUnreachableError("too late")

    a = start(2).host(0, transport=Slow())
    results = a.ask(1, LeaveRequest())
    assert entered.wait(LONG)
    a.comm.close()
    assert isinstance(results.get(timeout=LONG), PeerUnreachableError)
    over.set()
    for thread in threading.enumerate():
        if thread.name.startswith("gossipx-ask"):
            thread.join(LONG)
    assert results.empty()


# --- who is let in ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", bytes(100), b"GSPX" + frames.VERSION.to_bytes(2, "big") + b"\xff" * 50],
)
def test_garbage_is_closed_quietly(two: tuple[Host, Host], heard: Heard, garbage: bytes) -> None:
    """[15]"""
    a, b = two
    with knock(b) as stream:
        stream.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            assert stream.recv(100) == b""
    assert heard.wait("the connection from 127.0.0.1").levelno == logging.DEBUG
    b.serve(b"")
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)


def test_another_version_is_told_ours_in_a_frame(two: tuple[Host, Host]) -> None:  # [16]
    with knock(two[0]) as stream:
        hello = bytearray(frame(Hello(1, "peer-01", 2, "the same list", "m")))
        hello[4:6] = b"\x00\x63"
        stream.sendall(hello)
        refused = read_frame(stream)
    assert refused is not None
    assert isinstance(refused.message, Refused)
    assert "version 99" in refused.message.reason
    assert f"version {frames.VERSION}" in refused.message.reason


def test_a_client_of_another_version_names_both(start: Callable[[int], Run]) -> None:  # [16]
    run = start(2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        run.addresses[1] = Address(*listening.getsockname())
        results = run.host(0).ask(1, LeaveRequest())
        stream, _ = listening.accept()
        with stream:
            refused = bytearray(frame(Refused("what a newer version says")))
            refused[4:6] = b"\x00\x63"
            stream.sendall(refused)
            error = results.get(timeout=LONG)
    assert isinstance(error, ProtocolError)
    assert "version 99 " in str(error)
    assert f"version {frames.VERSION}:" in str(error)


def test_another_hosts_file_is_refused(start: Callable[[int], Run]) -> None:
    run = start(2)
    a = run.host(0)
    run.host(1, peers_digest="another list")
    error = a.ask(1, LeaveRequest()).get(timeout=LONG)
    assert isinstance(error, ProtocolError)
    assert "hosts files of peer-00 (2 peers) and peer-01 (2 peers) differ" in str(error)


def test_settings_that_must_be_alike_are_compared(start: Callable[[int], Run]) -> None:
    run = start(3)
    hosts = [run.host(rank, settings={"--mode": mode}) for rank, mode in enumerate(("push", "pull", "push"))]
    for asking, other in ((0, 1), (1, 0)):
        error = hosts[asking].ask(other, LeaveRequest()).get(timeout=LONG)
        assert isinstance(error, ProtocolError)
        assert "--mode is " in str(error) and "; give every peer the same" in str(error)
    assert hosts[0].comm.trust.doubt is not None and not hosts[0].comm.trust.is_outcast, "by one of two"
    asked = hosts[0].ask(2, LeaveRequest())
    _, key, _ = hosts[2].received.get(timeout=LONG)
    hosts[2].answer(key, HereReply(Stage.TRAIN))
    assert asked.get(timeout=LONG) == HereReply(Stage.TRAIN)


def test_a_long_reason_is_told_in_part(start: Callable[[int], Run]) -> None:
    run = start(2)
    hosts = [run.host(rank, settings={"--a": str(rank) * 1000}) for rank in range(2)]
    error = hosts[0].ask(1, LeaveRequest()).get(timeout=LONG)
    assert isinstance(error, RefusedError)
    assert str(error).startswith("peer-01: refused: --a is 0000")


def test_a_cancelled_request_is_told_of_though_the_system_has_no_thread_left(
    start: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*given: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("gossipx.comm.asking.tell_aside", none_left)
    run = start(2)
    a, b = run.host(0), run.host(1)
    for _ in range(20):
        results: queue.Queue[Any] = queue.Queue()
        sink = Bytes(memoryview(bytearray(4)))
        a.comm.request(1, PullRequest(1, 30.0), deadline=soon(), payload=sink, done=results.put)()
        assert isinstance(results.get(timeout=LONG), CancelledError)
        assert results.empty()
    b.serve(b"four")
    room = bytearray(4)
    assert a.ask(1, PullRequest(1, 30.0), room).get(timeout=LONG) == ModelReply(1)


def test_another_peer_at_the_address_is_refused(start: Callable[[int], Run]) -> None:
    run = start(3)
    a, b = run.host(0), run.host(1)
    run.addresses[2] = b.comm.address
    assert "answers peer-01, rank 1, not rank 2" in str(a.ask(2, LeaveRequest()).get(timeout=LONG))
    run.addresses[2] = a.comm.address
    assert "is this peer itself" in str(a.ask(2, LeaveRequest()).get(timeout=LONG))


def test_another_model_names_the_first_tensor(start: Callable[[int], Run]) -> None:  # [21]
    run = start(2)
    a = run.host(0)
    b = run.host(1, manifest=[MANIFEST[0], "bias float32 (11,) (1,)"])
    for asking, other in ((a, 1), (b, 0)):
        error = asking.ask(other, PullRequest(1, 30.0), bytearray(4)).get(timeout=LONG)
        assert isinstance(error, ModelMismatchError)
        assert error.exit_code == 2
    assert str(error) == (
        "peer-00: its model differs: tensor 1 is 'bias float32 (11,) (1,)' here and 'bias float32 (10,) (1,)' there;"
        " build the same model on every host"
    )
    assert a.received.empty()
    assert b.received.empty()


def test_a_peer_of_another_model_is_not_served(start: Callable[[int], Run]) -> None:
    run = start(2)
    a = run.host(0)
    with knock(a) as stream:
        stream.sendall(frame(Hello(1, "peer-01", 2, "the same list", "another model")))
        assert read_frame(stream) is not None
        stream.sendall(frame(PullRequest(1, 30.0), 1))
        refused = read_frame(stream)
    assert refused is not None
    assert refused.message == Refused("the models differ")
    assert a.received.empty()


def test_only_requests_are_served(start: Callable[[int], Run], heard: Heard) -> None:
    run = start(2)
    a = run.host(0)
    with introduced(a, 1, run.names) as stream:
        stream.sendall(frame(HereReply(Stage.DONE)))
        assert read_frame(stream) is None
    heard.wait("it sent HereReply, not a request")
    with knock(a) as stream:
        stream.sendall(frame(LeaveRequest()))
        assert read_frame(stream) is None
    heard.wait("it began with LeaveRequest, not Hello")
    assert a.received.empty()


# --- too much of everything ---------------------------------------------------------------------


def test_idle_strangers_are_shown_the_door_in_time(start: Callable[[int], Run]) -> None:  # [25]
    b = start(2).host(1, peer_timeout=SHORT)
    strangers = [knock(b) for _ in range(20)]
    for stranger in strangers:
        with stranger:
            assert stranger.recv(1) == b""


def test_a_request_that_trickles_in_is_given_up(start: Callable[[int], Run]) -> None:  # [8]
    run = start(2)
    b = run.host(1, peer_timeout=SHORT)
    with introduced(b, 0, run.names) as stream:
        stream.sendall(frame(LeaveRequest())[:10])
        assert stream.recv(1) == b""


def test_above_the_cap_the_oldest_stranger_is_closed(start: Callable[[int], Run], heard: Heard) -> None:  # [25]
    run = start(3)
    # Without memory to share each has one connection, rather than another one for a moment.
    a, b, c = (run.host(rank, share_memory=False, **more) for rank, more in enumerate(({}, {"max_connections": 3}, {})))
    b.serve(b"")
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    strangers = [knock(b) for _ in range(2)]
    for _ in range(20):
        strangers.append(knock(b))
        with strangers.pop(0) as oldest:
            assert oldest.recv(1) == b""
    assert heard.wait("3 connections are open").levelno == logging.WARNING
    # The peer that was there before is served on, and one that comes now is served, too.
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    assert c.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    for stranger in strangers:
        stranger.close()
    while not heard.records.empty():
        assert heard.records.get().levelno == logging.DEBUG  # the warning came once


def test_of_those_who_have_not_said_who_they_are_32_stay_where_there_is_room_for_more(  # [25]
    start: Callable[[int], Run], heard: Heard
) -> None:
    """What is kept free for peers is not given to strangers while there are few peers."""
    run = start(3)
    a, b = run.host(0, share_memory=False), run.host(1)
    b.serve(b"")
    with contextlib.ExitStack() as undo:
        strangers = [undo.enter_context(knock(b)) for _ in range(40)]
        for oldest in strangers[:8]:
            assert oldest.recv(1) == b""
        assert "32 connections are open" in heard.wait("connections are open").getMessage()
        assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
        assert strangers[8].recv(1) == b"", "for the peer that came"
        for other in strangers[9:]:
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(1)


def test_without_room_for_a_stranger_a_new_connection_is_closed(start: Callable[[int], Run]) -> None:  # [25]
    run = start(2)
    # Without memory to share there is one connection, rather than another one for a moment.
    a, b = run.host(0, share_memory=False), run.host(1, max_connections=1)
    b.serve(b"")
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    with knock(b) as stream:
        assert stream.recv(1) == b""
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)


def test_out_of_descriptors_then_well_again(  # [40]
    start: Callable[[int], Run], heard: Heard
) -> None:
    b = start(2).host(1)
    place = b.comm.address
    with socket.socket() as stranger:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            stranger.settimeout(LONG)
            stranger.connect((place.host, place.port))
            warning = heard.wait(os.strerror(errno.EMFILE))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert warning.levelno == logging.WARNING
        stranger.sendall(frame(Hello(0, "peer-00", 2, "another list", "m")))
        assert read_frame(stranger) is not None


def test_the_port_in_use_is_named(two: tuple[Host, Host], start: Callable[[int], Run]) -> None:
    place = two[0].comm.address  # [33]
    with pytest.raises(GossipxError, match=f"{place}.* in use"):
        start(2).host(0, bind=place)


# --- memory that both share ---------------------------------------------------------------------


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The payloads that came beside their connections, by their sizes."""
    taken: list[int] = []
    take = Link._take_beside

    def taking(link: Link, sink: Sink, deadline: float) -> None:
        taken.append(sink.nbytes)
        take(link, sink, deadline)

    monkeypatch.setattr(Link, "_take_beside", taking)
    return taken


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("size", [0, 1, PIECE, 3 * PIECE + 5])
def test_models_on_one_machine_go_through_shared_memory(
    start: Callable[[int], Run], beside: list[int], share: bool, size: int
) -> None:
    run = start(2)
    a, b = run.host(0, share_memory=share), run.host(1)
    for round in range(3):
        model = os.urandom(size)
        b.serve(model)
        room = bytearray(size)
        assert a.ask(1, PullRequest(round, 30.0), room).get(timeout=LONG) == ModelReply(round)
        assert bytes(room) == model
        assert b.answered.get(timeout=LONG) is True
    assert beside == ([size] * 3 if share and size and sys.platform == "linux" else [])
    assert a.comm.bytes_received >= 3 * size
    assert b.comm.bytes_sent >= 3 * size


def test_a_model_that_is_no_shared_memory_goes_over_the_connection(
    start: Callable[[int], Run], beside: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossipx.memory._create", lambda size: None)
    run = start(2)
    a, b = run.host(0), run.host(1)
    b.serve(b"1234")
    room = bytearray(4)
    assert a.ask(1, PullRequest(1, 30.0), room).get(timeout=LONG) == ModelReply(1)
    assert (bytes(room), beside) == (b"1234", [])


def _short(size: int) -> int:
    memory = Memory(size)
    assert memory.descriptor is not None
    return os.dup(memory.descriptor)


@shares_memory
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: os.memfd_create("loose", os.MFD_ALLOW_SEALING), "stays as it is"),  # [1] it could be cut short
        (lambda: os.open(__file__, os.O_RDONLY), "cannot be mapped"),
        (lambda: os.open(os.devnull, os.O_RDONLY), "stays as it is"),
        (lambda: _short(3), "stays as it is"),  # [24] less than was announced
    ],
)
def test_a_descriptor_of_something_else_is_refused(two: tuple[Host, Host], make: Callable[[], int], told: str) -> None:
    a, b = two
    descriptor = make()
    model = Model(b"12345678")
    model.descriptor = descriptor
    room = bytearray(8)
    results = a.ask(1, PullRequest(1, 30.0), room)
    _, key, _ = b.received.get(timeout=LONG)
    b.comm.answer(key, ModelReply(1), payload=model, deadline=soon(), done=b.answered.put)
    error = results.get(timeout=LONG)
    assert isinstance(error, ProtocolError)
    assert told in str(error)
    assert b.answered.get(timeout=LONG) is False
    assert bytes(room) == bytes(8)
    os.close(descriptor)


@shares_memory
def test_a_model_that_is_read_past_the_givers_deadline_is_not_taken(two: tuple[Host, Host]) -> None:  # [3]
    """It may change from then on: the other side was stopped meanwhile, say, and reads what is there now."""
    a, b = two
    late = threading.Event()

    class Stopped(Bytes):
        def take(self, start: int, view: memoryview) -> None:
            late.wait(LONG)
            super().take(start, view)

    results: queue.Queue[Reply | GossipxError] = queue.Queue()
    sink = Stopped(memoryview(bytearray(8)))
    a.comm.request(1, PullRequest(1, 30.0), deadline=soon(), payload=sink, done=results.put)
    _, key, _ = b.received.get(timeout=LONG)
    b.comm.answer(key, ModelReply(1), payload=Model(b"12345678"), deadline=soon(SHORT), done=b.answered.put)
    assert b.answered.get(timeout=LONG) is False
    late.set()
    error = results.get(timeout=LONG)
    assert isinstance(error, PeerUnreachableError)


@shares_memory
def test_who_comes_while_a_peer_starts_shares_memory_with_it(
    start: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that tells of its Unix socket already listens at it."""
    run = start(2)
    a = run.host(0)
    listen = unix.listen
    asked: list[queue.Queue[Reply | GossipxError]] = []

    def known(bind: Address) -> tcp.TcpListener:
        listener = tcp.listen(bind)
        run.addresses[1] = listener.address
        return listener

    def late(address: Address) -> Any:
        asked.append(a.ask(1, PullRequest(1, 30.0), bytearray(4)))
        with pytest.raises(queue.Empty):
            asked[0].get(timeout=SHORT)
        return listen(address)

    monkeypatch.setattr(unix, "listen", late)
    b = run.host(1, transport=SimpleNamespace(listen=known, connect=tcp.connect))
    _, key, _ = b.received.get(timeout=LONG)
    b.answer(key, ModelReply(1), b"1234")
    assert asked[0].get(timeout=LONG) == ModelReply(1)
    assert a.comm._asking._apart == set()


def shares(a: Host, beside: list[int]) -> bool:
    """Whether a model that ``a`` pulls from peer 1 comes in memory that both share."""
    before = len(beside)
    assert a.ask(1, PullRequest(1, 30.0), bytearray(4)).get(timeout=LONG) == ModelReply(1)
    return len(beside) > before


@shares_memory
@pytest.mark.parametrize("only_memory", [True, False])
def test_a_peer_that_dies_before_it_is_reached_by_its_name_is_unreachable_and_no_mistake(  # [1] [36]
    start: Callable[[int], Run], beside: list[int], monkeypatch: pytest.MonkeyPatch, only_memory: bool
) -> None:
    run = start(2)
    a, b = run.host(0, only_memory=only_memory), run.host(1)
    connect = unix.connect

    def dying(address: Address, deadline: float) -> unix.UnixStream:
        b.comm.close()
        return connect(address, deadline)

    with monkeypatch.context() as patched:
        patched.setattr(unix, "connect", dying)
        error = a.ask(1, PullRequest(1, 30.0), bytearray(4)).get(timeout=LONG)
    assert isinstance(error, PeerUnreachableError)
    run.host(1, bind=b.comm.address).serve(b"1234")
    assert shares(a, beside), "what is there now has not been out of reach"


@shares_memory
def test_with_a_peer_in_another_namespace_memory_is_tried_once_until_it_starts_anew(  # [36]
    start: Callable[[int], Run], beside: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(3)
    a, b, strict = run.host(0), run.host(1), run.host(2, only_memory=True)
    b.serve(b"1234")
    tried: list[Address] = []
    connect = unix.connect

    def elsewhere(address: Address, deadline: float) -> unix.UnixStream:
        tried.append(address)
        return connect(Address(f"{address.host}-elsewhere", 0), deadline)

    with monkeypatch.context() as patched:
        patched.setattr(unix, "connect", elsewhere)
        assert not shares(a, beside)
        for link in a.comm._member.links._idle[1]:
            link.stream.abort()  # so that the next request needs a connection of its own
        assert not shares(a, beside)
        assert len(tried) == 1
        error = strict.ask(1, PullRequest(1, 30.0), bytearray(4)).get(timeout=LONG)
        assert isinstance(error, UsageError)
        assert "no memory can be shared with peer-01, as --transport shm wants: use auto" in str(error)
    b.comm.close()
    run.host(1, bind=b.comm.address).serve(b"1234")
    assert shares(a, beside)


@shares_memory
def test_what_keeps_a_peer_from_its_name_for_a_moment_ends_one_request(  # [40]
    start: Callable[[int], Run], beside: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(2)
    a, b = run.host(0, only_memory=True), run.host(1)
    b.serve(b"1234")

    def lacking(address: Address, deadline: float) -> unix.UnixStream:
        raise LocalFaultError("no file descriptor is left")

    with monkeypatch.context() as patched:
        patched.setattr(unix, "connect", lacking)
        assert isinstance(a.ask(1, PullRequest(1, 30.0), bytearray(4)).get(timeout=LONG), LocalFaultError)
    assert shares(a, beside)


def test_an_answer_that_begins_later_is_not_sent_before(start: Callable[[int], Run]) -> None:
    run = start(2)
    a, b = run.host(0), run.host(1)
    asked = a.ask(1, PullRequest(1, 30.0), bytearray(4))
    _, key, _ = b.received.get(timeout=LONG)
    begins = time.monotonic() + 0.2
    b.answer(key, ModelReply(1), b"1234", begins=begins)
    assert asked.get(timeout=LONG) == ModelReply(1)
    assert time.monotonic() >= begins


def test_a_peer_that_does_not_tell_that_it_has_a_model_has_not_got_it(start: Callable[[int], Run]) -> None:  # [42]
    run = start(2)
    a = run.host(0)
    with introduced(a, 1, run.names) as stream:
        stream.sendall(frame(PullRequest(1, 30.0), 5))
        _, key, _ = a.received.get(timeout=LONG)
        a.answer(key, ModelReply(1), b"1234")
        assert read_frame(stream, Bytes(memoryview(bytearray(4)))) is not None
    assert a.answered.get(timeout=LONG) is False
