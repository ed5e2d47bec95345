"""CommManagers on one machine: models in shared memory."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import managers
import pytest
from managers import LONG, SHORT, Host, Model, Run, frame, introduced, read_frame, shares_memory, soon

from gossipx.errors import GossipxError, LocalFaultError, PeerUnreachableError, ProtocolError, UsageError
from gossipx.memory import Memory
from gossipx.protocol.messages import ModelReply, PullRequest, Reply
from gossipx.transports import Address, tcp, unix
from gossipx.transports.link import Link
from gossipx.wire import Bytes, Sink

start, two, heard = managers.start, managers.two, managers.heard


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
    start: Callable[[int], Run], out_of_band: list[int], monkeypatch: pytest.MonkeyPatch
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
def test_a_connection_during_startup_shares_memory(
    start: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    start: Callable[[int], Run], out_of_band: list[int], monkeypatch: pytest.MonkeyPatch, only_memory: bool
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
    start: Callable[[int], Run], out_of_band: list[int], monkeypatch: pytest.MonkeyPatch
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
    start: Callable[[int], Run], out_of_band: list[int], monkeypatch: pytest.MonkeyPatch
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


def test_an_answer_that_begins_later_is_not_sent_before(start: Callable[[int], Run]) -> None:
    run = start(2)
    a, b = run.host(0), run.host(1)
    asked = a.ask(1, PullRequest(1, 30.0), bytearray(4))
    _, key, _ = b.received.get(timeout=LONG)
    begins = time.monotonic() + 0.2
    b.answer(key, ModelReply(1), b"1234", begins=begins)
    assert asked.get(timeout=LONG) == ModelReply(1)
    assert time.monotonic() >= begins


@pytest.mark.fault(42)
def test_a_model_without_an_acknowledgement_was_not_delivered(start: Callable[[int], Run]) -> None:
    run = start(2)
    a = run.host(0)
    with introduced(a, 1, run.names) as stream:
        stream.sendall(frame(PullRequest(1, 30.0), 5))
        _, key, _ = a.received.get(timeout=LONG)
        a.answer(key, ModelReply(1), b"1234")
        assert read_frame(stream, Bytes(memoryview(bytearray(4)))) is not None
    assert a.answered.get(timeout=LONG) is False
