"""The contract of every transport for models, in replies and in requests, between CommManagers over connections."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks.client import Piped
from managers import LONG, SHORT, TRANSPORTS, Host, Model, UploadBuffer, ended, runs, settings_of, shares_memory, soon
from responder import model

from gossipx.errors import CancelledError, GossipxError, PeerTimeoutError, PeerUnreachableError
from gossipx.memory import PIECE, Memory, Source
from gossipx.protocol.messages import (
    BusyReply,
    ElasticRequest,
    HereReply,
    LeaveRequest,
    ModelReply,
    PullRequest,
    Reply,
    Stage,
)
from gossipx.transports import Address
from gossipx.transports.unix import UnixStream
from gossipx.wire import Bytes

MODEL = 64 * PIECE  # more than any transport buffers
PAST_ALL_32_BITS = 2**31 + 100 * PIECE + 12


@pytest.fixture
def sender(way: str, tmp_path: Path) -> Iterator[Callable[..., tuple[Piped, int]]]:
    """Yield a function that starts a process which serves ``model(MODEL)``, and returns it and its port."""
    with contextlib.ExitStack() as undo:

        def started(port: int = 0) -> tuple[Piped, int]:
            script = Path(__file__).parents[1] / "responder.py"
            process = undo.enter_context(Piped(script, way, tmp_path, str(MODEL), str(port)))
            return process, int(process.stdout.readline())

        yield started


class During(UploadBuffer):
    """A buffer for a model; ``first`` is called once a part of it has arrived."""

    def __init__(self, size: int, first: Callable[[], None]):
        super().__init__(memoryview(bytearray(size)))
        self._first: Callable[[], None] | None = first

    def buffer_at(self, start: int) -> memoryview:
        return self.view[start : start + PIECE]

    def filled(self, start: int) -> None:
        self._began()

    def take(self, start: int, view: memoryview) -> None:
        super().take(start, view)
        self._began()

    def _began(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            first()


class Paused(During):
    """A buffer that takes the rest of its model once ``go_on`` is set.

    Attributes:
        began: is set once a part of the model has arrived.
        dropped: is set once the buffer was released.
    """

    def __init__(self, size: int):
        super().__init__(size, self._pause)
        self.began, self.go_on, self.dropped = threading.Event(), threading.Event(), threading.Event()

    def _pause(self) -> None:
        self.began.set()
        assert self.go_on.wait(LONG)

    def release(self) -> None:
        super().release()
        self.dropped.set()


Results = queue.Queue[Reply | GossipxError]


def begin(host: Host, to: int, sink: Bytes | Marks, seconds: float = LONG) -> tuple[Results, Callable[[], None]]:
    """Begin a pull; return a queue for its result, and a function that cancels it."""
    results: Results = queue.Queue()
    cancel = host.comm.request(to, PullRequest(1, 30.0), deadline=soon(seconds), payload=sink, done=results.put)
    return results, cancel


def pull(host: Host, to: int, sink: Bytes | Marks, seconds: float = LONG) -> Results:
    return begin(host, to, sink, seconds)[0]


def pulled(host: Host, to: int, size: int) -> bytes:
    buffer = bytearray(size)
    assert host.ask(to, PullRequest(1, 30.0), buffer).get(timeout=LONG) == ModelReply(1)
    return bytes(buffer)


# --- what arrives -------------------------------------------------------------------------------


@pytest.mark.every_transport
@pytest.mark.parametrize("size", [0, 4, 9 * PIECE + 12])
def test_models_arrive_unchanged_and_are_counted(start: Callable[[int], list[Host]], size: int) -> None:
    a, b = start(2)
    for round in range(3):
        given = os.urandom(size)
        b.serve(given)
        assert pulled(a, 1, size) == given
        assert b.answered.get(timeout=LONG) is True
        assert a.comm.bytes_received >= (round + 1) * size
    ended(a, b)
    assert a.comm.bytes_received == b.comm.bytes_sent < 3 * size + 10_000
    assert a.comm.bytes_sent == b.comm.bytes_received < 10_000


@pytest.mark.every_transport
def test_models_and_messages_alternate_on_one_connection(
    start: Callable[[int], list[Host]],
) -> None:
    a, b = start(2)

    def answer(key: Any, request: Any) -> None:
        if isinstance(request, PullRequest):
            b.answer(key, ModelReply(request.step), request.step.to_bytes(4, "big") * 300_000)
        else:
            b.answer(key, HereReply(Stage.TRAIN))

    b.react = answer
    for step in range(20):
        buffer = bytearray(1_200_000)
        assert a.ask(1, PullRequest(step, 30.0), buffer).get(timeout=LONG) == ModelReply(step)
        assert buffer == step.to_bytes(4, "big") * 300_000
        assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    assert len(b.comm._listener._inbound) == 1


class Giant(Source):
    """A model of zeros with a mark at the start of each piece, so that most of it need not be written."""

    def __init__(self, size: int):
        self._memory = Memory(size)
        super().__init__(self._memory.view, self._memory.descriptor)
        for start in range(0, size, PIECE):
            self.view[start : start + 4] = (start // PIECE).to_bytes(4, "big")


class Marks:
    """Checks that the pieces of a giant arrive in order, without storing them."""

    def __init__(self, size: int):
        self.nbytes, self.seen = size, 0
        self._buffer = memoryview(bytearray(PIECE))

    def buffer_at(self, start: int) -> memoryview:
        return self._buffer[: min(PIECE, self.nbytes - start)]

    def filled(self, start: int) -> None:
        self.take(start, self.buffer_at(start))

    def take(self, start: int, view: memoryview) -> None:
        assert start == self.seen
        for done in range(0, len(view), PIECE):
            piece = view[done : done + PIECE]
            assert piece[:4] == ((start + done) // PIECE).to_bytes(4, "big")
            assert not np.frombuffer(piece[4:], dtype=np.uint8).any()
        self.seen += len(view)


@pytest.mark.slow
def test_a_model_of_more_than_2_gb(start: Callable[[int], list[Host]]) -> None:
    a, b = start(2)
    giant, marks = Giant(PAST_ALL_32_BITS), Marks(PAST_ALL_32_BITS)
    b.react = lambda key, request: b.comm.answer(
        key, ModelReply(1), payload=giant, deadline=soon(), done=b.answered.put
    )
    assert pull(a, 1, marks).get(timeout=LONG) == ModelReply(1)
    assert marks.seen == PAST_ALL_32_BITS
    assert b.answered.get(timeout=LONG) is True


# --- concurrency --------------------------------------------------------------------------------


@pytest.mark.every_transport
@pytest.mark.fault(27)
def test_mutual_and_circular_pulls_do_not_deadlock(start: Callable[[int], list[Host]]) -> None:
    """A pulls B while B pulls A, and a ring of four, concurrently."""
    hosts = start(4)
    models = [os.urandom(2_000_000) for _ in hosts]
    for host, given in zip(hosts, models, strict=True):
        host.serve(given)
    pulls = []
    for _ in range(3):
        for rank in range(4):
            for to in ((rank + 1) % 4, rank ^ 1):
                buffer = bytearray(2_000_000)
                pulls.append((to, buffer, hosts[rank].ask(to, PullRequest(1, 30.0), buffer)))
    for to, buffer, results in pulls:
        assert results.get(timeout=LONG) == ModelReply(1)
        assert buffer == models[to]


def test_64_peers_pull_from_one_at_once(start: Callable[[int], list[Host]]) -> None:
    hosts = start(65)
    given = os.urandom(300_000)
    hosts[0].serve(given)
    buffers = [bytearray(300_000) for _ in hosts[1:]]
    pulls = [host.ask(0, PullRequest(1, 30.0), buffer) for host, buffer in zip(hosts[1:], buffers, strict=True)]
    for buffer, results in zip(buffers, pulls, strict=True):
        assert results.get(timeout=LONG) == ModelReply(1)
        assert buffer == given


# --- failures -----------------------------------------------------------------------------------


def half_close(host: Host, but: set[Any]) -> set[Any]:
    """Half-close all connections except ``but``, which may still receive; return those that were closed."""
    said = set()
    for link in set(host.comm._member.links._links) - but:
        stream: Any = link.stream
        with contextlib.suppress(OSError):  # the manager closes TCP once memory is shared
            getattr(stream, "_below", stream)._socket.shutdown(socket.SHUT_WR)
            said.add(link)
    return said


@pytest.mark.parametrize("whose", [0, 1])
def test_a_half_closed_connection_is_not_reused(start: Callable[[int], list[Host]], whose: int) -> None:
    hosts = start(2)
    closed: set[Any] = set()
    for _ in range(3):
        given = os.urandom(2_000_000)
        hosts[1].serve(given)
        assert pulled(hosts[0], 1, len(given)) == given
        closing = half_close(hosts[whose], closed)
        assert closing, "a new connection has been made"
        closed |= closing


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.fault(1, 2)
def test_closing_in_the_middle_of_a_model_ends_it_on_both_sides(start: Callable[[int], list[Host]], whose: int) -> None:
    hosts = start(3)
    hosts[1].serve(model(MODEL))
    results = pull(hosts[0], 1, paused := Paused(MODEL))
    assert paused.began.wait(LONG)
    closing = threading.Thread(target=hosts[whose].comm.close)
    closing.start()
    assert hosts[1].answered.get(timeout=LONG) is False  # while the receiver continues
    paused.go_on.set()
    closing.join(LONG)
    assert isinstance(results.get(timeout=LONG), PeerUnreachableError)
    if whose == 0:  # and the sender still sends
        assert pulled(hosts[2], 1, MODEL) == model(MODEL)
    assert results.empty()


def test_a_pull_cancelled_in_the_middle_ends_alone_on_both_sides(start: Callable[[int], list[Host]]) -> None:
    hosts = start(2)
    hosts[1].serve(model(MODEL))
    results, cancel = begin(hosts[0], 1, paused := Paused(MODEL))
    buffer = bytearray(MODEL)
    other = hosts[0].ask(1, PullRequest(1, 30.0), buffer)
    assert paused.began.wait(LONG)
    assert other.get(timeout=LONG) == ModelReply(1) and buffer == model(MODEL)
    assert hosts[1].answered.get(timeout=LONG) is True
    cancel()
    assert hosts[1].answered.get(timeout=LONG) is False  # while the receiver continues
    assert results.empty(), "its buffer is still being written to"
    paused.go_on.set()
    assert isinstance(results.get(timeout=LONG), CancelledError)
    assert hosts[0].comm.bytes_received <= hosts[1].comm.bytes_sent, "sent bytes count even if they were lost"
    cancel()
    assert pulled(hosts[0], 1, MODEL) == model(MODEL)
    assert results.empty()


@pytest.mark.parametrize("how", [CancelledError, PeerTimeoutError])
@pytest.mark.fault(7)
def test_a_pull_that_ends_before_it_is_answered(start: Callable[[int], list[Host]], how: type[GossipxError]) -> None:
    a, b = start(2)
    b.serve(model(PIECE))
    assert pulled(a, 1, PIECE) == model(PIECE)
    assert b.answered.get(timeout=LONG) is True
    b.received.get(timeout=LONG)
    b.react = None
    buffer = Bytes(memoryview(bytearray(PIECE)))
    results, cancel = begin(a, 1, buffer, SHORT if how is PeerTimeoutError else LONG)
    _, key, _ = b.received.get(timeout=LONG)
    if how is CancelledError:
        cancel()
    assert isinstance(results.get(timeout=LONG), how)
    b.answer(key, ModelReply(1), model(PIECE))
    assert b.answered.get(timeout=LONG) is False, "it came too late"
    assert buffer.view == bytes(PIECE)
    b.serve(model(PIECE))
    assert pulled(a, 1, PIECE) == model(PIECE)


def test_a_pull_cancelled_at_once(start: Callable[[int], list[Host]]) -> None:
    """Before it has a connection, or while one is opened, it ends exactly once."""
    a, b = start(2)
    b.serve(model(PIECE))
    for _ in range(20):
        buffer = Bytes(memoryview(bytearray(PIECE)))
        results, cancel = begin(a, 1, buffer)
        cancel()
        result = results.get(timeout=LONG)
        assert isinstance(result, CancelledError) or (result == ModelReply(1) and buffer.view == model(PIECE))
        assert results.empty()
    assert pulled(a, 1, PIECE) == model(PIECE)


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.fault(7)
def test_a_connection_half_closed_within_a_model_is_not_reused(
    start: Callable[[int], list[Host]], way: str, whose: int
) -> None:
    """A model is not accepted unless it can be acknowledged, and the next one uses a new connection."""
    hosts = start(2)
    hosts[1].serve(model(MODEL))
    assert pulled(hosts[0], 1, MODEL) == model(MODEL)
    assert hosts[1].answered.get(timeout=LONG) is True
    closed: set[Any] = set()
    result = pull(hosts[0], 1, During(MODEL, lambda: closed.update(half_close(hosts[whose], set())))).get(timeout=LONG)
    assert closed
    whole = whose == 1 and "shm" in way  # it was sent at once, and can still be acknowledged
    assert result == ModelReply(1) if whole else isinstance(result, PeerUnreachableError)
    assert hosts[1].answered.get(timeout=LONG) is whole
    assert pulled(hosts[0], 1, MODEL) == model(MODEL)


@pytest.mark.parametrize("way", [pytest.param(name, marks=shares_memory) for name in TRANSPORTS if "shm" in name])
@pytest.mark.fault(3, 7)
def test_a_sender_that_stops_before_passing_its_memory_has_a_deadline(
    start: Callable[[int], list[Host]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the frame that announces a model and the descriptor of its memory."""
    a, b = start(2)
    b.serve(model(PIECE))
    given_up = threading.Event()
    hand_over, stopped = UnixStream.send_descriptor, []

    def stop(stream: UnixStream, descriptor: int, deadline: float) -> None:
        stopped.append(descriptor)
        assert given_up.wait(LONG)
        hand_over(stream, descriptor, deadline)

    buffer = bytearray(PIECE)
    with monkeypatch.context() as patched:
        patched.setattr(UnixStream, "send_descriptor", stop)
        error = a.ask(1, PullRequest(1, 30.0), buffer, SHORT).get(timeout=LONG)
        given_up.set()
        assert b.answered.get(timeout=LONG) is False
    assert isinstance(error, PeerTimeoutError)
    assert len(stopped) == 1
    assert buffer == bytes(PIECE)
    assert pulled(a, 1, PIECE) == model(PIECE)


