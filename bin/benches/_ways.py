"""Ways to fetch a model from another process, for the exchange benchmark: a client each, whose process serves it.

A server prints a line when it is ready, and sends the model at each request.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hmac
import os
import queue
import socket
import ssl
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from _bench.peers import HERE
from _bench.processes import SECONDS, Spawned, pin
from torch.distributed import rpc

from gossipx.comm import CommManager
from gossipx.comm.listener import OnRequest
from gossipx.memory import OBSERVED_PIECE, PIECE, Memory, Source
from gossipx.protocol.messages import ArriveRequest, HereReply, ModelReply, PullRequest, Request, Stage
from gossipx.tools.certs import folder_of
from gossipx.transports import Address, tcp
from gossipx.transports.process_group import ProcessGroups
from gossipx.transports.tls import Tls
from gossipx.wire import Message, Sink, auth, frames

MANIFEST = ("model uint8 1 strides 1 trainable",)


class Way(abc.ABC):
    """A client of one way to fetch the model of another process.

    Args:
        serve: what its server runs.
        arguments: of the server.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any):
        self._server = Spawned(serve, *arguments)
        self._told = self._server.line()

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Get ready for the next pull; not timed."""

    @abc.abstractmethod
    def pull(self) -> None:
        """Fetch the model once, into allocated memory."""

    def close(self) -> None:
        """Close the connection and end the server."""
        self._server.close()


def filled(size: int) -> Memory:
    """Return a model of ``size`` bytes with typical values, because arithmetic on denormals is far slower."""
    memory = Memory(size)
    piece = torch.randn(PIECE // 4).numpy().tobytes()
    memory.view[:] = piece * (size // PIECE) + piece[: size % PIECE]
    return memory


# --- blocking sockets -------------------------------------------------------------------------------------


def loss_based(connecting: socket.socket) -> None:
    """Select a loss-based congestion control, which is faster on loopback, if the system allows it.

    Call it before connecting: a connection that starts with bbr remains paced and sometimes has half the rate.
    """
    for name in (b"cubic", b"reno"):
        try:
            connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return
        except (OSError, AttributeError):
            pass


QUESTION = ArriveRequest(Stage.TRAIN, 1, {"text": "x" * 900})
ANSWER = HereReply(Stage.TRAIN)
"""A request of about 1 KB, and its reply."""


def on_the_wire(message: Message) -> int:
    """Return the bytes of a message's frame."""
    return sum(len(buffer) for buffers, _ in frames.encode(message, 0) for buffer in buffers)


def accepted() -> socket.socket:
    """Tell the client a port, and return the connection that it opens."""
    pin(1)
    with socket.create_server((HERE, 0)) as listening:
        loss_based(listening)
        print(listening.getsockname()[1], flush=True)
        connected, _ = listening.accept()
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def serve_raw(size: int, sending: str) -> None:
    """Send the model for each received byte, and a reply of gossipx's size for a request of gossipx's size.

    ``sending`` is sendall or sendfile.
    """
    model = filled(size)
    question, answer = on_the_wire(QUESTION), bytes(on_the_wire(ANSWER))
    connected = accepted()
    while asked := connected.recv(4096):
        if len(asked) > 1:
            left = question - len(asked)
            while left:
                left -= len(connected.recv(left))
            connected.sendall(answer)
        elif sending == "sendfile" and model.descriptor is not None:
            done = 0
            while done < size:
                done += os.sendfile(connected.fileno(), model.descriptor, done, size - done)
        else:
            connected.sendall(model.view)


