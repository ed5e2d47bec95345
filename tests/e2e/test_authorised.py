"""Authentication by a secret or by mutual TLS: CommManagers in one process, over real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import managers
import msgspec
import pytest
from certificates import Authority, Identity
from managers import LONG, Heard, Host, Run, failure, frame, knock, read_frame

from gossipx.errors import NotAuthorisedError, ProtocolError, StrangerError
from gossipx.protocol.fields import SMALL_METADATA, kind_of
from gossipx.protocol.messages import HereReply, LeaveRequest, ModelReply, PullRequest, RoundRequest, Stage
from gossipx.transports import Address, handshake
from gossipx.transports.access import SecretFile
from gossipx.transports.link import Link
from gossipx.wire import Challenge, Hello, NotAuthorised, Open, Proof, frames
from gossipx.wire.auth import FixedSecrets, Secret
from runs import open_files

start, heard = managers.start, managers.heard
SECRET = FixedSecrets((Secret(b"the secret of these tests"),))
WRONG = FixedSecrets((Secret(b"another one, of somebody else"),))
Start = Callable[[int], Run]


@pytest.fixture(params=["secret", "tls"])
def guard(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Return the settings that make a CommManager authenticate others."""
    return {"secret": SECRET} if request.param == "secret" else {"transport": Authority(tmp_path).issue().transport()}


# --- between members ----------------------------------------------------------------------------


def test_another_hosts_file_or_model_is_reported_as_without_a_secret(start: Start, guard: dict[str, Any]) -> None:
    run = start(3)
    a, b = run.host(0, **guard), run.host(1, peers_digest="another list", **guard)
    assert "hosts files of peer-00 (3 peers) and peer-01 (3 peers) differ" in str(failure(a, 1))
    run.host(2, manifest=["bias float32 (11,) (1,)"], **guard)
    assert "peer-02: its model differs: tensor 0" in str(failure(a, 2))
    assert b.received.empty()


# --- strangers ----------------------------------------------------------------------------------


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


def everything(stream: socket.socket) -> bytes:
    """End the sending direction and return all that arrives, if only a reset because the peer closed first."""
    data = b""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ConnectionResetError):
        while piece := stream.recv(10_000):
            data += piece
    return data


def test_a_stranger_is_told_nothing_about_the_run(start: Start) -> None:
    run = start(2)
    b = run.host(1, secret=SECRET)
    with knock(b) as stream:
        stream.sendall(frame(Hello(0, "peer-00", 2, "the same list", b.comm._member.me.model)))
        answer = read_frame(stream)
        assert everything(stream) == b""
    assert answer is not None
    assert answer.message == NotAuthorised("this run has a secret; give every peer the same --secret-file")
    with knock(b) as stream:
        stream.sendall(frame(Open("0" * 64, "the same list", "peer-00", "another")))
        stream.sendall(frame(Proof(("0" * 64,))))
        told = everything(stream)
    assert b"peer-0" not in told
    assert b"weight" not in told
    assert b.received.empty()


GARBAGE = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "random": random.Random(0).randbytes(300),
    "half an opening": frame(Open("0" * 64, "the same list", "peer-00", "peer-01"))[:-5],
    "a request": frame(PullRequest(1, 30.0)),
    "a proof at once": frame(Proof(("0" * 64,))),
    "a challenge": frame(Challenge("0" * 64)),
    "no proof": frame(Open("0" * 64, "a", "b", "c")) + frame(PullRequest(1, 30.0)),
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


class Middle:
    """Forwards connections to ``target``, passing the client's bytes through ``change`` and the server's through
    ``back``; both functions get the number of bytes forwarded before."""

    def __init__(self, target: Address):
        self.sent = bytearray()
        self.change = self.back = lambda data, before: data
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._listening.getsockname())
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection((self._target.host, self._target.port))
                for ends in ((client, server, True), (server, client, False)):
                    thread = threading.Thread(target=self._pass, args=ends)
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, forth: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(100_000):
                if forth:
                    self.sent += data
                target.sendall((self.change if forth else self.back)(data, passed))
                passed += len(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


@pytest.fixture
def middle() -> Iterator[Callable[[Address], Middle]]:
    made: list[Middle] = []

    def make(target: Address) -> Middle:
        made.append(Middle(target))
        return made[-1]

    yield make
    for each in made:
        each.close()


def flip(at: int) -> Callable[[bytes, int], bytes]:
    def change(data: bytes, before: int) -> bytes:
        if before <= at < before + len(data):
            return data[: at - before] + bytes([data[at - before] ^ 1]) + data[at - before + 1 :]
        return data

    return change


@pytest.mark.fault(12)
def test_a_model_changed_in_transit_is_refused(
    start: Start, guard: dict[str, Any], middle: Callable[[Address], Middle]
) -> None:
    run = start(2)
    a, b = run.host(0, share_memory=False, **guard), run.host(1, **guard)
    b.serve(bytes(1_000_000))
    way = middle(b.comm.address)
    run.addresses[1] = way.address
    assert a.ask(1, PullRequest(1, 30.0), bytearray(1_000_000)).get(timeout=LONG) == ModelReply(1)
    way.back = flip(1_700_000)  # in the second model, on the same connection
    error = a.ask(1, PullRequest(2, 30.0), bytearray(1_000_000)).get(timeout=LONG)
    assert isinstance(error, ProtocolError), error
    assert "does not match" in str(error) or "bad record mac" in str(error)
    way.back = flip(-1)
    assert a.ask(1, PullRequest(3, 30.0), bytearray(1_000_000)).get(timeout=LONG) == ModelReply(3)


@pytest.mark.fault(19)
def test_a_connection_relayed_to_its_opener_is_refused(start: Start, middle: Callable[[Address], Middle]) -> None:
    run = start(3)
    a, c = run.host(0, secret=SECRET), run.host(2, secret=SECRET)
    run.addresses[1] = middle(a.comm.address).address
    assert "this is peer-00 itself, not peer-01" in str(failure(a, 1))
    run.addresses[1] = middle(c.comm.address).address
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


# --- many connections ---------------------------------------------------------------------------


@pytest.mark.fault(25)
def test_a_thousand_idle_connections_leave_peers_and_threads_alone(start: Start, guard: dict[str, Any]) -> None:
    run, model = start(2), os.urandom(100_000)
    a, b = run.host(0, **guard), run.host(1, **guard)
    b.serve(model)
    assert a.ask(1, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    threads = threading.active_count()
    with open_files(3000), contextlib.ExitStack() as strangers:
        for _ in range(1000):
            strangers.enter_context(knock(b))
        buffer = bytearray(len(model))
        assert a.ask(1, PullRequest(1, 30.0), buffer).get(timeout=LONG) == ModelReply(1)
        assert buffer == model
        for link in a.comm._member.links._idle[1]:
            link.stream.abort()  # so that the next request opens a new connection among them
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