@pytest.mark.fault(3)
def test_a_sender_that_stops_within_a_model_has_a_deadline(
    start: Callable[[int], list[Host]], way: str, sender: Callable[..., tuple[Piped, int]]
) -> None:
    process, port = sender()
    host = start_with(start, port)
    assert pulled(host, 1, MODEL) == model(MODEL)
    stopped = threading.Event()

    def stop() -> None:
        process.send_signal(signal.SIGSTOP)
        stopped.set()

    result = pull(host, 1, During(MODEL, stop), 2 * SHORT).get(timeout=LONG)
    assert stopped.is_set()
    process.send_signal(signal.SIGCONT)
    if "shm" in way:  # it was sent at once
        assert result == ModelReply(1)
    else:
        assert isinstance(result, PeerTimeoutError)
    assert pulled(host, 1, MODEL) == model(MODEL)


@pytest.mark.fault(1)
def test_a_sender_that_dies_within_a_model_can_be_asked_again_after_a_restart(
    start: Callable[[int], list[Host]], way: str, sender: Callable[..., tuple[Piped, int]]
) -> None:
    process, port = sender()
    host = start_with(start, port)

    def die() -> None:
        process.kill()
        process.wait()

    result = pull(host, 1, During(MODEL, die)).get(timeout=LONG)
    assert process.returncode == -signal.SIGKILL
    if "shm" in way:  # shared memory outlives the sender
        assert result == ModelReply(1) or isinstance(result, PeerUnreachableError)
    else:
        assert isinstance(result, PeerUnreachableError)
    sender(port)
    assert pulled(host, 1, MODEL) == model(MODEL)


