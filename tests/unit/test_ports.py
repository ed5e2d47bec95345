"""Reserved ports: no other process gets them, and a peer can listen on them."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

import pytest
from _bench.peers import reserved
from forks.client import Piped
from launches import launcher
from ports import address, free_ports, places

from gossipx.launch.ports import kept_free, reserve
from gossipx.transports import Address, tcp

HERE = "127.0.0.1"

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


def test_a_run_holds_the_ports_of_its_peers_from_its_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert launcher(tmp_path)(body, peers=f"{HERE}:{first}\n{HERE}:{second}") == 0
    assert capsys.readouterr().out.count("another program gets: Address already in use") == 2
    assert not is_taken(first)


def test_benchmarks_hold_the_ports_that_they_choose() -> None:
    """They looked for free ports, and lost them in the seconds until the peers listened."""
    with reserved(3) as first, reserved(1) as other:
        assert all(is_taken(port) for port in (first, first + 1, first + 2, other))
        assert other not in range(first, first + 3)
    assert not is_taken(first)


def test_no_other_test_process_has_the_same_addresses() -> None:
    """A doctor met a listener of a test beside it on the next port: "6 peers here and 1 there"."""
    program = "import ports; print(ports.address(), *ports.places(2), flush=True); input()"
    with Piped("-c", program) as one, Piped("-c", program) as two:
        found = [process.stdout.readline().split() for process in (one, two)]
        assert len({address(), found[0][0], found[1][0]}) == 3
        assert len({place.partition(":")[2] for _, *listed in (*found, ("", *places(2))) for place in listed}) == 6
        with socket.create_server((found[0][0], 0)) as listening, socket.socket() as other:
            other.bind((address(), listening.getsockname()[1]))  # the same port of another process is free here
