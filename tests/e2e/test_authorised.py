"""Which connections CommManagers admit, and how many: over real sockets, without and with a secret or mutual TLS."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import queue
import random
import re
import resource
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import managers
import msgspec
import pytest
from certificates import Authority, Identity
from managers import LONG, MANIFEST, SHORT, Heard, Host, Run, failure, frame, introduced, knock, read_frame, soon

from gossipx.errors import (
    CancelledError,
    ModelMismatchError,
    NotAuthorisedError,
    ProtocolError,
    RefusedError,
    StrangerError,
)
from gossipx.protocol.fields import SMALL_METADATA, kind_of
from gossipx.protocol.messages import HereReply, LeaveRequest, ModelReply, PullRequest, RoundRequest, Stage
from gossipx.transports import handshake
from gossipx.transports.access import SecretFile
from gossipx.transports.link import Link
from gossipx.transports.sockets import SocketStream
from gossipx.wire import Bytes, Challenge, Hello, NotAuthorised, Open, Proof, Refused, frames
from gossipx.wire.auth import FixedSecrets, Secret
from runs import open_files

start, two, heard = managers.start, managers.two, managers.heard
SECRET = FixedSecrets((Secret(b"the secret of these tests"),))
WRONG = FixedSecrets((Secret(b"another one, of somebody else"),))
Start = Callable[[int], Run]


@pytest.fixture(params=["none", "secret", "tls"])
def guard(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Return the settings that make a CommManager authenticate others."""
    if request.param == "tls":
        return {"transport": Authority(tmp_path).issue().transport()}
    return {"secret": SECRET} if request.param == "secret" else {}


# --- admission, with any guard or none ----------------------------------------------------------


def test_another_hosts_file_is_refused(start: Start, guard: dict[str, Any]) -> None:
    run = start(2)
    a, b = run.host(0, **guard), run.host(1, peers_digest="another list", **guard)
    error = failure(a, 1)
    assert isinstance(error, ProtocolError)
    assert "hosts files of peer-00 (2 peers) and peer-01 (2 peers) differ" in str(error)
    assert b.received.empty()


@pytest.mark.fault(21)
def test_another_model_names_the_first_tensor(start: Start, guard: dict[str, Any]) -> None:
    run = start(2)
    a = run.host(0, **guard)
    b = run.host(1, manifest=[MANIFEST[0], "bias float32 (11,) (1,)"], **guard)
    for asking, other in ((a, 1), (b, 0)):
        error = failure(asking, other)
        assert isinstance(error, ModelMismatchError)
        assert error.exit_code == 2
    assert str(error) == (
        "peer-00: its model differs: tensor 1 is 'bias float32 (11,) (1,)' here and 'bias float32 (10,) (1,)' there;"
        " build the same model on every host"
    )
    assert a.received.empty()
    assert b.received.empty()


def everything(stream: socket.socket) -> bytes:
    """End the sending direction and return all that arrives, if only a reset because the peer closed first."""
    data = b""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ConnectionResetError):
        while piece := stream.recv(10_000):
            data += piece
    return data


GARBAGE = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "random": random.Random(0).randbytes(300),
    "zeros": bytes(100),
    "another kind": b"GSPX" + frames.VERSION.to_bytes(2, "big") + b"\xff" * 50,
    "half an opening": frame(Open("0" * 64, "the same list", "peer-00", "peer-01"))[:-5],
    "a request": frame(PullRequest(1, 30.0)),
    "a proof at once": frame(Proof(("0" * 64,))),
    "a challenge": frame(Challenge("0" * 64)),
    "huge lengths": frames._HEADER.pack(b"GSPX", frames.VERSION, 6, 0, 2**32 - 1, 2**63) + bytes(8),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.fault(14, 15)
def test_garbage_is_closed_quietly(start: Start, heard: Heard, guard: dict[str, Any], data: bytes) -> None:
    run = start(2)
    a, b = run.host(0, **guard), run.host(1, **guard)
    with knock(b) as stream:
        stream.sendall(data)
        everything(stream)
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


def test_settings_that_must_be_equal_are_compared(start: Start) -> None:
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


def test_a_long_reason_is_truncated(start: Start) -> None:
    run = start(2)
    hosts = [run.host(rank, settings={"--a": str(rank) * 1000}) for rank in range(2)]
    error = hosts[0].ask(1, LeaveRequest()).get(timeout=LONG)
    assert isinstance(error, RefusedError)
    assert str(error).startswith("peer-01: refused: --a is 0000")