class Raw(Way):
    """A client over blocking sockets without any check, with MSG_WAITALL into one buffer."""

    def __init__(self, size: int, *arguments: Any, serve: Callable[..., None] = serve_raw):
        super().__init__(serve, size, *arguments)
        self._socket = socket.socket()
        loss_based(self._socket)
        self._socket.connect((HERE, int(self._told)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = Memory(size).view
        self._question, self._answer = bytes(on_the_wire(QUESTION)), on_the_wire(ANSWER)

    def pull(self) -> None:
        self._socket.send(b"x")
        done = 0
        while done < len(self._buffer):
            done += self._socket.recv_into(self._buffer[done : done + PIECE], 0, socket.MSG_WAITALL)

    def ask(self) -> None:
        """Exchange as many bytes as gossipx's request and reply."""
        self._socket.sendall(self._question)
        left = self._answer
        while left:
            left -= len(self._socket.recv(left))

    def close(self) -> None:
        self._socket.close()
        super().close()


KEY = bytes(range(32))
CHECKS: dict[str, Callable[[], Any]] = {
    "mac": lambda: hmac.new(KEY, digestmod="sha256"),
    "xxh3": xxhash.xxh3_64,
    "tls": frames.Unchecked,
}
"""Protection of the model over sockets by one primitive: its cost alone in Python is the reference for gossipx."""


def context(folder: Path, purpose: ssl._SSLMethod) -> ssl.SSLContext:
    """Return a context for TLS 1.3 with certificates on both sides, as in gossipx."""
    made = ssl.SSLContext(purpose)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.load_cert_chain(folder / folder_of(HERE) / "cert.pem", folder / folder_of(HERE) / "key.pem")
    made.load_verify_locations(folder / "ca.pem")
    made.verify_mode = ssl.CERT_REQUIRED
    return made


def serve_secured(size: int, way: str) -> None:
    """Send the model for each received byte: under a MAC, with an XXH3 checksum, or by TLS."""
    model = filled(size)
    kind, _, folder = way.partition(":")
    connected = accepted()
    if kind == "tls":
        connected = context(Path(folder), ssl.PROTOCOL_TLS_SERVER).wrap_socket(connected, server_side=True)
    while connected.recv(1):
        check = CHECKS[kind]()
        for start in range(0, size, PIECE):
            piece = model.view[start : start + PIECE]
            connected.sendall(piece)
            check.update(piece)  # while it is in the processor's cache
        connected.sendall(check.digest())


class Secured(Raw):
    """A client over blocking sockets with one of :data:`CHECKS` on both sides."""

    def __init__(self, size: int, way: str):
        super().__init__(size, way, serve=serve_secured)
        self._kind, _, folder = way.partition(":")
        if self._kind == "tls":
            self._socket = context(Path(folder), ssl.PROTOCOL_TLS_CLIENT).wrap_socket(self._socket)
        self._buffer = Memory(size + CHECKS[self._kind]().digest_size).view
        self._size = size

    def pull(self) -> None:
        self._socket.send(b"x")
        check = CHECKS[self._kind]()
        flags = () if self._kind == "tls" else (socket.MSG_WAITALL,)
        done = 0
        while done < len(self._buffer):
            end = min(done + OBSERVED_PIECE, self._size) if done < self._size else len(self._buffer)
            begin = done
            while done < end:
                done += self._socket.recv_into(self._buffer[done:end], 0, *flags)
            if end <= self._size:
                check.update(self._buffer[begin:end])
        assert bytes(self._buffer[self._size :]) == check.digest()


# --- gossipx ---------------------------------------------------------------------------------------------


def manager(rank: int, addresses: list[Address], on_request: OnRequest, way: str) -> CommManager:
    """Return one of two managers; ``way`` is tcp, shm, gloo, mac, unchecked, or tls with its folder of certificates."""
    kind, _, folder = way.partition(":")
    own = Path(folder) / folder_of(HERE)
    comm = CommManager(
        rank=rank,
        names=["near", "far"],
        addresses=addresses,
        bind=Address(HERE, 0),
        peers_digest="bench",
        settings={},
        manifest=MANIFEST,
        on_request=on_request,
        peer_timeout=SECONDS,
        transport=Tls(own / "cert.pem", own / "key.pem", Path(folder) / "ca.pem") if kind == "tls" else tcp,
        secret=auth.FixedSecrets((auth.Secret(KEY),)) if kind == "mac" else None,
        share_memory=kind == "shm",
        carriers=ProcessGroups("gloo", torch.device("cpu")) if kind == "gloo" else None,
    )
    comm.start()
    return comm


def serve_gossipx(size: int, way: str, versions: str) -> None:
    """Answer pulls with the model, and other requests with a few bytes.

    ``versions`` is "one", whose checksum is computed at the first pull, or "many": each pull is of a new version, whose
    checksum must be computed.
    """
    memory = filled(size)
    model = Source(memory.view, memory.descriptor)

    def react(sender: int, key: Hashable, request: Request, upload: object) -> None:
        pulled = isinstance(request, PullRequest)
        payload = dataclasses.replace(model) if versions == "many" else model
        reply = ModelReply(1) if pulled else ANSWER
        deadline = time.monotonic() + SECONDS
        comm.answer(key, reply, payload=payload if pulled else None, deadline=deadline, done=lambda whole: None)

    pin(1)
    if way == "unchecked":
        frames.CHECKSUMS = frames.Unchecked
    comm = manager(1, [Address(HERE, 1)] * 2, react, way)
    print(comm.address.port, flush=True)
    sys.stdin.read()
    comm.close()


class Gossipx(Way):
    """A client of a CommManager's pull, with all its checks.

    Args:
        size: bytes of the model.
        way: the transport: tcp, shm or gloo.
        sink: returns the destination of the model, a new one for each pull.
        after: called with the sink when the model has arrived.
        versions: whether pulls are of "one" version of the model, or of "many", a new one each.
    """

    def __init__(
        self,
        size: int,
        way: str,
        sink: Callable[[], Sink],
        after: Callable[[Any], None] = lambda sink: None,
        versions: str = "one",
    ):
        super().__init__(serve_gossipx, size, way, versions)
        self._comm = manager(0, [Address(HERE, 1), Address(HERE, int(self._told))], lambda *given: None, way)
        self._sink, self._after = sink, after
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if way == "unchecked":  # connections keep their initial check
            usual, frames.CHECKSUMS = frames.CHECKSUMS, frames.Unchecked
            self.prepare()
            self.pull()
            frames.CHECKSUMS = usual

    def _request(self, request: Request, sink: Sink | None) -> None:
        self._comm.request(1, request, deadline=time.monotonic() + SECONDS, payload=sink, done=self._done.put)
        reply = self._done.get(timeout=SECONDS)
        if isinstance(reply, Exception):
            raise reply

    def prepare(self) -> None:
        self._buffer = self._sink()

    def pull(self) -> None:
        self._request(PullRequest(1, 30.0), self._buffer)
        self._after(self._buffer)

    def ask(self) -> None:
        """Send a request of 1 KB, and receive a reply of a few bytes."""
        self._request(QUESTION, None)

    def close(self) -> None:
        self._comm.close()
        super().close()


# --- torch.distributed's gloo, and torch rpc ---------------------------------------------------------------


def _join(rank: int, place: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)


def serve_gloo(size: int, place: str) -> None:
    """Send the model for each received number until 0."""
    pin(1)
    print("", flush=True)
    _join(1, place)
    model, asked = torch.ones(size // 4), torch.ones(1)
    dist.recv(asked, 0)
    while asked.item():
        dist.send(model, 0)
        dist.recv(asked, 0)
    dist.destroy_process_group()


class Gloo(Way):
    """A client of torch.distributed's send and recv."""

    def __init__(self, size: int, place: str):
        super().__init__(serve_gloo, size, place)
        _join(0, place)
        self._buffer = torch.ones(size // 4)

    def pull(self) -> None:
        dist.send(torch.ones(1), 1)
        dist.recv(self._buffer, 1)

    def close(self) -> None:
        dist.send(torch.zeros(1), 1)
        dist.destroy_process_group()
        super().close()


@functools.cache
def give(size: int) -> torch.Tensor:
    """Return the model, in the serving process."""
    return torch.ones(size // 4)


def _rpc(rank: int, place: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{place}", num_worker_threads=2)
    rpc.init_rpc(("near", "far")[rank], rank=rank, world_size=2, rpc_backend_options=options)


def serve_rpc(place: str) -> None:
    """Serve :func:`give`."""
    pin(1)
    print("", flush=True)
    _rpc(1, place)
    rpc.shutdown()


class Rpc(Way):
    """A client of a remote call that returns the model."""

    def __init__(self, size: int, place: str):
        super().__init__(serve_rpc, place)
        _rpc(0, place)
        self._size = size

    def pull(self) -> None:
        rpc.rpc_sync("far", give, args=(self._size,))

    def close(self) -> None:
        rpc.shutdown()
        super().close()
