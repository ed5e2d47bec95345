"""Clients and servers of the exchange benchmark, one pair per way to fetch a model from another process.

The server runs in a separate process, which prints a line when it is ready, and sends the model at each request.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import rpc

from gossipx.comm import CommManager
from gossipx.comm.listener import OnRequest
from gossipx.launch.ports import reserve
from gossipx.memory import PIECE, Memory, Source
from gossipx.protocol.messages import ArriveRequest, HereReply, ModelReply, PullRequest, Request, Stage
from gossipx.tools.certs import folder_of
from gossipx.transports import Address, tcp
from gossipx.transports.process_group import ProcessGroups
from gossipx.transports.tls import Tls
from gossipx.wire import Message, Sink, auth, frames

HERE = "127.0.0.1"
MANIFEST = ("model uint8 1 strides 1 trainable",)
SECONDS = 120.0  # timeout of every wait, longer than any transfer


class Way(Protocol):
    """A client of one way to fetch the model of another process."""

    def pull(self) -> None:
        """Fetch the model once, into allocated memory."""

    def close(self) -> None:
        """Close the connection and end the server."""


def start(script: str, kind: str, size: int, *more: str, stdin: int | None = None) -> tuple[subprocess.Popen[str], str]:
    """Start the process in which ``script`` serves a way, and return it with the line that it prints."""
    command = [sys.executable, script, kind, str(size), *more]
    process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def serve(ways: dict[str, Callable[..., None]]) -> None:
    """Serve the way that the arguments name; the main function of a process started by :func:`start`."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    pin(1)
    ways[sys.argv[1]](int(sys.argv[2]), *sys.argv[3:])


def end_with_parent() -> None:
    """End this process when the benchmark ends, however it ends."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def pin(place: int) -> None:
    """Pin this process to a core: otherwise both sides sometimes share a core, which halves the rate."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(range(os.cpu_count() or 1))
        os.sched_setaffinity(0, {cores[place % len(cores)]})