def start_with(start: Callable[[int], list[Host]], port: int) -> Host:
    """Start peer 0 of two, where the other one is a separate process."""
    host, other = start(2)
    other.comm.close()
    addresses: Any = host.comm._member.addresses
    addresses[1] = Address("127.0.0.1", port)
    return host


# --- requests that carry a model ----------------------------------------------------------------


def elastic(number: int = 1, patience: float = 30.0) -> ElasticRequest:
    return ElasticRequest(incarnation=7, number=number, step=number, patience=patience)


def answers(host: Host, gives: bytes | None) -> None:
    """Make ``host`` answer all exchanges with a model, or with "busy"."""

    def react(key: object, request: object) -> None:
        if gives is None:
            host.answer(key, BusyReply())
        elif isinstance(request, ElasticRequest):
            host.answer(key, ModelReply(request.step), gives)
        else:
            host.answer(key, HereReply(Stage.TRAIN))

    host.react = react


def without_memory(host: Host) -> threading.Event:
    """Return an event that gives ``host`` memory for uploads, which wait for it."""
    free = threading.Event()

    def sink_for(sender: int, request: object) -> UploadBuffer:
        assert free.wait(LONG)
        return UploadBuffer(memoryview(bytearray(MODEL)))

    host.comm._listener._sink_for = sink_for
    return free


