"""CommManagers over real sockets for tests, with every transport for models."""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import Authority, Identity
from joined_frames import joined

from gossipx.comm import CommManager
from gossipx.errors import GossipxError
from gossipx.memory import Memory, Source
from gossipx.protocol.messages import HereReply, LeaveRequest, ModelReply, PullRequest, Reply, Request, Stage
from gossipx.protocol.server_messages import CarryingRequest
from gossipx.transports import Address
from gossipx.transports.process_group import ProcessGroups
from gossipx.wire import Bytes, Hello, UploadSink, frames
from gossipx.wire.auth import FixedSecrets, Secret

HERE = Address("127.0.0.1", 0)
MANIFEST = ("weight float32 (10, 5) (5, 1)", "bias float32 (10,) (1,)")
LONG = 60.0  # seconds: ends a test that hangs
SHORT = 1.0  # seconds: a deadline that must pass, but not before a request has arrived

Received = tuple[int, Hashable, Request]


def soon(seconds: float = LONG) -> float:
    return time.monotonic() + seconds


class Model(Source):
    """A model to send, in memory that can be shared."""

    def __init__(self, content: bytes):
        self.memory = Memory(len(content))
        self.memory.view[:] = content
        super().__init__(self.memory.view, self.memory.descriptor)


class UploadBuffer(Bytes):
    """The buffer for a request's payload."""

    released = 0

    def release(self) -> None:
        self.released += 1


class Host:
    """A manager whose requests go to the ``received`` queue, or are answered by ``react``."""

    def __init__(self, run: Run, rank: int, **settings: Any):
        self.run = run
        self.received: queue.Queue[Received] = queue.Queue()
        self.answered: queue.Queue[bool] = queue.Queue()
        self.uploads: queue.Queue[bytes] = queue.Queue()
        self.capacity = 0  # largest payload of a request, in bytes
        self.buffers: list[UploadBuffer] = []  # buffers handed out
        self.react: Callable[[Hashable, Request], None] | None = None
        given: dict[str, Any] = {
            "rank": rank,
            "names": run.names,
            "addresses": run.addresses,
            "bind": HERE,
            "peers_digest": "the same list",
            "settings": {},
            "manifest": MANIFEST,
            "on_request": self._requested,
            "sink_for": self._sink_for,
            "peer_timeout": LONG,
        }
        self.comm = CommManager(**(given | settings))
        self.comm.start()
        run.addresses[rank] = self.comm.address

    def _requested(self, sender: int, key: Hashable, request: Request, upload: UploadSink | None) -> None:
        self.received.put((sender, key, request))
        if upload is not None:
            assert isinstance(upload, UploadBuffer)
            self.uploads.put(bytes(upload.view))
            upload.release()
        if self.react is not None:
            self.react(key, request)

    def _sink_for(self, sender: int, request: CarryingRequest) -> UploadBuffer:
        self.buffers.append(UploadBuffer(memoryview(bytearray(self.capacity))))
        return self.buffers[-1]

    def ask(
        self,
        to: int,
        request: Request,
        payload: bytearray | None = None,
        seconds: float = LONG,
        upload: bytes | None = None,
    ) -> queue.Queue[Reply | GossipxError]:
        results: queue.Queue[Reply | GossipxError] = queue.Queue()
        buffer = None if payload is None else Bytes(memoryview(payload))
        source = None if upload is None else Model(upload)
        self.comm.request(to, request, deadline=soon(seconds), payload=buffer, done=results.put, upload=source)
        return results

    def answer(self, key: Hashable, reply: Reply, payload: bytes | None = None, begins: float = 0.0) -> None:
        model = None if payload is None else Model(payload)
        self.comm.answer(key, reply, payload=model, deadline=soon(), done=self.answered.put, begins=begins)

    def serve(self, model: bytes) -> None:
        """Answer every pull with ``model``, and everything else with HereReply."""

        def react(key: Hashable, request: Request) -> None:
            if isinstance(request, PullRequest):
                self.answer(key, ModelReply(request.step), model)
            else:
                self.answer(key, HereReply(Stage.TRAIN))

        self.react = react