def filled(size: int) -> Memory:
    """Return a model of ``size`` bytes with typical values, because arithmetic on denormals is far slower."""
    memory = Memory(size)
    piece = torch.randn(PIECE // 4).numpy().tobytes()
    memory.view[:] = piece * (size // PIECE) + piece[: size % PIECE]
    return memory


# --- blocking sockets, without any check ---------------------------------------------------------------


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


def serve_raw(size: int, sending: str) -> None:
    """Send the model for each received byte, and a reply of gossipx's size for a request of gossipx's size.

    ``sending`` is sendall or sendfile.
    """
    model = filled(size)
    question, answer = on_the_wire(QUESTION), bytes(on_the_wire(ANSWER))
    with socket.create_server((HERE, 0)) as listening:
        loss_based(listening)
        print(listening.getsockname()[1], flush=True)
        connected, _ = listening.accept()
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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


class Raw:
    """A client over blocking sockets, with MSG_WAITALL into one buffer."""

    def __init__(self, size: int, sending: str):
        self._process, port = start(__file__, "raw", size, sending)
        self._socket = socket.socket()
        loss_based(self._socket)
        self._socket.connect((HERE, int(port)))
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
        self._process.wait(SECONDS)


class Iperf:
    """iperf3 for the same number of bytes; it measures its own time, from the first byte to the last."""

    def __init__(self, size: int):
        self._reserved = reserve(Address(HERE, 0))
        self._port = str(self._reserved.getsockname()[1])
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._server = subprocess.Popen(["iperf3", "-s", "-p", self._port, "-B", HERE], **quiet)
        self._size = str(size)
        self.seconds = 0.0

    def pull(self) -> None:
        command = ["iperf3", "-c", HERE, "-p", self._port, "-n", self._size, "-C", "cubic", "-J"]
        for _ in range(50):  # retry until it listens
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode == 0:
                self.seconds = float(json.loads(done.stdout)["end"]["sum_received"]["seconds"])
                return
            time.sleep(0.1)
        raise SystemExit(f"iperf3 failed: {done.stdout}{done.stderr}")

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(SECONDS)
        self._reserved.close()


# --- gossipx ---------------------------------------------------------------------------------------------


KEY = bytes(range(32))
SECRET = auth.Secret(KEY)


def tls_of(folder: Path) -> Tls:
    """Return gossipx's TLS transport with the certificates in a folder."""
    return Tls(folder / folder_of(HERE) / "cert.pem", folder / folder_of(HERE) / "key.pem", folder / "ca.pem")


def manager(
    rank: int,
    addresses: list[Address],
    on_request: OnRequest,
    way: str,
) -> CommManager:
    """Return one of two managers; ``way`` is tcp, shm, gloo, mac, unchecked, or tls with its folder of certificates."""
    kind, _, folder = way.partition(":")
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
        transport=tls_of(Path(folder)) if kind == "tls" else tcp,
        secret=SECRET if kind == "mac" else None,
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

    if way == "unchecked":
        frames.CHECKSUMS = frames.Unchecked
    comm = manager(1, [Address(HERE, 1)] * 2, react, way)
    print(comm.address.port, flush=True)
    sys.stdin.read()
    comm.close()


class Gossipx:
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
        command = [sys.executable, __file__, "gossipx", str(size), way, versions]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self._comm = manager(0, [Address(HERE, 1), Address(HERE, port)], lambda *given: None, way)
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
        """Create the destination of the next pull; not timed."""
        self._buffer = self._sink()

    def pull(self) -> None:
        self._request(PullRequest(1, 30.0), self._buffer)
        self._after(self._buffer)

    def ask(self) -> None:
        """Send a request of 1 KB, and receive a reply of a few bytes."""
        self._request(QUESTION, None)

    def close(self) -> None:
        self._comm.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(SECONDS)


# --- torch.distributed's gloo, and torch rpc ---------------------------------------------------------------


def _join(rank: int, place: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)


def serve_gloo(size: int, place: str) -> None:
    """Send the model for each received number until 0."""
    print("", flush=True)
    _join(1, place)
    model, asked = torch.ones(size // 4), torch.ones(1)
    dist.recv(asked, 0)
    while asked.item():
        dist.send(model, 0)
        dist.recv(asked, 0)
    dist.destroy_process_group()


class Gloo:
    """A client of torch.distributed's send and recv."""

    def __init__(self, size: int, place: str):
        self._process, _ = start(__file__, "gloo", size, place)
        _join(0, place)
        self._buffer = torch.ones(size // 4)

    def pull(self) -> None:
        dist.send(torch.ones(1), 1)
        dist.recv(self._buffer, 1)

    def close(self) -> None:
        dist.send(torch.zeros(1), 1)
        dist.destroy_process_group()
        self._process.wait(SECONDS)


_given: dict[int, torch.Tensor] = {}


def give(size: int) -> torch.Tensor:
    """Return the model, in the serving process."""
    if size not in _given:
        _given[size] = torch.ones(size // 4)
    return _given[size]


def _rpc(rank: int, place: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{place}", num_worker_threads=2)
    rpc.init_rpc(("near", "far")[rank], rank=rank, world_size=2, rpc_backend_options=options)


def serve_rpc(size: int, place: str) -> None:
    """Serve :func:`give`."""
    print("", flush=True)
    _rpc(1, place)
    rpc.shutdown()


class Rpc:
    """A client of a remote call that returns the model."""

    def __init__(self, size: int, place: str):
        self._process, _ = start(__file__, "rpc", size, place)
        _rpc(0, place)
        self._size = size

    def pull(self) -> None:
        rpc.rpc_sync("far", give, args=(self._size,))

    def close(self) -> None:
        rpc.shutdown()
        self._process.wait(SECONDS)


if __name__ == "__main__":
    import _remote  # imported by name, which remote calls refer to

    ways = {
        "raw": _remote.serve_raw,
        "gossipx": _remote.serve_gossipx,
        "gloo": _remote.serve_gloo,
        "rpc": _remote.serve_rpc,
    }
    _remote.serve(ways)