@pytest.mark.every_transport
@pytest.mark.parametrize("size", [0, 4, 9 * PIECE + 12])
def test_a_model_goes_each_way_in_one_round_trip(start: Callable[[int], list[Host]], size: int) -> None:
    a, b = start(2)
    b.capacity = size
    for number in range(1, 4):
        upload, gives, buffer = os.urandom(size), os.urandom(size), bytearray(size)
        answers(b, gives)
        assert a.ask(1, elastic(number), buffer, upload=upload).get(timeout=LONG) == ModelReply(number)
        assert b.uploads.get(timeout=LONG) == upload
        assert buffer == gives
        assert b.answered.get(timeout=LONG) is True
    assert [taken.released for taken in b.buffers] == [1, 1, 1]
    ended(a, b)
    assert a.comm.bytes_sent == b.comm.bytes_received >= 3 * size
    assert b.comm.bytes_sent == a.comm.bytes_received >= 3 * size


@pytest.mark.every_transport
def test_an_upload_may_be_answered_without_a_model(start: Callable[[int], list[Host]]) -> None:
    a, b = start(2)
    b.capacity = PIECE
    answers(b, None)
    buffer = bytearray(PIECE)
    assert a.ask(1, elastic(), buffer, upload=model(PIECE)).get(timeout=LONG) == BusyReply()
    assert buffer == bytes(PIECE)
    answers(b, model(PIECE))  # the connection is still usable
    assert a.ask(1, elastic(2), buffer, upload=model(PIECE)).get(timeout=LONG) == ModelReply(2)
    assert buffer == model(PIECE)


