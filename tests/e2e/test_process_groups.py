"""Models over torch.distributed's process groups: behaviour beyond the contract of all transports."""

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from forks.client import Piped
from managers import LONG, Host, certify, runs, settings_of, soon

from gossipx.errors import LocalFaultError, NoCarrierError, PeerUnreachableError, ProtocolError
from gossipx.protocol.messages import ModelReply, PullRequest
from gossipx.transports import KeyValueStore, link, process_group
from gossipx.transports.process_group import CHUNK, Gloo, PairGroup, ProcessGroups
from gossipx.transports.shared_memory import LinkStore
from gossipx.wire import Carried, CarrierReply, Message, ModelAck, NoCarrierReply, SetNote

SIZE = 2 * CHUNK + 5


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., list[Host]]]:
    """Yield a function that starts one peer per transport; all are closed after the test and must leave no thread."""
    with runs() as make:

        def started(*ways: str) -> list[Host]:
            run = make(len(ways))
            if any("tls" in way for way in ways):
                certify("tls", tmp_path)
            return [run.host(rank, **settings_of(way, tmp_path, rank)) for rank, way in enumerate(ways)]

        yield started


def groups_of(host: Host) -> ProcessGroups:
    groups = host.comm._member.carriers
    assert isinstance(groups, ProcessGroups)
    return groups


