"""``gossipx doctor``: verdicts from findings, the facts of one machine, and the replies of a run to a doctor."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ports import address, free_ports

from gossipx.cli import main
from gossipx.errors import NotAuthorisedError, PeerTimeoutError, ProtocolError, UsageError
from gossipx.launch.hosts import PeerLine
from gossipx.settings.sections import ExchangeSettings, RunConfig
from gossipx.tools.doctor import DoctorListener, _Checkup, examine, machine
from gossipx.tools.doctor.probe import ENOUGH, PIECE, Load, ProbeSettings, probing
from gossipx.tools.doctor.verdicts import REACH, Findings, Line, Measurement, hosts_of, verdicts
from gossipx.transports import Address, handshake, tcp
from gossipx.transports.access import grant
from gossipx.transports.handshake import checkup_facts, facts_in
from gossipx.transports.link import Links
from gossipx.wire import CheckupRequest, Hello, Welcome
from gossipx.wire.auth import FixedSecrets, Secret
from gossipx.wire.frames import VERSION

FACTS = {"role": "doctor", "gossipx": "1.0", "torch": "2.13.0+cpu", "python": "3.11.7", "protocol": 4, "model": ""}


def well(count: int = 2, slots: int = 1, **changed: Any) -> Findings:
    """Findings of host a without a fault: ``count`` hosts a, b, c with ``slots`` lines each, from port 29400 up."""
    lines = [
        PeerLine(number * slots + slot, "abcd"[number], 29400 + slot, None, f"{'abcd'[number]}-{slot}", number + 1)
        for number in range(count)
        for slot in range(slots)
    ]
    hosts = hosts_of(lines, {"abcd"[number]: (f"10.0.0.{number + 1}",) for number in range(count)})
    probed = [host for host in hosts if host.number or slots > 1]
    found = Findings(hosts, [0], FACTS)
    found.ports = [Line(peer.rank, "open") for peer in hosts[0].peers]
    found.reached = {peer.rank: Line(peer.rank, "ok", "", FACTS) for host in probed for peer in host.peers}
    found.ways = {host.number: Measurement(1e-3, 0.0, 1e8) for host in probed}
    found.heard = {host.number for host in hosts[1:]}
    for name, value in changed.items():
        assert hasattr(found, name)
        setattr(found, name, value)
    return found


def resolved(*addresses: tuple[str, ...]) -> Findings:
    found = well(len(addresses), slots=2)
    hosts = zip(found.hosts, addresses, strict=True)
    found.hosts = [replace(host, addresses=own, error="" if own else "unknown") for host, own in hosts]
    return found


def answered(**facts: str) -> Findings:
    return well(reached={1: Line(1, "ok", "", FACTS | facts)})


def measured(latency: float | None = None, offset: float = 0.0, rate: float | None = None, why: str = "") -> Findings:
    return well(ways={1: Measurement(latency, offset, rate, why)})


def models(here: dict[str, Any], there: dict[str, Any], model: str = "") -> Findings:
    return well(facts=here, reached={1: Line(1, "ok", "", there)}, model=model)


def hidden(*numbers: int, own: int = 0, count: int = 3) -> Findings:
    """Findings of host ``own`` in a file with ``nat`` on these hosts; nothing is wrong."""
    lines = [PeerLine(n, "abc"[n], 29400, None, "abc"[n], n + 1, behind_nat=n in numbers) for n in range(count)]
    others = {n for n in range(count) if n != own}
    found = well(count, here=[own])
    found.hosts = hosts_of(lines, {"abc"[number]: (f"10.0.0.{number + 1}",) for number in range(count)})
    found.ports = [Line(own, "open")]
    found.reached = {n: Line(n, "ok", "", FACTS) for n in others - set(numbers)}
    found.ways = {n: Measurement(1e-3, 0.0, 1e8) for n in found.reached}
    found.heard = set() if own in numbers else others
    return found


def failed(rank: int, state: str, text: str = "", count: int = 2, slots: int = 1, **changed: Any) -> Findings:
    found = well(count, slots, **changed)
    found.reached[rank] = Line(rank, state, text)
    return found


def shown(found: Findings, about: str) -> list[tuple[str, str]]:
    return [(one.level, f"{one.text}: {one.advice}") for one in verdicts(found) if one.about == about]


def codes(found: Findings) -> set[int]:
    return {one.exit_code for one in verdicts(found) if one.level == "fail"}


# --- verdicts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "slots"), [(1, 2), (2, 1), (3, 4)])
def test_without_a_fault_each_rule_gives_one_ok_line(count: int, slots: int) -> None:
    said = verdicts(well(count, slots))
    assert {one.level for one in said} <= {"ok", "note"}
    assert [one.about for one in said] == ["names", "ports", "reach", "versions", "clock", "bandwidth", "model"]
    assert all(one.text.isprintable() and one.advice.isprintable() for one in said)


LINK = Measurement(1e-3, 0.0, 1e8)
ONE, OTHER = ({**FACTS, "model": digest * 64} for digest in "12")
VERDICTS: list[tuple[Findings, str, str, tuple[str, ...]]] = [
    (resolved(("10.0.0.1",), ()), "fail", "names", ("b does not resolve on a (unknown)",)),
    (resolved(("127.0.1.1",), ("10.0.0.2",)), "fail", "names", ("a is 127.0.1.1 on a", "other machines")),
    (resolved(("127.0.0.1", "::1")), "ok", "names", ("1 host resolved",)),
    (
        well(ports=[Line(0, "foreign", "no frame")]),
        "fail",
        "ports",
        ("port 29400 of a is not free: no gossipx", "anot"),
    ),
    (well(ports=[Line(0, "doctor")]), "fail", "ports", ("another gossipx doctor", "stop it")),
    (well(ports=[Line(0, "denied", "cannot listen at a:80: not allowed")]), "fail", "ports", ("not allowed",)),
    (well(ports=[Line(0, "authorised", "it has a secret")]), "fail", "ports", ("not authorised", "the same --secret-")),
    (well(ports=[Line(0, "version", "it speaks version 3")]), "fail", "ports", ("version 3", "the same gossipx")),
    (well(ports=[Line(0, "peers", "names do")]), "fail", "ports", ("the hosts files differ", "the same hosts file")),
    (well(ports=[Line(0, "run")]), "note", "ports", ("port 29400 of a: a run is at work there",)),
    (well(heard=set()), "warn", "reach", ("b → a: no probe has arrived", "if a is behind NAT, write 'nat'")),
    (well(heard=set(), ports=[Line(0, "run")]), "ok", "reach", ("1 peer reached",)),
    (answered(gossipx="1.1"), "warn", "versions", ("gossipx differs: 1.0 on a; 1.1 on b",)),
    (answered(torch="2.9.0+cu128"), "warn", "versions", ("torch differs: 2.13.0 on a; 2.9.0 on b",)),
    (answered(torch="2.13.0+cu128", python="3.10.1"), "ok", "versions", ("gossipx 1.0 (protocol 4)",)),
    (measured(1e-3, -300.0), "warn", "clock", ("the clock of b is 300.0 s behind a's", "curves", "certificates")),
    (measured(1e-3, 2.0), "warn", "clock", ("2.0 s ahead of a's",)),
    (measured(3.0, 2.0), "ok", "clock", ("clocks within 2000.0 ms",)),
    (well(), "ok", "bandwidth", ("800 Mbit/s to a",)),
    # The first is this machine.
    (well(3, ways={0: LINK, 1: replace(LINK, rate=1e7), 2: LINK}), "ok", "bandwidth", ("80 Mbit/s to 800 Mbit/s",)),
    (measured(1e-3, 0.0, 0.0), "fail", "bandwidth", ("b → a: small messages arrive in time, 64 KiB", "MTU")),
    (measured(why="it has hung up"), "warn", "bandwidth", ("it has hung up", "try again")),
    (measured(1e-3, why="it was busy with other hosts"), "warn", "bandwidth", ("it was busy",)),
    (measured(1e-3, why="a run is at work there"), "note", "bandwidth", ("a run is at work there",)),
    (well(), "note", "model", ("--model NAME",)),
    (models(ONE, ONE, model="lenet"), "ok", "model", ("lenet, fingerprint 111111111111 on a, b",)),
    (models(ONE, OTHER), "fail", "model", ("111111111111 on a; 222222222222 on b",)),
    (models(ONE, OTHER | {"role": "run"}), "fail", "model", ("111111111111 on a; 222222222222 on b (a run)",)),
    (well(fault="train.py ended without gossipx.join"), "fail", "model", ("a: train.py ended",)),
]
"""Findings, and the one verdict on a topic that follows: its level, topic and words."""


@pytest.mark.fault(67)
@pytest.mark.parametrize(("found", "level", "about", "words"), VERDICTS)
def test_a_verdict(found: Findings, level: str, about: str, words: tuple[str, ...]) -> None:
    ((seen, text),) = shown(found, about)
    assert seen == level and all(word in text for word in words), text
    assert codes(found) == ({5 if "not authorised" in text else 1} if level == "fail" else set())
    assert "stop" not in text or "not authorised" not in text, "a run of another secret is not to be stopped"


@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("refused", ("a → b:29400", "start the same command there", "--bind")),
        ("timeout", ("allow TCP port 29400", "--advertise")),
        ("no route", ("ip route get",)),
        ("silent", ("a program listens and does not answer", "ss -ltnp")),
        ("closed", ("closes the connection", "the same secret")),
        ("foreign", ("no gossipx listens there",)),
        ("authorised", ("not authorised", "--secret-file")),
        ("version", ("install the same gossipx",)),
        ("peers", ("the hosts files differ", "the same hosts file")),
        ("other", ("another peer", "forwarded")),
        ("local", ("ulimit -n",)),
    ],
)
def test_a_line_that_is_not_reached(state: str, heard: bool, words: tuple[str, ...]) -> None:
    found = failed(1, state, "what was seen", heard={1} if heard else set())
    if heard and state in ("refused", "timeout", "no route"):
        words = ("behind NAT or a firewall: allow TCP port 29400 there, check its --bind, or write 'nat'",)
    ((level, text),) = shown(found, "reach")
    assert level == "fail" and all(word in text for word in ("what was seen", *words)), text
    assert ("the other way works" in text) == heard
    assert codes(found) == {5 if state == "authorised" else 1} and state in REACH


def test_lines_of_one_host_that_fail_alike_are_one_verdict() -> None:
    """And a name that does not resolve is reported once."""
    found = failed(8, "refused", "Connection refused", 3, 4)
    for rank in (9, 11):
        found.reached[rank] = Line(rank, "refused", "Connection refused")
    ((level, text),) = shown(found, "reach")
    assert level == "fail" and "a → c:29400,29401,29403" in text
    found = resolved(("10.0.0.1",), ())
    found.reached[1] = Line(1, "name")
    assert shown(found, "reach") == []


def test_hosts_behind_nat_are_named_and_must_reach_this_one() -> None:
    """And expect no probe themselves."""
    found = hidden(1, 2)
    assert {one.level for one in verdicts(found)} <= {"ok", "note"}
    assert shown(found, "reach")[0] == ("ok", "b, c → a: behind NAT, and connects to this host: ")
    found.heard = {1}
    found.hosts = [found.hosts[0], *(replace(host, addresses=()) for host in found.hosts[1:])]
    told = [text for level, text in shown(found, "reach") if level == "fail"]
    assert told == ["c → a: behind NAT, and no probe has arrived: start the same command there, and see its report"]
    assert shown(found, "names") == [("ok", "1 host resolved on a: ")]
    assert codes(found) == {1}
    found = hidden(1, 2, own=1)
    assert {one.level for one in verdicts(found)} <= {"ok", "note"}
    assert ("note", "b is behind NAT: it connects to other hosts, and none can connect to it") in shown(found, "reach")


# --- measuring --------------------------------------------------------------------------------------


def test_a_load_is_cut_short_once_its_rate_is_known() -> None:
    load = Load(time.monotonic() - 2 * ENOUGH)
    assert load.rate == 0 and len(load.buffer_at(0)) == PIECE
    with pytest.raises(PeerTimeoutError):
        load.filled(0)
    assert 0.5 < load.rate / (PIECE / (2 * ENOUGH)) <= 1


def test_facts_that_are_not_whole_are_refused() -> None:
    whole = checkup_facts(Hello(0, "a", 2, "digest", "model"), "run")
    assert facts_in(whole | {"more": 1}) == whole
    for name in whole:
        with pytest.raises(ProtocolError, match=f"no {name}"):
            facts_in(whole | {name: None})


def test_a_probe_counts_for_every_host_name_of_a_machine() -> None:
    """Hosts b and c are one machine, whose load to host a counts as a probe by both."""
    peers = [PeerLine(rank, name, 0, None, f"{name}-0", rank + 1) for rank, name in enumerate("abcd")]
    asking, answering = (
        ProbeSettings(
            me=Hello(rank, peers[rank].name, 4, "digest", ""),
            peers=peers,
            access=grant(ExchangeSettings(), "127.0.0.1"),
            links=Links("doctor", 0, 10.0),
        )
        for rank in (1, 0)
    )
    listener = DoctorListener(peers[:1], {0: "127.0.0.1"}, answering)
    addresses = ("10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.4")
    hosts = hosts_of(peers, {name: (own,) for name, own in zip("abcd", addresses, strict=True)})
    try:
        with probing(asking, peers[0], tcp.connect(listener._listening[0].address, time.monotonic() + 10)) as probe:
            assert (probe.measure().rate or 0) > 0
        with listener.news:
            assert listener.news.wait_for(lambda: listener.probed, 10)
        assert _Checkup(Findings(hosts, [0], FACTS), answering, listener, print)._probed() == {1, 2}
    finally:
        listener.close()
        answering.links.abort()
        asking.links.abort()


# --- this machine -----------------------------------------------------------------------------------


def test_a_missing_device_is_reported_with_the_option_that_named_it() -> None:
    lines = [PeerLine(rank, "a", 29400 + rank, device, "", 1) for rank, device in enumerate((None, "cuda:98", None))]
    default, named = machine.check_devices("a", lines, "cuda:99")
    assert default.level == named.level == "fail", "a device that lines share is reported once"
    assert default.text.startswith("a: --device 'cuda:99'") and default.advice == "correct --device there"
    assert named.text.startswith("a: device= 'cuda:98'") and named.advice == "correct device= in the hosts file"


def test_another_version_of_the_protocol_is_reported_once(tmp_path: Path) -> None:
    """Another program holds a port here, and listens on a host there."""
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(socket.create_server((address(), 0)))
        port = here.getsockname()[1]
        there = stack.enter_context(socket.create_server((address(2), port)))
        for server in (here, there):
            threading.Thread(target=speak_another_version, args=(server,), daemon=True).start()
        file = tmp_path / "hosts.txt"
        file.write_text(f"{address()}:{port}\n{address(2)}:{port}\n")
        found = examine(RunConfig(exchange=ExchangeSettings(advertise=address())), file, None, 0.0, print)
    seen = f"uses version 3 of the protocol, this side version {VERSION}: install the same gossipx on both"
    told = [shown(found, about) for about in ("reach", "ports")]
    assert told == [
        [("fail", f"{address()} → {address(2)}:{port}: the other side {seen}")],
        [("fail", f"port {port} of {address()} is not free: the other side {seen}")],
    ]
    assert codes(found) == {1}


def speak_another_version(server: socket.socket) -> None:
    with contextlib.suppress(OSError), contextlib.ExitStack() as open_ones:
        while True:
            open_ones.enter_context(server.accept()[0]).sendall(b"GSPX\x00\x03")


def test_the_errors_of_a_run_are_raised(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("192.0.2.1\n")
    for advertise, cause in ((None, "no line is this machine"), ("192.0.2.1", r"--bind 0\.0\.0\.0")):
        settings = RunConfig(exchange=ExchangeSettings(advertise=advertise))
        with pytest.raises(UsageError, match=cause):
            examine(settings, tmp_path / "hosts.txt", None, 0.0, print)


def test_the_hosts_file_is_named_by_option_or_in_the_config_file(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / f"{name}.txt").write_text("192.0.2.1\n")
    (tmp_path / "run.toml").write_text(f"[run]\npeers = '{tmp_path}/one.txt'\n")
    by_file = ["--config", str(tmp_path / "run.toml")]
    for options, cause in (
        (by_file, f"{tmp_path}/one.txt: no line is this machine"),
        ([*by_file, "--peers", f"{tmp_path}/other.txt"], f"{tmp_path}/other.txt: no line is this machine"),
        ([], "no peers given: give --peers hosts.txt"),
    ):
        ended = CliRunner().invoke(main, ["doctor", *options])
        assert ended.exit_code == 2 and ended.stderr.startswith(cause), ended.output


def test_the_command_prints_one_verdict_per_line_and_json_for_programs(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    file = tmp_path / "hosts.txt"
    file.write_text(f"{address()}:{port}\n{address(2)}:{port}\n")
    printed = CliRunner().invoke(main, ["doctor", "--peers", str(file), "--wait", "5"])
    assert printed.exit_code == 0, printed.output
    for about in ("names", "ports", "reach", "versions", "clock", "bandwidth", "devices"):
        assert sum(line.startswith(f"ok    {about} ") for line in printed.output.splitlines()) == 1, printed.output
    plain = json.loads(CliRunner().invoke(main, ["doctor", "--peers", str(file), "--json"]).stdout)
    assert plain["exit_code"] == 0 and {one["level"] for one in plain["verdicts"]} == {"ok", "note"}
    assert [host["name"] for host in plain["findings"]["hosts"]] == [address(), address(2)]
    assert all(way["rate"] > 0 and way["latency"] > 0 for way in plain["findings"]["ways"].values())


@pytest.mark.cuda
def test_shared_or_missing_cuda_devices_are_reported() -> None:
    import torch

    beyond = torch.cuda.device_count()
    named = ("cuda:0", "cuda:0", f"cuda:{beyond}", "cpu")
    lines = [PeerLine(rank, "a", 29400 + rank, device, f"a-{rank}", 1) for rank, device in enumerate(named)]
    found = machine.check_devices("a", lines, "cpu")
    assert [verdict.level for verdict in found] == ["warn", "fail", "ok"]
    assert "shared by 2 lines" in found[0].text


# --- Requests of ``gossipx doctor`` to a peer of a run, which reveals its facts and nothing else -------


SECRET = FixedSecrets((Secret(b"0123456789abcdef"),))


def asked(first: CheckupRequest, secret: FixedSecrets | None = None, proves: bool = True) -> tuple[Any, Any]:
    """Return the reply of a run's peer to the first request on a connection, and the error that the peer raised."""
    me, other = (Hello(rank, name, 2, "digest", "model") for rank, name in enumerate("ab"))
    links = Links("a", 2, 10.0)
    ended: list[BaseException | None] = []
    listener = tcp.listen(Address("127.0.0.1", 0))

    def serve() -> None:
        link = links.add(listener.accept())
        try:
            if secret is not None:
                handshake.challenge(link, secret, me, time_limit())
            handshake.admit(link, me, "ab", ["127.0.0.1"] * 2, Welcome(0, "a", "model"), {}, time_limit())
            ended.append(None)
        except Exception as error:
            ended.append(error)
        finally:
            links.drop(link)

    serving = threading.Thread(target=serve)
    serving.start()
    link = links.add(tcp.connect(listener.address, time_limit()))
    answer: Any
    try:
        if secret is not None and proves:
            handshake.prove(link, secret, other, "a", time_limit())
        answer = link.request(first, 0, time_limit()).message
        link.request(other, 0, time_limit())  # afterwards it may still join
    except Exception as error:
        answer = error
    finally:
        links.drop(link)
    serving.join()
    listener.close()
    return answer, ended[0]


def time_limit() -> float:
    return time.monotonic() + 10


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_peer_of_a_run_reveals_its_facts_and_nothing_else(secret: FixedSecrets | None) -> None:
    answer, ended = asked(CheckupRequest("b", "facts"), secret)
    assert ended is None, "the connection is still good for a peer's Hello"
    assert answer.report["role"] == "run" and answer.report["model"] == "model" and answer.report["protocol"] == VERSION
    answer, ended = asked(CheckupRequest("b", "load", back=2**24), secret)
    assert isinstance(answer, Exception) and isinstance(ended, ProtocolError)


def test_a_stranger_learns_nothing() -> None:
    answer, ended = asked(CheckupRequest("b", "facts"), SECRET, proves=False)
    assert isinstance(answer, NotAuthorisedError) and "this run has a secret" in str(answer)
    assert isinstance(ended, NotAuthorisedError)