def test_messages_continue_while_an_upload_waits_for_memory(start: Callable[[int], list[Host]]) -> None:
    """Memory is bounded: a payload waits on its own connection, without blocking others."""
    a, b = start(2)
    free = without_memory(b)
    answers(b, model(PIECE))
    buffer = bytearray(PIECE)
    waits = a.ask(1, elastic(), buffer, upload=model(MODEL))
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    assert waits.empty()
    free.set()
    assert waits.get(timeout=LONG) == ModelReply(1)
    assert b.uploads.get(timeout=LONG) == model(MODEL)


def test_a_too_large_upload_is_refused_before_it_is_received(start: Callable[[int], list[Host]]) -> None:
    a, b = start(2)
    b.capacity = PIECE
    result = a.ask(1, elastic(), bytearray(PIECE), upload=model(2 * PIECE)).get(timeout=LONG)
    assert isinstance(result, PeerUnreachableError)
    assert b.received.empty()
    assert b.buffers and all(taken.released == 1 for taken in b.buffers)


@pytest.mark.fault(9)
def test_a_receiver_without_memory_has_the_senders_deadline(start: Callable[[int], list[Host]]) -> None:
    a, b = start(2)
    free = without_memory(b)
    result = a.ask(1, elastic(), bytearray(PIECE), seconds=SHORT, upload=model(MODEL)).get(timeout=LONG)
    free.set()
    assert isinstance(result, PeerTimeoutError)


