"""The hosts file: the peers, their addresses, and which of them are on this machine."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from gossipx.errors import UsageError
from gossipx.launch.hosts import DEFAULT_PORT, PeerLine, bind_host, local_ranks, only_address, peers_digest, read_hosts

ELSEWHERE = "203.0.113.1"
"""An address that no machine has (RFC 5737, TEST-NET-3; sandboxes commonly use the first of its three networks)."""
NO_SUCH_NAME = "no-such-host.invalid"
"""A name that never resolves (RFC 2606)."""


def hosts(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "hosts.txt"
    file.write_text(text, encoding="utf-8")
    return file


def read(tmp_path: Path, text: str) -> list[PeerLine]:
    return read_hosts(hosts(tmp_path, text))


def refusal(tmp_path: Path, text: str, advertise: str | None = None) -> str:
    """Return the one line with which a file is refused, after the file's name; lines are read, and then looked up."""
    file = hosts(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        local_ranks(read_hosts(file), advertise, file)
    message = str(caught.value)
    assert caught.value.exit_code == 2 and message.startswith(f"{file}:") and "\n" not in message
    return message.removeprefix(f"{file}:")


def where(peers: list[PeerLine]) -> list[tuple[str, int]]:
    return [(peer.host, peer.port) for peer in peers]


@pytest.fixture(autouse=True)
def no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a name server: real ones may take seconds, or resolve every name."""
    really = socket.getaddrinfo

    def resolve(host: str, *arguments: object, **options: object) -> object:
        if host == NO_SUCH_NAME:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return really(host, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


# --- formats ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("node1", PeerLine(0, "node1", DEFAULT_PORT, None, f"node1:{DEFAULT_PORT}", 1)),
        ("node1:5000", PeerLine(0, "node1", 5000, None, "node1:5000", 1)),
        ("10.0.0.1:65535", PeerLine(0, "10.0.0.1", 65535, None, "10.0.0.1:65535", 1)),
        ("[::1]", PeerLine(0, "::1", DEFAULT_PORT, None, f"[::1]:{DEFAULT_PORT}", 1)),
        ("[2001:db8::7]:8080", PeerLine(0, "2001:db8::7", 8080, None, "[2001:db8::7]:8080", 1)),
        ("node1 device=cuda:1", PeerLine(0, "node1", DEFAULT_PORT, "cuda:1", f"node1:{DEFAULT_PORT}", 1)),
        ("node1 name=anna", PeerLine(0, "node1", DEFAULT_PORT, None, "anna", 1)),
        ("node1 nat", PeerLine(0, "node1", DEFAULT_PORT, None, f"node1:{DEFAULT_PORT}", 1, behind_nat=True)),
        ("  node1:1024\tname=anna  slots=1 device=cpu  # the first", PeerLine(0, "node1", 1024, "cpu", "anna", 1)),
    ],
)
def test_a_line(tmp_path: Path, line: str, expected: PeerLine) -> None:
    assert read(tmp_path, line) == [expected]


def test_slots_are_peers_on_consecutive_ports(tmp_path: Path) -> None:
    peers = read(tmp_path, "localhost slots=3 device=cpu")
    assert where(peers) == [("localhost", DEFAULT_PORT + slot) for slot in range(3)]
    assert [peer.rank for peer in peers] == [0, 1, 2]
    assert [peer.name for peer in peers] == [f"localhost:{DEFAULT_PORT + slot}" for slot in range(3)]
    assert {peer.device for peer in peers} == {"cpu"} and {peer.line for peer in peers} == {1}
    assert where(read(tmp_path, "a:65534 slots=2")) == [("a", 65534), ("a", 65535)], "up to the last one"
    several = read(tmp_path, "a:5000 slots=2\na:5002\nb:5000")
    assert where(several) == [("a", 5000), ("a", 5001), ("a", 5002), ("b", 5000)]
    assert [peer.name for peer in read(tmp_path, "a name=x slots=2\nb name=y slots=1")] == ["x-0", "x-1", "y"]


def test_comments_and_blank_lines_count_as_lines_and_nothing_else(tmp_path: Path) -> None:
    """Editors of Windows write a byte order mark, and end lines with two characters."""
    text = "\ufeff# the peers\n\n   \r\na slots=2 # two\r\n\t# none\nb:5007 name=last#comment\n\n"
    peers = read(tmp_path, text)
    assert [(peer.rank, peer.host, peer.line, peer.name) for peer in peers] == [
        (0, "a", 4, f"a:{DEFAULT_PORT}"),
        (1, "a", 4, f"a:{DEFAULT_PORT + 1}"),
        (2, "b", 6, "last"),
    ]
    assert read(tmp_path, "\ufefflocalhost")[0].host == "localhost"


# --- malformed ones -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        # Addresses.
        (":5000", "':5000' is not host[:port]"),
        ("-oProxyCommand=true", "'-oProxyCommand=true' is not host[:port]"),  # else an option of ssh
        ("a:", "port '' is not an integer from 1024 to 65535"),
        ("a:65536", "port '65536' is not an integer from 1024 to 65535"),
        ("a:²", "port '²' is not an integer"),
        ("a:" + "9" * 5000, "is not an integer from 1024 to 65535"),
        ("2001:db8::7", "an IPv6 address in brackets"),
        ("[::1", "an IPv6 address in brackets"),
        ("[1.2.3.4]", "'[1.2.3.4]' is not an IPv6 address"),
        # By which each machine means itself: two would start the same rank.
        ("0.0.0.0:5001", "'0.0.0.0' is every address of a machine: write the one at which others reach it, or local"),
        ("*", "'*' is every address of a machine"),
        # Hosts that no peer can have, whatever a resolver would make of them.
        ("two..dots", "'two..dots' is not a host name: its parts between dots need 1 to 63 characters"),
        (f"{'long' * 20}.example", f"'{('long' * 20)[:60]}…' is not a host name: its parts"),
        ("239.1.2.3", "'239.1.2.3' is not the address of one machine: give the one at which others reach it"),
        ("10.1", "'10.1' is not a whole IPv4 address"),
        (f"node name={'n' * 400}", "host and name have 404 bytes, more than 350"),
        # Keys.
        ("a slot=2", "'slot=2' is not one of slots=N, device=cuda:0, name=TEXT, nat (did you mean 'slots'?)"),
        ("b nta", "'nta' is not one of slots=N, device=cuda:0, name=TEXT, nat (did you mean 'nat'?)"),
        ("a slots=", "'slots=' is not one of"),
        ("a slots=2 slots=3", "'slots' is given twice"),
        # Numbers of slots, and names.
        ("a slots=0", "slots '0' is not an integer from 1"),
        ("a:65535 slots=2", "2 slots starting at port 65535 need ports above 65535"),
        ("a name=\u200b", "not one printable line"),
        (f"a name={'x' * 600}", "not one printable line of at most 500 characters"),
        # Duplicates.
        ("first:5000", "address 'first:5000' is already on line 2"),
        ("first:4999 slots=2", "address 'first:5000' is already on line 2"),
        ("[::7]:6001", "address '[::7]:6001' is already on line 3"),
        ("b name=anna", "name 'anna' is already on line 4"),
        ("b name=berta-1", "name 'berta-1' is already on line 5"),
        ("b name=first:5000", "name 'first:5000' is already on line 2"),
        # Forms of other tools: MPICH, SLURM, Ansible, libp2p, SGE and others.
        ("node1:16 binding=core:1", "port '16' is not an integer from 1024 to 65535"),
        ("node1,node2", "'node1,node2' is not host[:port]: write one line per host, such as 'node1 slots=4'"),
        ("node[1-4]", "'node[1-4]' is not host[:port]: write one line per host"),
        ("me@node1", "'me@node1' is not host[:port]"),
        ("tcp://node1:29401", "'tcp://node1:29401' is not host[:port]"),
        ("a slots = 2", "'slots' is not one of slots=N, device=cuda:0, name=TEXT, nat"),
        ("node1 4 all.q@node1 UNDEFINED", "'4' is not one of slots=N"),
    ],
)
@pytest.mark.fault(34, 61)
def test_a_malformed_line_is_reported_with_file_and_line(tmp_path: Path, line: str, told: str) -> None:
    before = "# hosts\nfirst:5000\n[::7]:6001\nsecond name=anna\nthird name=berta slots=2\n"
    message = refusal(tmp_path, f"{before}{line}\nlast:5000\n")
    assert message.startswith("6: ") and told in message


@pytest.mark.parametrize("text", ["", "# nobody\n  # yet\n"])
@pytest.mark.fault(34)
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    told = "1: no peers in the file: write one line per host, such as 'localhost slots=4'"
    assert refusal(tmp_path, text) == told


@pytest.mark.fault(34)
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    missing, binary = tmp_path / "none.txt", tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00\n")
    for path, told in (
        (missing, "hosts file not found"),
        (tmp_path, "cannot read the hosts file"),
        (binary, "cannot read the hosts file"),
    ):
        with pytest.raises(UsageError, match=rf"^{path}: {told}.*\Z") as caught:
            read_hosts(path)
        assert caught.value.exit_code == 2


# --- which are here -----------------------------------------------------------------------------------


@pytest.mark.fault(34, 35)
@pytest.mark.parametrize(
    ("text", "advertise", "told"),
    [
        (f"{ELSEWHERE} slots=2\n203.0.113.2\n", None, " no line is this machine: add one, or name its host by"),
        ("# two\n127.0.0.1\n203.0.113.1", None, "2: '127.0.0.1' is loopback, which other machines cannot reach"),
        ("# two\nlocalhost\n203.0.113.1", None, "2: 'localhost' is loopback, which other machines cannot reach"),
        (f"localhost\n{ELSEWHERE}\n", "localhost", "1: 'localhost' is loopback, which other machines cannot reach"),
        ("localhost slots=2", "elsewhere", " no line has the host 'elsewhere' that --advertise names"),
        ("localhost slots=2\n\n127.0.0.1:29401\n", None, "3: '127.0.0.1:29401' is the same address as 'localhost"),
        (f"# hosts\n\n{NO_SUCH_NAME}\n", None, f"3: host '{NO_SUCH_NAME}' does not resolve ("),
        (f"{ELSEWHERE}:5000\n{NO_SUCH_NAME}:5000", None, f"2: host '{NO_SUCH_NAME}' does not resolve ("),
        (f"{ELSEWHERE}:5000\n{NO_SUCH_NAME}:5000 nat", None, " no line is this machine"),  # its own host may know it
        ("a nat\nb nat slots=2", None, "1: every host has 'nat': the others must be able to connect to one of them"),
        ("a nat\nb\na:5000", None, "3: 'a' is also on line 1: 'nat' is for a host, so write it on both or neither"),
    ],
)
def test_hosts_that_cannot_meet_are_refused(tmp_path: Path, text: str, advertise: str | None, told: str) -> None:
    """Each machine would take a line that is loopback for itself."""
    assert refusal(tmp_path, text, advertise).startswith(told)


@pytest.mark.fault(35)
def test_a_name_that_is_loopback_here_is_told_of_etc_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's installer gives a machine's own name the address 127.0.1.1."""
    really = socket.getaddrinfo

    def resolve(host: str, *arguments: object, **options: object) -> object:
        return really("127.0.1.1" if host == "node1" else host, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    file = hosts(tmp_path, f"node1\n{ELSEWHERE}\n")
    with pytest.raises(UsageError) as caught:
        local_ranks(read_hosts(file), None, file)
    told = "'node1' is 127.0.1.1 here, which other machines cannot reach: correct /etc/hosts, or give its address"
    assert str(caught.value) == f"{file}:1: {told}"
    with pytest.raises(UsageError, match=r"connect to 127\.0\.1\.1 \('node1'\), but peers listen on 203\.0\.113\.1"):
        bind_host(read_hosts(file)[0], "203.0.113.1", file)
    alone = hosts(tmp_path, "node1 slots=2\n")
    assert local_ranks(read_hosts(alone), None, alone) == [0, 1], "no other machine needs to reach it"


def test_only_this_machines_lines_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those to whose address a socket can bind, or that --advertise names: behind NAT no address of the file belongs to
    this machine, and names are not resolved."""
    monkeypatch.setattr("gossipx.launch.hosts.is_here", lambda address: str(address) == "203.0.113.2")
    file = hosts(tmp_path, f"{ELSEWHERE} slots=2\n203.0.113.2 slots=2\n203.0.113.3\n")
    assert local_ranks(read_hosts(file), None, file) == [2, 3]
    file = hosts(tmp_path, f"{ELSEWHERE} slots=2\n{NO_SUCH_NAME}\n[2001:db8::7]\n{ELSEWHERE}:5007\n")
    peers = read_hosts(file)
    assert local_ranks(peers, ELSEWHERE, file) == [0, 1, 4]
    assert local_ranks(peers, NO_SUCH_NAME, file) == [2]
    assert local_ranks(peers, "[2001:db8::7]", file) == local_ranks(peers, "2001:db8::7", file) == [3]


# --- where to listen ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "bind", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("[::1]", "127.0.0.1", "::1"),
        ("127.3.2.1", "127.0.0.1", "127.3.2.1"),
        ("127.0.0.1", "0.0.0.0", "0.0.0.0"),
        (ELSEWHERE, "0.0.0.0", "0.0.0.0"),
        (ELSEWHERE, ELSEWHERE, ELSEWHERE),
        ("[2001:db8::7]", "::", "::"),
    ],
)
def test_where_a_peer_listens(tmp_path: Path, host: str, bind: str, expected: str) -> None:
    file = hosts(tmp_path, host)
    assert bind_host(read_hosts(file)[0], bind, file) == expected


@pytest.mark.parametrize(
    ("host", "bind", "told"),
    [
        *(
            (host, bind, "give --bind 0.0.0.0 ")
            for host in (ELSEWHERE, "[2001:db8::7]")
            for bind in ("127.0.0.1", "::1")
        ),
        *(
            ("localhost slots=2", bind, f"connect to 127.0.0.1 ('localhost'), but peers listen on {bind}")
            for bind in (ELSEWHERE, "2001:db8::7", "127.0.0.2", "::1")
        ),
    ],
)
def test_a_peer_that_is_not_found_where_it_listens_is_refused(tmp_path: Path, host: str, bind: str, told: str) -> None:
    """Off loopback it needs --bind."""
    file = hosts(tmp_path, f"# one\n{host}\n")
    with pytest.raises(UsageError) as caught:
        bind_host(read_hosts(file)[0], bind, file)
    message = str(caught.value)
    assert message.startswith(f"{file}:2: ") and told in message and host.split()[0].strip("[]") in message
    assert "--bind" not in told or " --secret-file FILE or --tls-cert" in message


def test_a_peer_is_advertised_at_the_one_address_on_which_it_listens() -> None:
    """A newcomer, or a process of torchrun, that binds one of a machine's addresses is not reached at the others."""
    assert [only_address(bind) for bind in (ELSEWHERE, "2001:db8::7")] == [ELSEWHERE, "2001:db8::7"]
    assert {only_address(bind) for bind in ("127.0.0.1", "0.0.0.0", "::", "node1")} == {None}


# --- agreeing on the list -----------------------------------------------------------------------------


def test_different_lists_have_different_digests(tmp_path: Path) -> None:
    """Comments, layout and devices may differ between machines."""
    texts = ["a\nb", "a nat\nb", "a\nb nat", "b\na", "a", "a\nb:5001", "a name=x\nb", "a slots=2\nb", "a\nc"]
    assert len({peers_digest(read(tmp_path, text)) for text in texts}) == len(texts)
    alike = ("a slots=2", f"# mine\n\na:{DEFAULT_PORT} slots=2 device=cuda:0  # here\n", f"a\na:{DEFAULT_PORT + 1}")
    assert len({peers_digest(read(tmp_path, text)) for text in alike}) == 1


@pytest.mark.fault(35)
def test_a_machine_without_ipv6_has_no_ipv6_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = socket.socket

    def without_ipv6(family: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return really(family)

    monkeypatch.setattr(socket, "socket", without_ipv6)
    assert refusal(tmp_path, "[::1]").startswith(" no line is this machine")
