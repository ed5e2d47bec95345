"""Several CommManagers in one process, over real sockets: requests, responses, deadlines, failures, shared memory."""

from __future__ import annotations

import _thread
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import managers
import pytest
from managers import (
    LONG,
    SHORT,
    Heard,
    Host,
    Model,
    Run,
    frame,
    introduced,
    read_frame,
    settings_of,
    shares_memory,
    soon,
)

from gossipx.errors import (
    GossipxError,
    LocalFaultError,
    PeerUnreachableError,
    ProtocolError,
    UsageError,
)
from gossipx.memory import Memory
from gossipx.protocol.messages import (
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
from gossipx.wire import Bytes, Hello, Sink, Welcome

start, two, heard = managers.start, managers.two, managers.heard
Start = Callable[[int], Run]


# --- requests and responses ---------------------------------------------------------------------


def test_a_message_is_answered_later_without_blocking_others(two: tuple[Host, Host]) -> None:
    a, b = two
    first = a.ask(1, ArriveRequest(Stage.START, 1))
    _, first_key, _ = b.received.get(timeout=LONG)
    second = a.ask(1, LeaveRequest())
    _, second_key, _ = b.received.get(timeout=LONG)
    for first_time in (True, False):  # a key is answered once
        b.answer(second_key, HereReply(Stage.TRAIN, report={"accuracy": 0.5}))
        assert b.answered.get(timeout=LONG) is first_time
    assert second.get(timeout=LONG) == HereReply(Stage.TRAIN, report={"accuracy": 0.5})
    assert first.empty()
    b.answer(first_key, NotReadyReply("not yet"))
    assert first.get(timeout=LONG) == NotReadyReply("not yet")


def test_an_answer_that_takes_longer_than_a_check_of_the_requester(
    two: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, quiet = threading.Semaphore(0), SocketStream.quiet

    def look(stream: SocketStream) -> bool:
        looks.release()
        return quiet(stream)

    monkeypatch.setattr("gossipx.comm.listener._POLL", 0.01)
    monkeypatch.setattr(SocketStream, "quiet", look)
    a, b = two
    results = a.ask(1, LeaveRequest())
    _, key, _ = b.received.get(timeout=LONG)
    for _ in range(3):
        assert looks.acquire(timeout=LONG)
    b.answer(key, HereReply(Stage.TRAIN))
    assert results.get(timeout=LONG) == HereReply(Stage.TRAIN)


def test_invalid_messages_are_refused_in_the_caller(two: tuple[Host, Host]) -> None:
    a, b = two
    with pytest.raises(ValueError, match="step"):
        a.ask(1, PullRequest(-1, 30.0))
    for to in (2, -1):  # rank 0 is the peer itself, which is allowed
        with pytest.raises(ValueError, match=f"rank {to}"):
            a.ask(to, PullRequest(1, 30.0))
    results = a.ask(1, LeaveRequest())
    _, key, _ = b.received.get(timeout=LONG)
    with pytest.raises(ValueError, match="reason"):
        b.answer(key, NotReadyReply("two\nlines"))
    b.answer(key, NotReadyReply("one line"))
    assert results.get(timeout=LONG) == NotReadyReply("one line")


@pytest.mark.fault(24)
def test_a_model_of_another_size_is_refused(two: tuple[Host, Host]) -> None:
    a, b = two
    b.serve(b"12345")
    buffer = bytearray(4)
    error = a.ask(1, PullRequest(1, 30.0), buffer).get(timeout=LONG)
    assert isinstance(error, ProtocolError)
    assert "peer-01" in str(error)
    assert buffer == bytes(4)
    assert isinstance(a.ask(1, PullRequest(1, 30.0)).get(timeout=LONG), ProtocolError)


@pytest.mark.parametrize("way", ["tcp", "tcp, secret", "gloo"])
def test_models_are_sent_no_faster_than_max_rate(start: Start, way: str, tmp_path: Path) -> None:
    """Two concurrent pulls together get the rate, plus the burst."""
    run = start(3)
    sender = run.host(0, max_rate=4e6, **settings_of(way, tmp_path))
    pullers = [run.host(rank, **settings_of(way, tmp_path)) for rank in (1, 2)]
    sender.serve(b"1234")
    for one in pullers:  # this first pull builds connections and carriers
        assert one.ask(0, PullRequest(1, 30.0), bytearray(4)).get(timeout=LONG) == ModelReply(1)
    model = bytes(range(256)) * 4_000
    sender.serve(model)
    buffers = [bytearray(len(model)) for _ in pullers]
    began = time.monotonic()
    asked = [one.ask(0, PullRequest(1, 30.0), buffer) for one, buffer in zip(pullers, buffers, strict=True)]
    assert [one.get(timeout=LONG) for one in asked] == [ModelReply(1)] * 2
    assert time.monotonic() - began >= 2 * len(model) / 4e6 - 0.1
    assert buffers == [model] * 2


def test_a_model_that_max_rate_cannot_send_in_time_is_abandoned(start: Start) -> None:
    run = start(2)
    sender, puller = run.host(0, max_rate=1e3, share_memory=False), run.host(1, share_memory=False)
    result = puller.ask(0, PullRequest(1, 30.0), bytearray(100_000))
    _, key, _ = sender.received.get(timeout=LONG)
    sender.comm.answer(key, ModelReply(1), payload=Model(bytes(100_000)), deadline=soon(0.5), done=sender.answered.put)
    assert isinstance(result.get(timeout=LONG), GossipxError)
    assert sender.answered.get(timeout=LONG) is False
    pace = sender.comm._member.links.pace
    assert pace is not None
    assert pace.reserve(0.0) < 6.0, "of two pieces of 4.1 seconds, only the sent one was reserved"


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


def test_a_failing_callback_is_logged(two: tuple[Host, Host], heard: Heard) -> None:
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


# --- deadlines and failures ---------------------------------------------------------------------


@pytest.mark.fault(2)
def test_a_requester_that_hangs_up_is_noticed(
    two: tuple[Host, Host], heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossipx.comm.listener._POLL", 0.01)
    a, b = two
    a.ask(1, PullRequest(1, 30.0), bytearray(4))
    _, key, _ = b.received.get(timeout=LONG)
    a.comm.close()
    heard.wait("closed the connection before its request was answered")
    b.answer(key, ModelReply(1), b"1234")
    assert b.answered.get(timeout=LONG) is False


@pytest.mark.fault(9)
def test_a_requester_that_never_reads_is_dropped(start: Start) -> None:
    run = start(2)
    a = run.host(0)
    with introduced(a, 1, run.names) as stream:
        stream.sendall(frame(PullRequest(1, 30.0), 5))
        _, key, _ = a.received.get(timeout=LONG)
        model = Model(bytes(64_000_000))
        a.comm.answer(key, ModelReply(1), payload=model, deadline=soon(SHORT), done=a.answered.put)
        assert a.answered.get(timeout=LONG) is False


def test_a_request_on_a_dead_connection_is_retried_once(
    start: Start,
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
        request(old)  # on the idle connection ...
        old.close()  # ... which ends without a reply
        with accept() as new:
            new.sendall(frame(HereReply(Stage.DONE), request(new)))
            assert second.get(timeout=LONG) == HereReply(Stage.DONE)
        third = a.ask(1, LeaveRequest())
        with accept() as new:
            request(new)  # a failed new connection is not retried
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


@pytest.mark.fault(68)
@pytest.mark.parametrize("lack", [RuntimeError("can't start new thread"), MemoryError()], ids=["threads", "memory"])
def test_a_request_for_which_no_thread_can_start_is_refused_whole(
    two: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch, lack: Exception
) -> None:
    """The caller gets an error, and nothing is left that would be sent or told later."""

    def fails(thread: threading.Thread) -> None:
        raise lack

    (one, other), results = two, queue.SimpleQueue()
    other.serve(b"")
    threads = one.comm._member.links.threads
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match=r"new thread|not enough memory"):
            one.comm.request(1, LeaveRequest(), deadline=soon(), payload=None, done=results.put)
    assert one.comm._member.links.threads == threads
    assert one.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    one.comm.close()
    assert results.empty()


@pytest.mark.fault(68)
def test_a_thread_that_cannot_begin_does_not_delay_the_end(
    two: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory a thread may end before it runs, and CPython waits for it for ever in the one that starts it."""
    one, begin, lost = two[0], threading.Thread._bootstrap, queue.SimpleQueue()

    def may_not_begin(thread: threading.Thread) -> None:
        if thread.name.startswith(("gossipx-ask", "gossipx-serve")):
            lost.put(thread)
        else:
            begin(thread)

    monkeypatch.setattr(threading.Thread, "_bootstrap", may_not_begin)
    asking = threading.Thread(target=one.ask, args=(1, LeaveRequest()))
    asking.start()
    asked = lost.get(timeout=LONG)
    with socket.create_connection((one.comm.address.host, one.comm.address.port)):
        served = lost.get(timeout=LONG)
    ending = threading.Thread(target=one.comm.close, daemon=True)
    ending.start()
    ending.join(LONG)
    assert not ending.is_alive()
    monkeypatch.undo()
    for thread in (asked, served):  # let them begin after all, so that no thread is left
        _thread.start_new_thread(begin, (thread,))
    asking.join(LONG)


def test_closing_does_not_wait_for_a_connection_that_is_being_opened(
    start: Start, monkeypatch: pytest.MonkeyPatch
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


def test_an_answer_that_begins_later_is_not_sent_before(start: Start) -> None:
    run = start(2)
    a, b = run.host(0), run.host(1)
    asked = a.ask(1, PullRequest(1, 30.0), bytearray(4))
    _, key, _ = b.received.get(timeout=LONG)
    begins = time.monotonic() + 0.2
    b.answer(key, ModelReply(1), b"1234", begins=begins)
    assert asked.get(timeout=LONG) == ModelReply(1)
    assert time.monotonic() >= begins


@pytest.mark.fault(42)
def test_a_model_without_an_acknowledgement_was_not_delivered(start: Start) -> None:
    run = start(2)
    a = run.host(0)
    with introduced(a, 1, run.names) as stream:
        stream.sendall(frame(PullRequest(1, 30.0), 5))
        _, key, _ = a.received.get(timeout=LONG)
        a.answer(key, ModelReply(1), b"1234")
        assert read_frame(stream, Bytes(memoryview(bytearray(4)))) is not None
    assert a.answered.get(timeout=LONG) is False


# --- shared memory ------------------------------------------------------------------------------


@pytest.fixture
def out_of_band(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the sizes of payloads received in shared memory."""
    taken: list[int] = []
    take = Link._take_out_of_band

    def taking(link: Link, sink: Sink, deadline: float) -> None:
        taken.append(sink.nbytes)
        take(link, sink, deadline)

    monkeypatch.setattr(Link, "_take_out_of_band", taking)
    return taken


def test_a_model_outside_shared_memory_uses_the_connection(
    start: Start, out_of_band: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossipx.memory._create", lambda size: None)
    run = start(2)
    a, b = run.host(0), run.host(1)
    b.serve(b"1234")
    buffer = bytearray(4)
    assert a.ask(1, PullRequest(1, 30.0), buffer).get(timeout=LONG) == ModelReply(1)
    assert (bytes(buffer), out_of_band) == (b"1234", [])


def _short(size: int) -> int:
    memory = Memory(size)
    assert memory.descriptor is not None
    return os.dup(memory.descriptor)


@shares_memory
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: os.memfd_create("loose", os.MFD_ALLOW_SEALING),
            "sealed against truncation",
        ),  # it could be cut short
        (lambda: os.open(__file__, os.O_RDONLY), "cannot be mapped"),
        (lambda: os.open(os.devnull, os.O_RDONLY), "sealed against truncation"),
        (lambda: _short(3), "sealed against truncation"),  # less than was announced
    ],
)
def test_a_descriptor_of_something_else_is_refused(two: tuple[Host, Host], make: Callable[[], int], told: str) -> None:
    a, b = two
    descriptor = make()
    model = Model(b"12345678")
    model.descriptor = descriptor
    buffer = bytearray(8)
    results = a.ask(1, PullRequest(1, 30.0), buffer)
    _, key, _ = b.received.get(timeout=LONG)
    b.comm.answer(key, ModelReply(1), payload=model, deadline=soon(), done=b.answered.put)
    error = results.get(timeout=LONG)
    assert isinstance(error, ProtocolError)
    assert told in str(error)
    assert b.answered.get(timeout=LONG) is False
    assert bytes(buffer) == bytes(8)
    os.close(descriptor)


@shares_memory
@pytest.mark.fault(3)
def test_a_model_read_after_the_senders_deadline_is_not_accepted(two: tuple[Host, Host]) -> None:
    """The memory may change after the deadline, for example if the receiver was suspended meanwhile."""
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
def test_a_connection_during_startup_shares_memory(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer listens at its Unix socket before it announces it."""
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
    assert a.comm._client._unreachable_locally == set()


def shares(a: Host, out_of_band: list[int]) -> bool:
    """Return whether a model that ``a`` pulls from peer 1 arrives in shared memory."""
    before = len(out_of_band)
    assert a.ask(1, PullRequest(1, 30.0), bytearray(4)).get(timeout=LONG) == ModelReply(1)
    return len(out_of_band) > before


@shares_memory
@pytest.mark.parametrize("only_memory", [True, False])
@pytest.mark.fault(1, 36)
def test_a_peer_that_dies_before_its_unix_socket_is_used_is_unreachable(
    start: Start, out_of_band: list[int], monkeypatch: pytest.MonkeyPatch, only_memory: bool
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
    assert shares(a, out_of_band), "the new process has not been out of reach"


@shares_memory
@pytest.mark.fault(36)
def test_shared_memory_with_another_namespace_is_tried_once_per_process(
    start: Start, out_of_band: list[int], monkeypatch: pytest.MonkeyPatch
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
        assert not shares(a, out_of_band)
        for link in a.comm._member.links._idle[1]:
            link.stream.abort()  # so that the next request needs a connection of its own
        assert not shares(a, out_of_band)
        assert len(tried) == 1
        error = strict.ask(1, PullRequest(1, 30.0), bytearray(4)).get(timeout=LONG)
        assert isinstance(error, UsageError)
        assert "--transport shm: no memory can be shared with peer-01; use --transport auto" in str(error)
    b.comm.close()
    run.host(1, bind=b.comm.address).serve(b"1234")
    assert shares(a, out_of_band)


@shares_memory
@pytest.mark.fault(40)
def test_a_temporary_failure_of_the_unix_socket_fails_one_request(
    start: Start, out_of_band: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(2)
    a, b = run.host(0, only_memory=True), run.host(1)
    b.serve(b"1234")

    def lacking(address: Address, deadline: float) -> unix.UnixStream:
        raise LocalFaultError("no file descriptor is left")

    with monkeypatch.context() as patched:
        patched.setattr(unix, "connect", lacking)
        assert isinstance(a.ask(1, PullRequest(1, 30.0), bytearray(4)).get(timeout=LONG), LocalFaultError)
    assert shares(a, out_of_band)
