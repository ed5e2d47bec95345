"""``gossipx doctor``: verdicts from findings, the facts of one machine, and the replies of a run to a doctor."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ports import address, free_ports

from gossipx.cli import main
from gossipx.errors import PeerTimeoutError, ProtocolError, UsageError
from gossipx.launch.hosts import PeerLine
from gossipx.settings.sections import ExchangeSettings, RunConfig
from gossipx.tools.doctor import examine, machine
from gossipx.tools.doctor.findings import Findings, Host, Line, Measurement, Name, hosts_of
from gossipx.tools.doctor.probe import ENOUGH, PIECE, Load
from gossipx.tools.doctor.verdicts import REACH, verdicts
from gossipx.transports.handshake import checkup_facts, facts_in
from gossipx.wire import Hello
from gossipx.wire.frames import VERSION

FACTS = {"role": "doctor", "gossipx": "1.0", "torch": "2.13.0+cpu", "python": "3.11.7", "protocol": 4, "model": ""}


def well(count: int = 2, slots: int = 1, **changed: Any) -> Findings:
    """Findings of host a without a fault: ``count`` hosts a, b, c with ``slots`` lines each, from port 29400 up."""
    hosts = hosts_of(
        [
            PeerLine(number * slots + slot, "abc"[number], 29400 + slot, None, f"{'abc'[number]}-{slot}", number + 1)
            for number in range(count)
            for slot in range(slots)
        ]
    )
    probed = [host for host in hosts if host.number or slots > 1]
    found = Findings(hosts, [0], FACTS)
    found.names = [Name(host.number, (f"10.0.0.{host.number + 1}",)) for host in hosts]
    found.ports = [Line(peer.rank, "open") for peer in hosts[0].peers]
    found.reached = {peer.rank: Line(peer.rank, "ok", "", FACTS) for host in probed for peer in host.peers}
    found.ways = {host.number: Measurement(1e-3, 0.0, 1e8) for host in probed}
    found.heard = {host.number for host in hosts[1:]}
    for name, value in changed.items():
        assert hasattr(found, name)
        setattr(found, name, value)
    return found


def hidden(*numbers: int, own: int = 0, count: int = 3) -> Findings:
    """Findings of host ``own`` in a file with ``nat`` on these hosts; nothing is wrong."""
    lines = [PeerLine(n, "abc"[n], 29400, None, "abc"[n], n + 1, behind_nat=n in numbers) for n in range(count)]
    others = {n for n in range(count) if n != own}
    found = well(count, hosts=hosts_of(lines), here=[own])
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


def the_one(found: Findings, level: str, about: str, *words: str) -> None:
    """Assert that there is exactly one verdict on a topic, with this level and these words."""
    ((seen, text),) = shown(found, about)
    assert seen == level and all(word in text for word in words), text


def codes(found: Findings) -> set[int]:
    return {one.exit_code for one in verdicts(found) if one.level == "fail"}


# --- verdicts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "slots"), [(1, 2), (2, 1), (3, 4)])
def test_without_a_fault_each_rule_gives_one_ok_line(count: int, slots: int) -> None:
    said = verdicts(well(count, slots))
    assert {one.level for one in said} <= {"ok", "note"}
    abouts = [one.about for one in said]
    assert abouts == ["names", "ports", "reach", "versions", "clock", "latency", "bandwidth", "model"]
    assert all(one.text.isprintable() and one.advice.isprintable() for one in said)


def test_a_name_that_does_not_resolve_is_reported_once() -> None:
    found = failed(1, "name", names=[Name(0, ("10.0.0.1",)), Name(1, (), "Name or service not known")])
    the_one(found, "fail", "names", "b does not resolve on a (Name or service not known)")
    assert shown(found, "reach") == []


def test_hosts_behind_nat_are_named_and_must_reach_this_one() -> None:
    found = hidden(1, 2)
    assert {one.level for one in verdicts(found)} <= {"ok", "note"}
    assert shown(found, "reach")[0] == ("ok", "b, c → a: behind NAT, and connects to this host: ")
    found.heard = {1}
    found.names = [Name(0, ("10.0.0.1",)), Name(1, (), "unknown"), Name(2, (), "unknown")]
    told = [text for level, text in shown(found, "reach") if level == "fail"]
    assert told == ["c → a: behind NAT, and no probe has arrived: start the same command there, and see its report"]
    the_one(found, "ok", "names", "1 host resolved on a")
    assert codes(found) == {1}


def test_a_host_behind_nat_expects_no_probe() -> None:
    found = hidden(1, 2, own=1)
    assert {one.level for one in verdicts(found)} <= {"ok", "note"}
    text = "b is behind NAT: it connects to a, and through these to c, which is behind NAT too"
    assert ("note", f"{text}: no other host can connect to it") in shown(found, "reach")


def test_a_host_that_connects_and_cannot_be_reached_seems_to_be_behind_nat() -> None:
    ((level, text),) = shown(failed(1, "timeout", "why"), "reach")
    assert level == "fail" and text == (
        "a → b:29400: why (the other way works): it seems to be behind NAT or a firewall: allow TCP port 29400 there"
        " and check its --bind, or write 'nat' on its line on all hosts"
    )
    found = well(heard=set())
    assert shown(found, "reach")[0][1].endswith("if a is behind NAT, write 'nat' on its line on all hosts")


def test_a_name_that_is_loopback_beside_other_machines() -> None:
    the_one(well(names=[Name(0, ("127.0.1.1",)), Name(1, ("10.0.0.2",))]), "fail", "names", "a is 127.0.1.1 on a")
    the_one(well(1, 2, names=[Name(0, ("127.0.0.1", "::1"))]), "ok", "names")


@pytest.mark.parametrize(
    ("port", "code", "words"),
    [
        (Line(0, "foreign", "no frame"), 1, ("port 29400 of a is not free: no gossipx listens there", "another port")),
        (Line(0, "doctor"), 1, ("another gossipx doctor", "stop it")),
        (Line(0, "denied", "cannot listen at a:80: not allowed; choose a port from 1024 on"), 1, ("1024",)),
        (Line(0, "authorised", "this run has a secret"), 5, ("not authorised", "the same --secret-file")),
        (Line(0, "version", "it speaks version 3"), 1, ("it speaks version 3", "the same gossipx")),
        (Line(0, "peers", "names or addresses do"), 1, ("the hosts files differ", "the same hosts file")),
    ],
)
def test_a_port_that_is_not_free(port: Line, code: int, words: tuple[str, ...]) -> None:
    found = well(ports=[port])
    the_one(found, "fail", "ports", *words)
    assert codes(found) == {code}


def test_a_run_of_another_secret_is_not_to_be_stopped() -> None:
    found = well(ports=[Line(0, "authorised", "this run has a secret")])
    assert all("stop" not in text for _, text in shown(found, "ports"))


def test_a_port_that_a_run_holds_is_no_failure() -> None:
    found = well(ports=[Line(0, "run")])
    the_one(found, "note", "ports", "port 29400 of a: a run is at work there")
    assert not codes(found)


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
@pytest.mark.parametrize("heard", [True, False])
def test_a_line_that_is_not_reached(state: str, heard: bool, words: tuple[str, ...]) -> None:
    found = failed(1, state, "what was seen", heard={1} if heard else set())
    if heard and state in ("refused", "timeout", "no route"):
        words = ("behind NAT or a firewall: allow TCP port 29400 there and check its --bind",)
    the_one(found, "fail", "reach", "what was seen", *words)
    assert ("the other way works" in shown(found, "reach")[0][1]) == heard
    assert codes(found) == {5 if state == "authorised" else 1} and state in REACH


def test_lines_of_one_host_that_fail_alike_are_one_verdict() -> None:
    found = failed(8, "refused", "Connection refused", 3, 4)
    for rank in (9, 11):
        found.reached[rank] = Line(rank, "refused", "Connection refused")
    the_one(found, "fail", "reach", "a → c:29400,29401,29403")


def test_a_doctor_that_answers_and_has_not_probed_this_host() -> None:
    the_one(well(heard=set()), "warn", "reach", "b → a: no probe has arrived")
    the_one(well(heard=set(), ports=[Line(0, "run")]), "ok", "reach")


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({"gossipx": "1.1"}, "warn", ("gossipx differs: 1.0 on a; 1.1 on b",)),
        ({"torch": "2.9.0+cu128"}, "warn", ("torch differs: 2.13.0 on a; 2.9.0 on b",)),
        ({"torch": "2.13.0+cu128", "python": "3.10.1"}, "ok", ("gossipx 1.0 (protocol 4)",)),
    ],
)
@pytest.mark.fault(67)
def test_versions(changed: dict[str, Any], level: str, words: tuple[str, ...]) -> None:
    the_one(well(reached={1: Line(1, "ok", "", FACTS | changed)}), level, "versions", *words)


def test_a_clock_that_is_off() -> None:
    behind = {1: Measurement(1e-3, -300.0)}
    the_one(well(ways=behind), "warn", "clock", "the clock of b is 300.0 s behind a's", "curves")
    the_one(well(ways=behind, tls=True), "warn", "clock", "certificates")
    the_one(well(ways={1: Measurement(3.0, 2.0)}), "ok", "clock")
    the_one(well(ways={1: Measurement(1e-3, 2.0)}), "warn", "clock", "2.0 s ahead of a's")


def test_latency() -> None:
    the_one(
        well(ways={1: Measurement(1e-3), 2: Measurement(4e-3)}, count=3), "ok", "latency", "1 ms to 4 ms per round trip"
    )


def test_rates() -> None:
    the_one(well(), "ok", "bandwidth", "800 Mbit/s to a")
    found = well(3, ways={1: Measurement(1e-3, 0.0, 1e7), 2: Measurement(1e-3, 0.0, 1e8)})
    the_one(found, "ok", "bandwidth", "80 Mbit/s to 800 Mbit/s")
    found.hosts = well(3).hosts
    found.ways[0] = Measurement(1e-3, 0.0, 1e8)  # ignored: it is this machine
    the_one(found, "ok", "bandwidth", "80 Mbit/s to 800 Mbit/s")


def test_a_rate_that_is_odd() -> None:
    found = well(3)
    found.hosts = [*found.hosts, Host(3, "d", ())]
    found.ways[3] = Measurement(1e-3, 0.0, 1e7)
    the_one(found, "warn", "bandwidth", "d → a: 80 Mbit/s, the median is 800 Mbit/s")


def test_small_messages_that_pass_where_a_load_does_not() -> None:
    found = well(ways={1: Measurement(1e-3, 0.0, 0.0)})
    the_one(found, "fail", "bandwidth", "b → a: small messages arrive in time, 64 KiB", "MTU")


def test_no_measurement() -> None:
    the_one(well(ways={1: Measurement(why="it has hung up")}), "warn", "bandwidth", "it has hung up", "try again")
    the_one(well(ways={1: Measurement(1e-3, why="it was busy with other hosts")}), "warn", "bandwidth", "it was busy")
    the_one(
        well(ways={1: Measurement(1e-3, why="a run is at work there")}), "note", "bandwidth", "a run is at work there"
    )


def test_models() -> None:
    the_one(well(), "note", "model", "--model NAME")
    one, other = ({**FACTS, "model": digest * 64} for digest in "12")
    same = well(facts=one, model="lenet", reached={1: Line(1, "ok", "", one)})
    the_one(same, "ok", "model", "lenet, fingerprint 111111111111 on a, b")
    differ = well(facts=one, reached={1: Line(1, "ok", "", other)}, differing="tensor 1 is x here and y there (a, b)")
    the_one(differ, "fail", "model", "111111111111 on a; 222222222222 on b: tensor 1 is x here")
    run = well(facts=one, reached={1: Line(1, "ok", "", other | {"role": "run"})})
    the_one(run, "fail", "model", "111111111111 on a; 222222222222 on b (a run)")
    the_one(well(fault="train.py ended without gossipx.join"), "fail", "model", "a: train.py ended")


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


# --- this machine -----------------------------------------------------------------------------------


def test_names_are_looked_up_and_those_that_fail_say_why() -> None:
    found = machine.resolve([Host(0, "127.0.0.1", ()), Host(1, "two..dots", ())])
    assert [name.addresses for name in found] == [("127.0.0.1",), ()] and found[1].error


def test_a_missing_device_is_reported_with_the_option_that_named_it() -> None:
    lines = [PeerLine(rank, "a", 29400 + rank, device, "", 1) for rank, device in enumerate((None, "cuda:98", None))]
    default, named = machine.devices("a", lines, "cuda:99")
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
    the_one(found, "fail", "reach", f"{address()} → {address(2)}:{port}: the other side {seen}")
    the_one(found, "fail", "ports", f"port {port} of {address()} is not free: the other side {seen}")
    assert codes(found) == {1}


def speak_another_version(server: socket.socket) -> None:
    with contextlib.suppress(OSError), contextlib.ExitStack() as open_ones:
        while True:
            open_ones.enter_context(server.accept()[0]).sendall(b"GSPX\x00\x03")


@pytest.mark.parametrize(
    ("text", "advertise", "cause"),
    [
        ("192.0.2.1\n", None, "no line is this machine"),
        ("192.0.2.1\n", "192.0.2.1", "--bind 0.0.0.0"),
        ("192.0.2.1\n", "b", "no line has the host 'b'"),
        (
            "localhost\n127.0.0.1\n",
            None,
            r":2: '127\.0\.0\.1:29400' is the same address as 'localhost:29400' on line 1",
        ),
    ],
)
def test_the_errors_of_a_run_are_raised(tmp_path: Path, text: str, advertise: str | None, cause: str) -> None:
    (tmp_path / "hosts.txt").write_text(text)
    settings = RunConfig(exchange=ExchangeSettings(advertise=advertise))
    with pytest.raises(UsageError, match=cause):
        examine(settings, tmp_path / "hosts.txt", None, 0.0, print)


def test_the_hosts_file_is_named_by_option_or_in_the_config_file(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / f"{name}.txt").write_text("192.0.2.1\n")
    (tmp_path / "run.toml").write_text(f"[run]\npeers = '{tmp_path}/one.txt'\n")
    by_file = ["doctor", "--config", str(tmp_path / "run.toml")]
    for command, cause in (
        (by_file, f"{tmp_path}/one.txt: no line is this machine"),
        ([*by_file, "--peers", f"{tmp_path}/other.txt"], f"{tmp_path}/other.txt: no line is this machine"),
        (["doctor"], "no peers given: give --peers hosts.txt"),
    ):
        ended = CliRunner().invoke(main, command)
        assert ended.exit_code == 2 and ended.stderr.startswith(cause), ended.output


def test_the_command_prints_one_verdict_per_line_and_json_for_programs(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    file = tmp_path / "hosts.txt"
    file.write_text(f"{address()}:{port}\n{address(2)}:{port}\n")
    printed = CliRunner().invoke(main, ["doctor", "--peers", str(file), "--wait", "5"])
    assert printed.exit_code == 0, printed.output
    for about in ("names", "ports", "reach", "versions", "clock", "latency", "bandwidth", "devices"):
        assert sum(line.startswith(f"ok    {about} ") for line in printed.output.splitlines()) == 1, printed.output
    plain = json.loads(CliRunner().invoke(main, ["doctor", "--peers", str(file), "--json"]).stdout)
    assert plain["exit_code"] == 0 and {one["level"] for one in plain["verdicts"]} == {"ok", "note"}
    assert [host["name"] for host in plain["findings"]["hosts"]] == [address(), address(2)]
    assert all(way["rate"] > 0 and way["latency"] > 0 for way in plain["findings"]["ways"].values())


@pytest.mark.cuda
def test_cuda_devices_are_described_and_shared_or_missing_ones_are_reported() -> None:
    import torch

    beyond = torch.cuda.device_count()
    named = ("cuda:0", "cuda:0", f"cuda:{beyond}", "cpu")
    lines = [PeerLine(rank, "a", 29400 + rank, device, f"a-{rank}", 1) for rank, device in enumerate(named)]
    found = machine.devices("a", lines, "cpu")
    assert [verdict.level for verdict in found] == ["warn", "fail", "ok"]
    assert torch.cuda.get_device_name(0) in found[0].text and "shared by 2 lines" in found[0].text