def test_a_cancelled_request_is_reported_without_a_thread_to_spare(
    start: Start, monkeypatch: pytest.MonkeyPatch
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


def test_another_peer_at_the_address_is_refused(start: Start) -> None:
    run = start(3)
    a, b = run.host(0), run.host(1)
    run.addresses[2] = b.comm.address
    assert "answers peer-01, rank 1, not rank 2" in str(a.ask(2, LeaveRequest()).get(timeout=LONG))
    run.addresses[2] = a.comm.address
    assert "is this peer itself" in str(a.ask(2, LeaveRequest()).get(timeout=LONG))


def test_a_peer_of_another_model_is_not_served(start: Start) -> None:
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


def test_only_requests_are_served(start: Start, heard: Heard) -> None:
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


# --- peers with another secret ----------------------------------------------------------------------------------


@pytest.mark.fault(18)
def test_a_wrong_secret_is_refused_and_logged_once(start: Start, heard: Heard) -> None:
    run = start(2)
    a, b = run.host(0, secret=WRONG), run.host(1, secret=SECRET)
    for _ in range(3):
        error = failure(a, 1)
        assert isinstance(error, NotAuthorisedError)
        assert error.exit_code == 5
        assert str(error) == ("peer-01: not authorised: the secrets differ; give every peer of the run the same secret")
    assert a.comm.trust.is_outcast
    b.comm.close()  # waits for its threads, so that all bytes are counted
    assert b.comm.counts["strangers"] == 3
    assert b.received.empty()
    assert heard.wait("not authorised: the secrets differ").levelno == logging.WARNING
    while not heard.records.empty():
        assert heard.records.get().levelno == logging.DEBUG  # one warning only


@pytest.mark.parametrize(("own", "others"), [(SECRET, None), (None, SECRET)])
def test_a_secret_on_one_side_alone_is_refused(
    start: Start, own: FixedSecrets | None, others: FixedSecrets | None
) -> None:
    run = start(2)
    a, _ = run.host(0, secret=own), run.host(1, secret=others)
    error = failure(a, 1)
    assert isinstance(error, NotAuthorisedError)
    assert "give every peer the same --secret-file" in str(error)


def test_one_stranger_makes_nobody_an_outcast(start: Start) -> None:
    run = start(3)
    a, b, stranger = (run.host(rank, secret=secret) for rank, secret in enumerate([SECRET, SECRET, WRONG]))
    assert isinstance(failure(a, 2), NotAuthorisedError)
    assert not a.comm.trust.is_outcast  # peer 1 may still connect
    b.serve(b"")
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    assert isinstance(failure(b, 2), NotAuthorisedError)
    assert not a.comm.trust.is_outcast
    assert not b.comm.trust.is_outcast  # it has admitted peer 0
    assert isinstance(failure(stranger, 0), NotAuthorisedError)
    assert not stranger.comm.trust.is_outcast
    assert isinstance(failure(stranger, 1), NotAuthorisedError)
    assert stranger.comm.trust.is_outcast


def test_a_stranger_is_told_nothing_about_the_run(start: Start) -> None:
    run = start(2)
    b = run.host(1, secret=SECRET)
    with knock(b) as stream:
        stream.sendall(frame(Hello(0, "peer-00", 2, "the same list", b.comm._member.me.model)))
        answer = read_frame(stream)
        assert everything(stream) == b""
    assert answer is not None
    assert answer.message == NotAuthorised("this run has a secret; give every peer the same --secret-file")
    for second in (Proof(("0" * 64,)), PullRequest(1, 30.0)):
        with knock(b) as stream:
            stream.sendall(frame(Open("0" * 64, "the same list", "peer-00", "another")))
            stream.sendall(frame(second))
            told = everything(stream)
        assert b"peer-0" not in told
        assert b"weight" not in told
    assert b.received.empty()


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.fault(14)
def test_a_stranger_cannot_make_a_peer_allocate(start: Start, heard: Heard, secret: FixedSecrets | None) -> None:
    """Not even with messages that may be large between members."""
    b = start(2).host(1, secret=secret)
    with knock(b) as stream:
        kind = kind_of(RoundRequest).number
        stream.sendall(frames._HEADER.pack(b"GSPX", frames.VERSION, kind, 0, SMALL_METADATA + 1, 0) + bytes(8))
        assert everything(stream) == b""
    assert f"at most {SMALL_METADATA}" in heard.wait("RoundRequest announced").getMessage()


# --- attackers in the middle --------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.fault(12)
def test_a_model_changed_in_transit_is_refused(
    start: Start, monkeypatch: pytest.MonkeyPatch, secret: FixedSecrets | None
) -> None:
    run, model, changes = start(2), bytes(1_000_000), [17]
    a, b = (run.host(rank, share_memory=False, secret=secret) for rank in range(2))
    b.serve(model)
    receive = SocketStream.receive_into

    def receive_changed(stream: SocketStream, view: memoryview, deadline: float, observe: Any = None) -> int:
        def change(part: memoryview) -> None:
            if changes and len(view) > 100_000:
                part[changes.pop()] ^= 1
            observe(part)

        return receive(stream, view, deadline, observe and change)

    monkeypatch.setattr(SocketStream, "receive_into", receive_changed)
    error = a.ask(1, PullRequest(1, 30.0), bytearray(len(model))).get(timeout=LONG)
    assert isinstance(error, ProtocolError) and "does not match" in str(error), error
    assert a.ask(1, PullRequest(2, 30.0), bytearray(len(model))).get(timeout=LONG) == ModelReply(2)


@pytest.mark.fault(19)
def test_a_connection_relayed_to_its_opener_is_refused(start: Start) -> None:
    run = start(3)
    a, c = run.host(0, secret=SECRET), run.host(2, secret=SECRET)
    run.addresses[1] = a.comm.address
    assert "this is peer-00 itself, not peer-01" in str(failure(a, 1))
    run.addresses[1] = c.comm.address
    assert "this is peer-02, not peer-01" in str(failure(a, 1))
    assert a.received.empty()
    assert c.received.empty()


def test_a_proven_peer_cannot_claim_to_be_another(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(3)
    a, b = run.host(0, secret=SECRET), run.host(1, secret=SECRET)
    greet = handshake.greet

    def pretend(link: Link, me: Hello, *rest: Any) -> None:
        greet(link, msgspec.structs.replace(me, rank=2, name="peer-02"), *rest)

    monkeypatch.setattr(handshake, "greet", pretend)
    assert "it has proven to be peer-01, not peer-02" in str(failure(b, 0))
    assert a.received.empty()


# --- certificates -------------------------------------------------------------------------------


@pytest.mark.fault(20)
def test_a_certificate_of_the_run_is_valid_for_its_own_host_only(start: Start, tmp_path: Path) -> None:
    authority, run = Authority(tmp_path), start(2)
    other = authority.issue("node7").transport()
    a, b = run.host(0, transport=other), run.host(1, transport=authority.issue().transport())
    error = failure(a, 1)
    assert isinstance(error, NotAuthorisedError)
    assert "the certificate of peer-00 is not for '127.0.0.1', its host in the hosts file" in str(error)
    assert b.received.empty()
    assert a.comm.trust.is_outcast
    error = failure(b, 0)
    assert isinstance(error, StrangerError)
    assert not b.comm.trust.is_outcast
    assert "is not for '127.0.0.1', the host in the hosts file" in str(error)
    assert a.received.empty()


# --- limits -------------------------------------------------------------------------------------


@pytest.mark.fault(25)
def test_idle_strangers_are_disconnected_in_time(start: Start) -> None:
    b = start(2).host(1, peer_timeout=SHORT)
    strangers = [knock(b) for _ in range(20)]
    for stranger in strangers:
        with stranger:
            assert stranger.recv(1) == b""


@pytest.mark.fault(8)
def test_a_request_that_trickles_in_is_dropped(start: Start) -> None:
    run = start(2)
    b = run.host(1, peer_timeout=SHORT)
    with introduced(b, 0, run.names) as stream:
        stream.sendall(frame(LeaveRequest())[:10])
        assert stream.recv(1) == b""


@pytest.mark.fault(25)
def test_above_the_cap_the_oldest_stranger_is_closed(start: Start, heard: Heard) -> None:
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
def test_at_most_32_strangers_stay_connected_below_the_cap(start: Start, heard: Heard) -> None:
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
def test_a_new_connection_is_closed_if_no_stranger_can_be(start: Start) -> None:
    run = start(2)
    # Without shared memory there is one connection; with it there is briefly a second one.
    a, b = run.host(0, share_memory=False), run.host(1, max_connections=1)
    b.serve(b"")
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    with knock(b) as stream:
        assert stream.recv(1) == b""
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)


@pytest.mark.fault(40)
def test_out_of_descriptors_then_recovers(start: Start, heard: Heard) -> None:
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


@pytest.mark.fault(25)
def test_a_thousand_idle_connections_leave_peers_and_threads_alone(start: Start) -> None:
    run, model = start(2), os.urandom(100_000)
    a, b = run.host(0, secret=SECRET), run.host(1, secret=SECRET)
    b.serve(model)
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    threads = threading.active_count()
    with open_files(3000), contextlib.ExitStack() as strangers:
        for _ in range(1000):
            strangers.enter_context(knock(b))
        buffer = bytearray(len(model))
        assert a.ask(1, PullRequest(1, 30.0), buffer).get(timeout=LONG) == ModelReply(1)
        assert buffer == model
        hang_up(a, 1)
        assert a.ask(1, PullRequest(2, 30.0), bytearray(len(model))).get(timeout=LONG) == ModelReply(2)
        assert len(b.comm._listener._inbound) <= 32 + 4 * 2
        assert threading.active_count() <= threads + 2 * (32 + 4 * 2)
    assert b.comm.counts["strangers"] == 0


# --- Secrets and certificates that are replaced while peers connect, over real connections -------------


def hang_up(host: Host, to: int) -> None:
    """Close idle connections, so that the next request opens a new one."""
    for link in host.comm._member.links._idle[to]:
        link.stream.abort()


def both_connect(run: Run) -> None:
    for one, other in ((0, 1), (1, 0)):
        hang_up(run.hosts[one], other)
        assert run.hosts[one].ask(other, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)


def test_a_secret_is_rotated_while_peers_connect(start: Start, tmp_path: Path) -> None:
    """By the commands of docs/security.md, one machine after the other; every connection between is new."""
    run, files = start(2), [tmp_path / "secret-0", tmp_path / "secret-1"]
    new = tmp_path / "new"
    new.write_text("the new secret of this run\n")
    for file in files:
        file.touch(0o600)
        file.write_text("the old secret of this run\n")
    a, b = (run.host(rank, secret=SecretFile(file)) for rank, file in enumerate(files))
    a.serve(b"")
    b.serve(b"")
    both_connect(run)
    for command in ("cat new >> {}", "cat new > {}"):
        for file in files:
            subprocess.run(command.format(file), shell=True, check=True, cwd=tmp_path)
            both_connect(run)
    assert files[0].read_text() == new.read_text()
    assert a.comm.counts["strangers"] == b.comm.counts["strangers"] == 0
    stale = run.host(1, secret=FixedSecrets((Secret(b"the old secret of this run"),)))
    assert isinstance(failure(stale, 0), NotAuthorisedError)


def copied(identity: Identity, folder: Path) -> Identity:
    folder.mkdir()
    own = Identity(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    shutil.copy(identity.certificate, own.certificate)
    shutil.copy(identity.key, own.key)
    shutil.copy(identity.authority, own.authority)
    return own


def test_certificates_are_replaced_while_peers_connect(start: Start, heard: Heard, tmp_path: Path) -> None:
    """A second CA is trusted first; then its certificates replace those of the first, and then the first CA goes."""
    old, new, run = Authority(tmp_path / "old"), Authority(tmp_path / "new", "another CA"), start(2)
    own = [copied(old.issue(), tmp_path / f"host-{number}") for number in range(2)]
    a, b = (run.host(rank, transport=identity.transport()) for rank, identity in enumerate(own))
    a.serve(b"")
    b.serve(b"")
    both_connect(run)
    for identity in own:
        identity.authority.write_bytes(old.file.read_bytes() + new.file.read_bytes())
        both_connect(run)
    for identity in own:
        issued = new.issue()
        shutil.copy(issued.certificate, identity.certificate)
        both_connect(run)  # the certificate's key is still missing, so the old pair stays in use
        assert "is not the private key of" in heard.wait("what was read before stays in use").getMessage()
        shutil.copy(issued.key, identity.key)
        both_connect(run)
    for identity in own:
        shutil.copy(new.file, identity.authority)
        both_connect(run)
    assert a.comm.counts["strangers"] == b.comm.counts["strangers"] == 0
    stale = run.host(1, transport=dataclasses.replace(old.issue(), authority=new.file).transport())
    assert isinstance(failure(stale, 0), NotAuthorisedError)
