"""Reserved ports: no other process gets them, and a peer can listen on them."""

from __future__ import annotations

import socket
import sys
import threading

import launches
import pytest
from launches import Capture, Run
from ports import free_ports

from gossipx.launch.ports import kept_free, reserve
from gossipx.transports import Address, tcp

HERE = "127.0.0.1"
run = launches.run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems let nobody listen on a bound port")


def is_taken(port: int) -> bool:
    """Return whether a program that does not know of the reservation is refused."""
    with socket.socket() as other:
        try:
            other.bind((HERE, port))
        except OSError:
            return True
        return False


def test_a_reserved_port_is_for_peers_only() -> None:
    with reserve(Address(HERE, 0)) as reserved:
        port = reserved.getsockname()[1]
        assert is_taken(port)
        listening = tcp.listen(Address(HERE, port))
        accepted: list[object] = []
        thread = threading.Thread(target=lambda: accepted.append(listening.accept()))
        thread.start()
        with socket.create_connection((HERE, port)):
            thread.join()
        assert accepted
        listening.close()
        assert is_taken(port)
        tcp.listen(Address(HERE, port)).close()  # a peer that is restarted


def test_ports_are_kept_free_and_those_in_use_are_left_to_the_peers() -> None:
    free, used = free_ports(2)
    with socket.create_server((HERE, used)):
        with kept_free([Address(HERE, used), Address(HERE, free), Address("no such host", 5000)]):
            assert is_taken(free)
        assert not is_taken(free)


def test_a_run_holds_the_ports_of_its_peers_from_its_start(run: Run, capsys: Capture) -> None:
    """Between the start of a peer and the moment it listens, an outgoing connection got the port."""
    first, second = free_ports(2)
    body = f"""
        import socket
        port = ({first}, {second})[rank]
        try:
            socket.socket().bind(("{HERE}", port))
        except OSError as error:
            print("another program gets:", error.strerror)
        socket.create_server(("{HERE}", port)).close()
        train()
        finish(_0=report(0), _1=report(1))
    """
    assert run(body, peers=f"{HERE}:{first}\n{HERE}:{second}") == 0
    assert capsys.readouterr().out.count("another program gets: Address already in use") == 2
    assert not is_taken(first)