def test_an_upload_can_be_cancelled_in_the_middle(start: Callable[[int], list[Host]]) -> None:
    a, b = start(2)
    b.capacity = MODEL
    paused = Paused(MODEL)
    b.comm._listener._sink_for = lambda sender, request: paused
    results: queue.Queue[object] = queue.Queue()
    upload = Model(model(MODEL))
    cancel = a.comm.request(1, elastic(), deadline=soon(), payload=None, done=results.put, upload=upload)
    assert paused.began.wait(LONG)
    cancel()
    paused.go_on.set()
    assert isinstance(results.get(timeout=LONG), CancelledError)


@pytest.mark.fault(1)
def test_a_sender_that_dies_within_an_upload_leaves_nothing(way: str, tmp_path: Path) -> None:
    """Its partial payload is dropped, the buffer released, and the request not passed on."""
    with runs() as make:
        host = make(2).host(0, **settings_of(way, tmp_path))
        paused = Paused(MODEL)
        host.comm._listener._sink_for = lambda sender, request: paused
        script = Path(__file__).parents[1] / "uploader.py"
        with Piped(script, way, tmp_path, str(MODEL), str(host.comm.address.port)) as uploader:
            assert paused.began.wait(LONG)
            uploader.kill()
            uploader.wait(LONG)
        paused.go_on.set()
        if "shm" not in way:  # with shared memory the payload outlives its sender
            assert paused.dropped.wait(LONG)
            assert host.received.empty()


# --- loopback -----------------------------------------------------------------------------------


def test_a_peer_can_upload_to_itself(start: Callable[[int], list[Host]]) -> None:
    """As a hub that also trains does: through the same interface, with nothing on the wire."""
    [a] = start(1)
    a.capacity = 5 * PIECE
    answers(a, model(3 * PIECE))
    buffer = bytearray(3 * PIECE)
    assert a.ask(0, elastic(), buffer, upload=model(5 * PIECE)).get(timeout=LONG) == ModelReply(1)
    assert a.uploads.get(timeout=LONG) == model(5 * PIECE) and buffer == model(3 * PIECE)
    assert a.received.get(timeout=LONG)[0] == 0
    assert a.answered.get(timeout=LONG) is True
    assert a.comm.bytes_sent == a.comm.bytes_received == 0


def test_a_request_to_itself_has_a_deadline_and_can_be_cancelled(start: Callable[[int], list[Host]]) -> None:
    [a] = start(1)
    a.capacity = 1
    assert isinstance(a.ask(0, elastic(), seconds=0.1, upload=b"x").get(timeout=LONG), PeerTimeoutError)
    results: queue.Queue[object] = queue.Queue()
    cancel = a.comm.request(0, LeaveRequest(), deadline=soon(), payload=None, done=results.put)
    a.received.get(timeout=LONG)
    a.received.get(timeout=LONG)
    cancel()
    assert isinstance(results.get(timeout=LONG), CancelledError)
    a.comm.close()
    assert isinstance(a.ask(0, LeaveRequest()).get(timeout=LONG), PeerUnreachableError)
