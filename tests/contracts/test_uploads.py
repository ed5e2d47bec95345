"""The contract of every transport for requests that carry a model, between CommManagers over real connections."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from arriving import Paused
from forks.client import Piped
from managers import LONG, SHORT, Host, Model, UploadBuffer, ended, runs, settings_of, soon
from responder import model

from gossipx.errors import CancelledError, PeerTimeoutError, PeerUnreachableError
from gossipx.memory import PIECE
from gossipx.protocol.messages import BusyReply, ElasticRequest, HereReply, LeaveRequest, ModelReply, Stage

LARGE = 64 * PIECE  # more than any transport buffers


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
        return UploadBuffer(memoryview(bytearray(LARGE)))

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
    waits = a.ask(1, elastic(), buffer, upload=model(LARGE))
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    assert waits.empty()
    free.set()
    assert waits.get(timeout=LONG) == ModelReply(1)
    assert b.uploads.get(timeout=LONG) == model(LARGE)


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
    result = a.ask(1, elastic(), bytearray(PIECE), seconds=SHORT, upload=model(LARGE)).get(timeout=LONG)
    free.set()
    assert isinstance(result, PeerTimeoutError)


def test_an_upload_can_be_cancelled_in_the_middle(start: Callable[[int], list[Host]]) -> None:
    a, b = start(2)
    b.capacity = LARGE
    paused = Paused(LARGE)
    b.comm._listener._sink_for = lambda sender, request: paused
    results: queue.Queue[object] = queue.Queue()
    upload = Model(model(LARGE))
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
        paused = Paused(LARGE)
        host.comm._listener._sink_for = lambda sender, request: paused
        script = Path(__file__).parents[1] / "uploader.py"
        with Piped(script, way, tmp_path, str(LARGE), str(host.comm.address.port)) as uploader:
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