def failure(host: Host, to: int) -> GossipxError:
    """Return the error with which a request of ``host`` to another one fails."""
    result = host.ask(to, LeaveRequest()).get(timeout=LONG)
    assert isinstance(result, GossipxError), result
    return result


def ended(*hosts: Host) -> None:
    """Close all hosts: threads count sent bytes slightly after the receiver may have them."""
    for host in hosts:
        host.comm.close()


class Run:
    """Peers of one run; addresses become known as they start."""

    def __init__(self, size: int):
        self.names = [f"peer-{rank:02}" for rank in range(size)]
        self.addresses = [Address("127.0.0.1", 1)] * size
        self.hosts: list[Host] = []

    def host(self, rank: int, **settings: Any) -> Host:
        self.hosts.append(Host(self, rank, **settings))
        return self.hosts[-1]


@contextlib.contextmanager
def runs() -> Iterator[Callable[[int], Run]]:
    """Yield a function that makes runs; all are closed at the end and must leave no thread."""
    before = set(threading.enumerate())
    made: list[Run] = []

    def make(size: int) -> Run:
        made.append(Run(size))
        return made[-1]

    yield make
    ended(*(host for run in made for host in run.hosts))
    for thread in set(threading.enumerate()) - before:
        thread.join(LONG)
        assert not thread.is_alive(), thread
    if sum(len(run.hosts) for run in made) >= 64:
        made.clear()
        gc.collect()  # 64 managers with gloo hold 256 file descriptors; many systems allow a process 1,024


shares_memory = pytest.mark.skipif(
    Memory(1).descriptor is None, reason="this system cannot share memory by a descriptor"
)
"""Marks tests of shared memory; all other tests of a manager also run on systems without it."""
TRANSPORTS = ("tcp", "tcp, secret", "tls", "shm", "shm, secret", "gloo", "gloo, secret", "gloo, tls", "nccl")
"""Transports for models, with the authentication of peers."""
SECRET = FixedSecrets((Secret(b"known to all peers of these tests"),))


def certify(way: str, folder: Path) -> None:
    """Make the files that a transport needs in ``folder``; skip the test if the transport is not available."""
    if "tls" in way:
        Authority(folder).issue()
    if way == "nccl" and not (torch.distributed.is_nccl_available() and torch.cuda.device_count() > 1):
        pytest.skip("NCCL needs two GPUs")


def settings_of(way: str, folder: Path, rank: int = 0) -> dict[str, Any]:
    """Return the settings of a manager.

    Args:
        folder: as prepared by :func:`certify`.
    """
    settings: dict[str, Any] = {"share_memory": "shm" in way}
    if "secret" in way:
        settings["secret"] = SECRET
    if "tls" in way:
        settings["transport"] = Identity(folder / "1.pem", folder / "1.key", folder / "ca.pem").transport()
    if "gloo" in way:
        settings["carriers"] = ProcessGroups("gloo", torch.device("cpu"))
    if "nccl" in way:
        settings["carriers"] = ProcessGroups("nccl", torch.device("cuda", rank % 2))
    return settings


@pytest.fixture
def start() -> Iterator[Callable[[int], Run]]:
    """Yield a function that makes runs; all are closed after the test and must leave no thread."""
    with runs() as make:
        yield make


@pytest.fixture
def two(start: Callable[[int], Run]) -> tuple[Host, Host]:
    run = start(2)
    return run.host(0), run.host(1)


class Heard(logging.Handler):
    """Log records of gossipx, which a test can wait for."""

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
    """Read the next frame; None at the end of the stream."""
    decoder = frames.Decoder(lambda message, request: payload)
    while True:
        count = stream.recv_into(decoder.next_buffer())
        if not count:
            return None
        found = decoder.received(count)
        if found is not None:
            return found


def introduced(host: Host, rank: int, names: Sequence[str]) -> socket.socket:
    """Return a connection after its handshake, opened under the rank ``rank``."""
    stream = knock(host)
    model = host.comm._member.me.model
    stream.sendall(frame(Hello(rank, names[rank], len(names), "the same list", model)))
    assert read_frame(stream) is not None
    return stream