def pulls_well(host: Host, times: int = 1) -> None:
    """Check that ``host`` pulls a model from peer 1."""
    for number in range(times):
        buffer = bytearray(SIZE)
        assert host.ask(1, PullRequest(number, 30.0), buffer).get(timeout=LONG) == ModelReply(number)
        assert buffer == bytes(range(1, 256)) * (SIZE // 255) + bytes(SIZE % 255)


def give(host: Host) -> None:
    host.serve(bytes(range(1, 256)) * (SIZE // 255) + bytes(SIZE % 255))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list of the group ends built, each with whether it receives."""
    ends: list[bool] = []
    build = ProcessGroups.build

    def building(groups: ProcessGroups, receives: bool, notes: KeyValueStore, here: str, deadline: float) -> PairGroup:
        made = build(groups, receives, notes, here, deadline)
        ends.append(receives)
        return made

    monkeypatch.setattr(ProcessGroups, "build", building)
    return ends


def test_one_group_and_one_staging_serve_all_pulls_of_a_connection(
    start: Callable[..., list[Host]], built: list[bool]
) -> None:
    a, b = start("gloo", "gloo")
    b.serve(b"")
    assert a.ask(1, PullRequest(1, 30.0), bytearray()).get(timeout=LONG) == ModelReply(1)
    assert built == [], "nothing was carried"
    give(b)
    pulls_well(a)
    (staging,) = groups_of(a)._spare
    pulls_well(a, 10)
    assert sorted(built) == [False, True]
    assert groups_of(a)._spare == [staging]
    assert not torch.distributed.is_initialized(), "a user's default group is not touched"


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_with_a_peer_of_another_transport_models_use_sockets_and_one_line_is_logged(
    start: Callable[..., list[Host]], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = start("gloo", "tcp")
    give(b)
    pulls_well(a, 3)
    assert told(caplog) == [
        "models from peer-01 use sockets from now on: it says: its --transport differs; give every peer the same"
    ]


@pytest.mark.parametrize("whose", [0, 1])
def test_without_a_group_models_use_sockets_and_one_line_is_logged(
    start: Callable[..., list[Host]], caplog: pytest.LogCaptureFixture, whose: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Gloo.build

    def failing(backend: Gloo, store: Any, rank: int, here: str, deadline: float) -> Any:
        if rank == whose:
            raise RuntimeError("there is\nno gloo today")
        return build(backend, store, rank, here, deadline)

    monkeypatch.setattr(Gloo, "build", failing)
    a, b = start("gloo", "gloo")
    give(b)
    pulls_well(a, 3)
    says = "it says: " if whose else ""
    assert told(caplog) == [
        f"models from peer-01 use sockets from now on: {says}no gloo group could be built: there is"
    ]


def test_a_group_that_cannot_be_built_leaves_time_for_the_model(
    start: Callable[..., list[Host]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a network where only the run's own ports are open."""

    def waiting(backend: Gloo, store: Any, rank: int, here: str, deadline: float) -> Any:
        over.wait(deadline - time.monotonic())
        raise RuntimeError("timed out")

    over = threading.Event()
    monkeypatch.setattr(Gloo, "build", waiting)
    a, b = start("gloo", "gloo")
    give(b)
    buffer = bytearray(SIZE)
    assert a.ask(1, PullRequest(1, 30.0), buffer, seconds=4).get(timeout=LONG) == ModelReply(1)
    assert told(caplog) == ["models from peer-01 use sockets from now on: no gloo group could be built: timed out"]
    over.set()
    b.comm.close()


DYING = """
import os, runpy, signal, sys
from gossipx.transports.process_group import PairGroup

PairGroup.try_out = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.fault(1, 36)
def test_a_peer_that_dies_while_a_group_is_tested_gets_one_after_a_restart(
    start: Callable[..., list[Host]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    built: list[bool],
    tmp_path: Path,
) -> None:
    aborted: list[PairGroup] = []
    abort = PairGroup.abort

    def aborting(group: PairGroup) -> None:
        aborted.append(group)
        abort(group)

    monkeypatch.setattr(PairGroup, "abort", aborting)
    a, b = start("gloo", "gloo")
    b.comm.close()
    sender = Path(__file__).parents[1] / "responder.py"
    with Piped("-c", DYING, sender, "gloo", tmp_path, "1000", str(b.comm.address.port)) as dying:
        assert dying.stdout.readline()
        error = a.ask(1, PullRequest(1, 30.0), bytearray(1000)).get(timeout=LONG)
        assert dying.wait(LONG) == -signal.SIGKILL
    assert isinstance(error, PeerUnreachableError)
    assert told(caplog) == []
    assert len(aborted) == 1, "the half-built group was aborted with it"
    assert built == []
    give(b.run.host(1, bind=b.comm.address, **settings_of("gloo", tmp_path)))
    pulls_well(a)
    assert sorted(built) == [False, True]


@pytest.mark.fault(36)
def test_a_peer_that_restarts_with_the_same_transport_gets_a_group(
    start: Callable[..., list[Host]], caplog: pytest.LogCaptureFixture, built: list[bool], tmp_path: Path
) -> None:
    a, b = start("gloo", "tcp")
    give(b)
    pulls_well(a)
    assert built == []
    assert len(told(caplog)) == 1
    b.comm.close()
    give(b.run.host(1, bind=b.comm.address, **settings_of("gloo", tmp_path)))
    pulls_well(a, 2)
    assert sorted(built) == [False, True]
    assert len(told(caplog)) == 1


class Notes:
    """Keys and values that both ends of a group share."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._notes[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._notes, LONG)
            return self._notes[key]


def pair_of_groups() -> list[PairGroup]:
    """Return both ends of a group over gloo, of two threads: that which sends, and that which receives."""
    notes, both = Notes(), [ProcessGroups("gloo", torch.device("cpu")) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda given: given[1].build(given[0] == 1, notes, "127.0.0.1", soon()), enumerate(both)))


@pytest.mark.fault(1, 36)
@pytest.mark.parametrize("stays", ["sender", "receiver"])
def test_a_transfer_ends_with_its_group_in_the_middle_of_a_message(stays: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo does not wake a call whose message is sent or received in part: it would last until its deadline."""
    size = 256 * 2**20  # so long that the message is on its way when the other end closes
    monkeypatch.setattr(process_group, "CHUNK", size)
    sender, receiver = pair_of_groups()
    monkeypatch.setattr(receiver, "_spare", [Gloo().staging()])
    (staging,) = receiver._spare
    ended: queue.Queue[Exception] = queue.Queue()

    def moving(parts: Iterator[memoryview]) -> None:
        try:
            for _ in parts:
                pass
        except PeerUnreachableError as error:
            ended.put(error)

    far = soon(100 * LONG)
    model = memoryview(torch.ones(size, dtype=torch.uint8).numpy())
    for parts in (sender.send(model, far), receiver.receive(size, far)):
        threading.Thread(target=moving, args=(parts,), daemon=True).start()
    until = soon()
    while not staging.host[0, 0]:
        assert time.monotonic() < until
    gone, left = (receiver, sender) if stays == "sender" else (sender, receiver)
    gone.abort()
    assert "closed here" in str(ended.get(timeout=LONG))
    left.abort()
    assert "closed here" in str(ended.get(timeout=LONG))


@pytest.mark.parametrize("whose", [0, 1])
def test_without_a_thread_to_spare_no_model_is_received_and_one_line_is_logged(
    start: Callable[..., list[Host]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, whose: int
) -> None:
    hosts = start("gloo", "gloo")
    give(hosts[1])
    pulls_well(hosts[0])
    links = hosts[whose].comm._member.links
    spawn = links.spawn

    def none_left(what: str, target: Callable[..., None], *given: object) -> None:
        if what == "watch":
            raise RuntimeError("can't start new thread")
        spawn(what, target, *given)

    with monkeypatch.context() as patched:
        patched.setattr(links, "spawn", none_left)
        error = hosts[0].ask(1, PullRequest(1, 30.0), bytearray(SIZE)).get(timeout=LONG)
    if whose == 0:
        assert isinstance(error, LocalFaultError)
        assert "can't start new thread; allow more threads" in str(error)
    else:
        assert isinstance(error, PeerUnreachableError)
    assert told(caplog) == []
    pulls_well(hosts[0])


@pytest.mark.parametrize(("way", "digits"), [("gloo", 16), ("gloo, secret", 64), ("gloo, tls", 64)])
def test_a_model_changed_in_transit_is_refused_and_the_next_one_accepted(
    start: Callable[..., list[Host]], monkeypatch: pytest.MonkeyPatch, way: str, digits: int, built: list[bool]
) -> None:
    receive, changes, digests = PairGroup.receive, [1], []

    def changing(group: PairGroup, nbytes: int, deadline: float) -> Iterator[memoryview]:
        for part in receive(group, nbytes, deadline):
            if nbytes == SIZE and changes:
                part[changes.pop()] ^= 1
            yield part

    def noting(digest: str) -> Carried:
        digests.append(digest)
        return Carried(digest)

    a, b = start(way, way)
    give(b)
    monkeypatch.setattr(PairGroup, "receive", changing)
    error = a.ask(1, PullRequest(1, 30.0), bytearray(SIZE)).get(timeout=LONG)
    assert isinstance(error, ProtocolError)
    assert str(error) == "peer-01: a payload that does not match its checksum"
    assert a.comm.counts["corrupted"] == 1
    assert b.answered.get(timeout=LONG) is False
    with monkeypatch.context() as patched:
        patched.setattr(link.wire, "Carried", _kind_of(Carried, noting))
        pulls_well(a)
    assert [len(digest) for digest in digests] == [digits], "a MAC, or a collision-resistant digest"
    assert len(built) == 4, "a new group, with the new connection"


def _kind_of(kind: type, make: Callable[..., object]) -> type:
    """Return a class that creates objects with ``make``, and accepts those of ``kind`` as instances."""

    class Kind(type):
        def __call__(cls, *given: object) -> Any:
            return make(*given)

        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, kind)

    return Kind("Made", (), {})


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([SetNote(str(number), "00") for number in range(65)], "it sent SetNote while"),
        ([ModelAck()], "it sent ModelAck while"),
        ([CarrierReply()], "built its end of the carrier without sending"),
    ],
)
def test_messages_while_a_carrier_is_built_are_bounded(said: list[Message], told: str) -> None:
    notes = LinkStore(lambda message: None, iter(said).__next__)
    with pytest.raises(ProtocolError, match=told):
        notes.get("what never comes")


def test_an_end_that_cannot_be_built_ends_the_other() -> None:
    with pytest.raises(NoCarrierError, match="it says: no"):
        LinkStore(lambda message: None, lambda: NoCarrierReply("no")).get("a key")


def test_torch_distributed_is_not_loaded_for_other_transports() -> None:
    looks = "import sys, gossipx.assembly; sys.exit('gossipx.transports.process_group' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", looks], timeout=LONG).returncode == 0
