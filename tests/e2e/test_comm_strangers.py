"""CommManagers over real sockets: which connections they admit, and how many."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import re
import resource
import socket
from collections.abc import Callable
from typing import Any

import managers
import pytest
from managers import LONG, MANIFEST, SHORT, Heard, Host, Run, frame, introduced, knock, read_frame, soon

from gossipx.errors import CancelledError, ModelMismatchError, ProtocolError, RefusedError
from gossipx.protocol.messages import HereReply, LeaveRequest, ModelReply, PullRequest, Stage
from gossipx.wire import Bytes, Hello, Refused, frames

start, two, heard = managers.start, managers.two, managers.heard


# --- admission ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", bytes(100), b"GSPX" + frames.VERSION.to_bytes(2, "big") + b"\xff" * 50],
)
@pytest.mark.fault(15)
def test_garbage_is_closed_quietly(two: tuple[Host, Host], heard: Heard, garbage: bytes) -> None:
    a, b = two
    with knock(b) as stream:
        stream.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            assert stream.recv(100) == b""
    assert heard.wait("the connection from 127.0.0.1").levelno == logging.DEBUG
    b.serve(b"")
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)


@pytest.mark.fault(12)
def test_a_damaged_frame_is_refused_counted_and_told_once_a_minute(two: tuple[Host, Host], heard: Heard) -> None:
    """It was closed without a word above the level of debugging."""
    a, b = two
    for _ in range(3):
        with knock(b) as stream:
            hello = bytearray(frame(Hello(0, "peer-00", 2, "the same list", "m")))
            hello[-2] ^= 1
            stream.sendall(hello)
            with contextlib.suppress(ConnectionResetError):
                assert stream.recv(100) == b""
    told = heard.wait("does not match its checksum: it is refused")
    assert told.levelno == logging.WARNING and re.search(r"\([123] refused so far\)", told.getMessage())
    assert (a.comm.counts["corrupted"], b.comm.counts["corrupted"]) == (0, 3)
    assert not any("it is refused" in record.getMessage() for record in list(heard.records.queue))
    b.serve(b"")
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)


@pytest.mark.fault(16)
def test_a_peer_of_another_version_learns_ours_in_a_frame(two: tuple[Host, Host]) -> None:
    with knock(two[0]) as stream:
        hello = bytearray(frame(Hello(1, "peer-01", 2, "the same list", "m")))
        hello[4:6] = b"\x00\x63"
        stream.sendall(hello)
        refused = read_frame(stream)
    assert refused is not None
    assert isinstance(refused.message, Refused)
    assert "version 99" in refused.message.reason
    assert f"version {frames.VERSION}" in refused.message.reason


def test_another_hosts_file_is_refused(start: Callable[[int], Run]) -> None:
    run = start(2)
    a = run.host(0)
    run.host(1, peers_digest="another list")
    error = a.ask(1, LeaveRequest()).get(timeout=LONG)
    assert isinstance(error, ProtocolError)
    assert "hosts files of peer-00 (2 peers) and peer-01 (2 peers) differ" in str(error)


def test_settings_that_must_be_equal_are_compared(start: Callable[[int], Run]) -> None:
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


def test_a_long_reason_is_truncated(start: Callable[[int], Run]) -> None:
    run = start(2)
    hosts = [run.host(rank, settings={"--a": str(rank) * 1000}) for rank in range(2)]
    error = hosts[0].ask(1, LeaveRequest()).get(timeout=LONG)
    assert isinstance(error, RefusedError)
    assert str(error).startswith("peer-01: refused: --a is 0000")


def test_a_cancelled_request_is_reported_without_a_thread_to_spare(
    start: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*given: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("gossipx.comm.client.call_back_in_thread", none_left)
    run = start(2)
    a, b = run.host(0), run.host(1)
    for _ in range(20):
        results: queue.Queue[Any] = queue.Queue()
        sink = Bytes(memoryview(bytearray(4)))
        a.comm.request(1, PullRequest(1, 30.0), deadline=soon(), payload=sink, done=results.put)()
        assert isinstance(results.get(timeout=LONG), CancelledError)
        assert results.empty()
    b.serve(b"four")
    buffer = bytearray(4)
    assert a.ask(1, PullRequest(1, 30.0), buffer).get(timeout=LONG) == ModelReply(1)


def test_another_peer_at_the_address_is_refused(start: Callable[[int], Run]) -> None:
    run = start(3)
    a, b = run.host(0), run.host(1)
    run.addresses[2] = b.comm.address
    assert "answers peer-01, rank 1, not rank 2" in str(a.ask(2, LeaveRequest()).get(timeout=LONG))
    run.addresses[2] = a.comm.address
    assert "is this peer itself" in str(a.ask(2, LeaveRequest()).get(timeout=LONG))


@pytest.mark.fault(21)
def test_another_model_names_the_first_tensor(start: Callable[[int], Run]) -> None:
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
    assert refused.message == Refused("the models differ, or its rank belongs to another peer by now")
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


# --- limits -------------------------------------------------------------------------------------


@pytest.mark.fault(25)
def test_idle_strangers_are_disconnected_in_time(start: Callable[[int], Run]) -> None:
    b = start(2).host(1, peer_timeout=SHORT)
    strangers = [knock(b) for _ in range(20)]
    for stranger in strangers:
        with stranger:
            assert stranger.recv(1) == b""


@pytest.mark.fault(8)
def test_a_request_that_trickles_in_is_dropped(start: Callable[[int], Run]) -> None:
    run = start(2)
    b = run.host(1, peer_timeout=SHORT)
    with introduced(b, 0, run.names) as stream:
        stream.sendall(frame(LeaveRequest())[:10])
        assert stream.recv(1) == b""


@pytest.mark.fault(25)
def test_above_the_cap_the_oldest_stranger_is_closed(start: Callable[[int], Run], heard: Heard) -> None:
    run = start(3)
    # Without shared memory each peer has one connection; with it there is briefly a second one.
    a, b, c = (run.host(rank, share_memory=False, **more) for rank, more in enumerate(({}, {"max_connections": 3}, {})))
    b.serve(b"")
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    strangers = [knock(b) for _ in range(2)]
    for _ in range(20):
        strangers.append(knock(b))
        with strangers.pop(0) as oldest:
            assert oldest.recv(1) == b""
    assert heard.wait("3 connections are open").levelno == logging.WARNING
    # The peer connected before is still served, and so is a new one.
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    assert c.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    for stranger in strangers:
        stranger.close()
    while not heard.records.empty():
        assert heard.records.get().levelno == logging.DEBUG  # one warning only


@pytest.mark.fault(25)
def test_at_most_32_strangers_stay_connected_below_the_cap(start: Callable[[int], Run], heard: Heard) -> None:
    """Capacity reserved for peers is not given to strangers while few peers are connected."""
    run = start(3)
    a, b = run.host(0, share_memory=False), run.host(1)
    b.serve(b"")
    with contextlib.ExitStack() as undo:
        strangers = [undo.enter_context(knock(b)) for _ in range(40)]
        for oldest in strangers[:8]:
            assert oldest.recv(1) == b""
        assert "32 connections are open" in heard.wait("connections are open").getMessage()
        assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
        assert strangers[8].recv(1) == b"", "closed in favour of the peer"
        for other in strangers[9:]:
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(1)


@pytest.mark.fault(25)
def test_a_new_connection_is_closed_if_no_stranger_can_be(start: Callable[[int], Run]) -> None:
    run = start(2)
    # Without shared memory there is one connection; with it there is briefly a second one.
    a, b = run.host(0, share_memory=False), run.host(1, max_connections=1)
    b.serve(b"")
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    with knock(b) as stream:
        assert stream.recv(1) == b""
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)


@pytest.mark.fault(40)
def test_out_of_descriptors_then_recovers(start: Callable[[int], Run], heard: Heard) -> None:
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
