"""Replacements of facilities that only Linux has, as used on macOS, where gossipx was not run."""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from pathlib import Path

import pytest

from gossipx import memory
from gossipx.launch import environment, ports
from gossipx.transports import Address, sockets, tcp, unix


def test_memory_without_memfd_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "memfd_create", raising=False)
    block = memory.Memory(8)
    block.view[:] = b"12345678"
    assert block.descriptor is None and bytes(block.view) == b"12345678"
    assert not memory.cannot_shrink(0)


def test_a_machine_without_a_boot_id_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers share memory only if both name the same machine, and an empty name is none."""

    def refuse(self: Path, encoding: str) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert unix.machine() == ""


def test_a_unix_socket_without_abstract_names_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    address = Address(str(tmp_path / "here"), 0)
    listening = unix.listen(address)
    connected = unix.connect(address, time.monotonic() + 10)
    assert (tmp_path / "here").is_socket()
    connected.abort()
    listening.close()


def test_tcp_without_options_of_linux_carries_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TCP_KEEPIDLE", "TCP_CONGESTION", "TCP_INFO"):
        monkeypatch.delattr(socket, name, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sockets, "_HANG_UP", 0)  # POLLRDHUP
    deadline = time.monotonic() + 10
    listening = tcp.listen(Address("127.0.0.1", 0))
    connected = tcp.connect(listening.address, deadline)
    accepted = listening.accept()
    connected.send([bytes(range(256)) * 16], deadline)
    got = bytearray(4096)
    accepted.receive_into(memoryview(got), deadline, lambda part: None)
    assert bytes(got) == bytes(range(256)) * 16 and accepted.quiet() and not accepted.hung_up()
    connected.abort()
    sockets.wait(accepted._socket, select.POLLIN, deadline)
    assert accepted.hung_up()
    accepted.abort()
    listening.close()


def test_no_port_is_reserved_where_that_would_keep_the_peer_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ports.kept_free([Address("127.0.0.1", port)]), socket.socket() as own:
        own.bind(("127.0.0.1", port))  # without SO_REUSEADDR


def test_a_closed_progress_pipe_is_gone_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    monkeypatch.setattr(Path, "is_fifo", lambda self: False)
    assert environment._pipe(writing) is None
    os.close(reading)
