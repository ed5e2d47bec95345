"""``gossipx doctor``: findings in, verdicts out; and what goes over the wire between doctors."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gossipx.cli import main
from gossipx.errors import NotAuthorisedError, ProtocolError, UsageError
from gossipx.launch.doctor import examine, findings, machine
from gossipx.launch.doctor.findings import Device, Facts, Host, Name, Port, Reached, Row, Way, hosts_of, merge, turns
from gossipx.launch.doctor.rules import Case, exit_code, verdicts
from gossipx.launch.hosts import PeerLine, read_hosts
from gossipx.settings import ExchangeSettings, RunConfig
from gossipx.transports import Address, handshake, tcp
from gossipx.transports.links import Links
from gossipx.wire import CheckupRequest, Hello, Welcome
from gossipx.wire.auth import Secret

FACTS = Facts("doctor", "1.0", "2.13.0+cpu", "3.11.7", 4, "", "")
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
NAMES = tuple(Name(number, (address,)) for number, address in enumerate(ADDRESSES))


def hosts(count: int = 2, slots: int = 1) -> list[Host]:
    """Hosts a, b, c of so many lines each, from port 29400 on."""
    lines = [
        PeerLine(number * slots + slot, "abc"[number], 29400 + slot, None, f"{'abc'[number]}-{slot}", number + 1)
        for number in range(count)
        for slot in range(slots)
    ]
    return hosts_of(lines)


def well(count: int = 2, slots: int = 1) -> Case:
    """All is well."""
    all_hosts = hosts(count, slots)
    rows = {}
    for host in all_hosts:
        others = [one for one in all_hosts if one is not host or slots > 1]
        rows[host.number] = Row(
            host.number,
            1.0,
            1,
            replace(FACTS, machine=f"machine {host.number}"),
            done=True,
            names=NAMES[:count],
            ports=tuple(Port(peer.rank, "open") for peer in host.peers),
            devices=tuple(Device(peer.rank, "cpu", True, "8 cores") for peer in host.peers),
            reached=tuple(Reached(peer.rank, "ok", "", FACTS) for one in others for peer in one.peers),
            ways=tuple(Way(one.number, 1e-3, 0.0, 5e-4, 1e8, 1e8) for one in all_hosts[host.number + 1 :]),
        )
    return Case(all_hosts, rows)


def but(case: Case, host: int, **changed: Any) -> Case:
    """The same case, where one host has found something else."""
    return replace(case, rows={**case.rows, host: replace(case.rows[host], **changed)})


def failed(case: Case, host: int, rank: int, outcome: str, text: str = "") -> Case:
    reached = tuple(Reached(rank, outcome, text) if one.rank == rank else one for one in case.rows[host].reached)
    return but(case, host, reached=reached)


def way(case: Case, host: int, to: int, **changed: Any) -> Case:
    ways = tuple(replace(one, **changed) if one.to == to else one for one in case.rows[host].ways)
    return but(case, host, ways=ways)


def without(case: Case, host: int) -> Case:
    return replace(case, rows={number: row for number, row in case.rows.items() if number != host})


def told(case: Case, about: str) -> list[tuple[str, str]]:
    return [(one.level, f"{one.text}: {one.advice}") for one in verdicts(case) if one.about == about]


def the_one(case: Case, level: str, about: str, *words: str) -> None:
    """One verdict about that is told, of that level, with these words in it."""
    ((found, text),) = told(case, about)
    assert found == level and all(word in text for word in words), text


# --- verdicts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "slots"), [(1, 2), (2, 1), (3, 4)])
def test_where_all_is_well_each_rule_says_so_in_a_line(count: int, slots: int) -> None:
    found = verdicts(well(count, slots))
    assert {one.level for one in found} <= {"ok", "note"} and exit_code(found) == 0
    abouts = [one.about for one in found]
    assert len(set(abouts)) == len(abouts) and {"names", "ports", "reach", "versions", "model", "devices"} <= set(
        abouts
    )
    assert all(one.text.isprintable() and one.advice.isprintable() for one in found)


def test_a_name_that_does_not_resolve() -> None:
    case = but(well(), 0, names=(NAMES[0], Name(1, (), "Name or service not known")))
    the_one(failed(case, 0, 1, "name"), "fail", "names", "b does not resolve on a (Name or service not known)")
    assert told(failed(case, 0, 1, "name"), "reach") == [], "once is enough"


def test_a_name_that_is_loopback_on_its_own_machine() -> None:
    case = but(well(), 1, names=(NAMES[0], Name(1, ("127.0.1.1",))))
    the_one(case, "fail", "names", "b stands for 127.0.1.1 on b", "/etc/hosts")
    alone = well(1, 2)
    the_one(but(alone, 0, names=(Name(0, ("127.0.0.1",)),)), "ok", "names")


def test_a_name_that_means_different_machines() -> None:
    case = but(well(), 1, names=(NAMES[0], Name(1, ("192.168.0.2",))))
    the_one(case, "warn", "names", "b is 10.0.0.2 on a and 192.168.0.2 on b")


def test_two_names_of_one_address() -> None:
    same = (NAMES[0], Name(1, ("10.0.0.1",)))
    the_one(but(but(well(), 0, names=same), 1, names=same), "warn", "names", "a and b are both 10.0.0.1", "slots=N")


@pytest.mark.parametrize(
    ("port", "level", "words"),
    [
        (Port(1, "taken", "nginx (pid 7)"), "fail", ("port 29400 of b is taken by nginx (pid 7)", "another port")),
        (Port(1, "taken"), "fail", ("taken by another program: if it is a run", "--tls-cert", "; else stop that")),
        (Port(1, "doctor", "python (pid 7)"), "fail", ("another gossipx doctor python (pid 7)",)),
        (Port(1, "refused", "cannot listen at b:80: not allowed; choose a port from 1024 on"), "fail", ("b: ", "1024")),
    ],
)
def test_a_port_that_cannot_be_had_is_told_once(port: Port, level: str, words: tuple[str, ...]) -> None:
    case = failed(but(well(), 1, ports=(port,)), 0, 1, "foreign")
    the_one(case, level, "ports", *words)
    assert told(case, "reach") == []


def test_a_port_that_a_run_holds_is_no_failure() -> None:
    case = but(well(), 1, ports=(Port(1, "run"),))
    assert ("note", "port 29400 of b: a run goes on there: it was asked what it is, and not measured with") in told(
        case, "ports"
    )
    assert exit_code(verdicts(case)) == 0


@pytest.mark.parametrize(
    ("state", "cause", "code", "words"),
    [
        ("authorised", "this run has a secret", 5, ("a gossipx run with another secret", "that run's --secret-file")),
        ("version", "it speaks version 3", 1, ("a gossipx run of another version", "by the gossipx that has started")),
        ("peers", "this is x, not b-0", 1, ("a gossipx run of another hosts file", "another port")),
    ],
)
def test_a_run_that_holds_ports_and_cannot_be_asked_is_told_once(
    state: str, cause: str, code: int, words: tuple[str, ...]
) -> None:
    """And nobody is told to stop it."""
    case = but(well(2, 2), 1, ports=tuple(Port(rank, state, f"python (pid {rank})", cause) for rank in (2, 3)))
    for source, rank in ((0, 2), (0, 3), (1, 2), (1, 3)):
        case = failed(case, source, rank, state, cause)
    the_one(case, "fail", "ports", "ports 29400-29401 of b", cause, "python (pid 2), python (pid 3)", *words)
    ((_, text),) = told(case, "ports")
    assert "stop" not in text and told(case, "reach") == []
    assert exit_code(verdicts(case)) == code


def test_a_program_on_a_port_with_another_certificate_need_not_be_a_run() -> None:
    case = replace(but(well(), 1, ports=(Port(1, "authorised", "nginx (pid 7)", "not of a CA"),)), tls=True)
    the_one(
        case, "fail", "ports", "a program with another certificate", "nginx (pid 7)", "if it is a run", "--tls-cert"
    )


def test_who_is_not_authorised_is_told_though_the_port_seemed_to_be_another_programs() -> None:
    case = failed(but(well(), 1, ports=(Port(1, "taken"),)), 0, 1, "authorised", "the secrets differ")
    the_one(case, "fail", "reach", "not authorised: the secrets differ")
    assert exit_code(verdicts(case)) == 5


@pytest.mark.parametrize(
    ("outcome", "heard", "words"),
    [
        ("refused", False, ("a → b:29400", "start the same command there")),
        ("refused", True, ("--bind 0.0.0.0", "while b → a works")),
        ("timeout", False, ("start that machine", "let TCP port 29400 in")),
        ("timeout", True, ("let TCP port 29400 in", "--advertise", "while b → a works")),
        ("no route", False, ("ip route get",)),
        ("silent", False, ("something listens and does not answer", "ss -ltnp")),
        ("closed", True, ("hangs up", "--secret-file")),
        ("foreign", False, ("no gossipx listens there",)),
        ("version", False, ("install the same gossipx",)),
        ("peers", False, ("the hosts files differ", "the same hosts file")),
        ("other", True, ("another peer", "forwarded")),
        ("local", True, ("ulimit -n",)),
    ],
)
def test_a_way_that_does_not_work(outcome: str, heard: bool, words: tuple[str, ...]) -> None:
    case = failed(well(), 0, 1, outcome, "what was seen")
    case = case if heard else without(case, 1)
    the_one(case, "fail", "reach", "what was seen", *words)
    assert exit_code(verdicts(case)) == 1


def test_who_is_not_authorised_ends_it_with_5_even_if_more_is_wrong() -> None:
    case = failed(well(3), 0, 1, "authorised", "the secrets differ")
    assert told(case, "reach")[0][1].count("the secrets differ") == 1
    assert exit_code(verdicts(failed(case, 0, 2, "timeout"))) == 5


def test_lines_of_one_host_that_fail_alike_are_one_verdict() -> None:
    case = well(3, 4)
    for source in (0, 1):
        for rank in (8, 9, 11):
            case = failed(case, source, rank, "refused", "10.0.0.3: Connection refused")
    the_one(case, "fail", "reach", "a, b → c:29400-29401,29403")


def test_one_dead_address_of_several_is_a_warning() -> None:
    the_one(
        failed(well(), 0, 1, "ok", "fd00::2: No route to host"), "warn", "reach", "fd00::2", "at one of its addresses"
    )


def test_a_doctor_that_answers_and_whose_findings_do_not_come() -> None:
    for case in (without(well(), 1), but(well(), 1, done=False)):
        the_one(case, "fail", "findings", "the doctor on b answers, and its findings did not come", "MTU")
    run = replace(FACTS, role="run")
    asked = but(without(well(), 1), 0, reached=(Reached(1, "ok", "", run),))
    assert told(asked, "findings") == [], "a run has none"


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({"gossipx": "1.1"}, "warn", ("gossipx differs: 1.0 on a; 1.1 on b",)),
        ({"torch": "2.9.0+cu128"}, "warn", ("torch differs: 2.13.0 on a; 2.9.0 on b",)),
        ({"torch": "2.13.0+cu128"}, "ok", ("gossipx 1.0 (protocol 4)",)),
        ({"python": "3.10.1"}, "ok", ("gossipx 1.0 (protocol 4)",)),
    ],
)
def test_versions(changed: dict[str, Any], level: str, words: tuple[str, ...]) -> None:
    the_one(but(well(), 1, facts=replace(FACTS, **changed)), level, "versions", *words)


def test_hosts_that_are_one_machine() -> None:
    case = but(well(), 1, facts=well().rows[0].facts)
    the_one(case, "note", "machines", "a, b are one machine")


def test_a_clock_that_is_off_is_told_by_its_host_whoever_measured_it() -> None:
    case = way(way(well(3), 0, 1, offset=-300.0), 1, 2, offset=300.0)
    the_one(case, "warn", "clock", "the clock of b is 300.0 s behind the others", "curves")
    the_one(replace(case, tls=True), "warn", "clock", "certificates")
    the_one(way(well(), 0, 1, offset=2.0, error=1.5), "ok", "clock")
    the_one(way(well(), 0, 1, offset=2.0), "warn", "clock", "the clock of b is 2.0 s ahead of a")


def test_a_way_that_is_far_longer_than_the_others() -> None:
    the_one(way(well(3), 0, 2, latency=0.08), "warn", "latency", "a and c are 80.0 ms apart", "1.0 ms are usual")
    the_one(way(well(3), 0, 2, latency=0.004), "ok", "latency", "1 ms to 4 ms".replace(" ms to", " to"))


def test_rates_that_are_odd() -> None:
    the_one(well(), "ok", "bandwidth", "800 Mbit/s")
    the_one(way(well(3), 0, 1, sent=1e7), "warn", "bandwidth", "a → b moves 80 Mbit/s", "800 Mbit/s are usual")
    the_one(way(well(), 0, 1, sent=1e6, received=4e6), "warn", "bandwidth", "a → b moves 8 Mbit/s", "other way 32")
    one_machine = but(way(well(), 0, 1, sent=1e6, received=4e6), 1, facts=well().rows[0].facts)
    the_one(one_machine, "ok", "bandwidth")


def test_small_messages_that_pass_where_loads_do_not() -> None:
    case = way(well(), 0, 1, sent=None, received=None, stalled=65_536)
    the_one(case, "fail", "bandwidth", "64 KiB do not get through between a and b", "MTU")


def test_what_was_not_measured() -> None:
    nothing = {"latency": None, "offset": None, "error": None, "sent": None, "received": None}
    the_one(way(well(), 0, 1, **nothing, why="it was busy with others"), "warn", "bandwidth", "it was busy with others")
    case = way(well(), 0, 1, sent=None, received=None, why="a run is at work there")
    the_one(case, "note", "bandwidth", "a run is at work there")


def test_models() -> None:
    the_one(well(), "note", "model", "--model NAME")
    models = [replace(FACTS, model=digest * 64) for digest in "12"]
    same = but(but(well(), 0, facts=models[0], model="lenet"), 1, facts=models[0])
    the_one(same, "ok", "model", "lenet, fingerprint 111111111111 on a, b")
    case = but(same, 0, manifest="weight float32 2\nbias float32 1")
    other = but(case, 1, facts=models[1], manifest="weight float32 2\nbias float32 2")
    the_one(other, "fail", "model", "tensor 1 is 'bias float32 1' on a and 'bias float32 2' on b")
    run = but(case, 1, reached=(Reached(0, "ok", "", replace(models[1], role="run")),))
    the_one(run, "fail", "model", "111111111111 on a, b; 222222222222 on a (a run)")
    the_one(but(same, 1, fault="train.py ended without gossipx.join"), "fail", "model", "b: train.py ended")


def test_devices() -> None:
    missing = Device(1, "cuda:1", False, "device= 'cuda:1': 1 devices of type cuda are here; cpu always is")
    the_one(but(well(), 1, devices=(missing,)), "fail", "devices", "b: device= 'cuda:1'")
    ((_, text),) = told(but(well(), 1, devices=(missing,)), "devices")
    assert text.endswith("correct --device there"), "the line names none"
    lines = [replace(host, peers=tuple(replace(peer, device="cuda:1") for peer in host.peers)) for host in well().hosts]
    named = replace(but(well(), 1, devices=(missing,)), hosts=lines)
    the_one(named, "fail", "devices", "correct device= in the hosts file")
    shared = Device(1, "cuda:0", True, "H200, 139 GiB, shared by 2 lines")
    assert "warn" in [level for level, _ in told(but(well(), 1, devices=(shared,)), "devices")]
    assert ("warn", "b has 2 CUDA devices that no line uses (H200, 139 GiB): add device=cuda:0 to its line") in told(
        but(well(), 1, accelerators=("H200, 139 GiB",) * 2), "devices"
    )


def test_what_lines_of_one_host_share_of_a_device_is_told_once() -> None:
    case = well(2, 2)
    missing = [Device(rank, "cuda:0", False, "--device 'cuda:0': 0 devices are here") for rank in (2, 3)]
    the_one(but(case, 1, devices=tuple(missing)), "fail", "devices", "b: --device 'cuda:0'")
    shared = tuple(Device(rank, "cuda:0", True, "H200, shared by 2 lines") for rank in (2, 3))
    assert [level for level, _ in told(but(case, 1, devices=shared), "devices")] == ["ok", "warn"]


# --- findings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 10))
def test_in_a_round_of_turns_nobody_meets_two(count: int) -> None:
    orders = [turns(number, count) for number in range(count)]
    for number, order in enumerate(orders):
        assert sorted(order) == [other for other in range(count) if other != number]
    if count % 2 == 0:  # else somebody rests in each round, and orders are one shorter than there are rounds
        assert all(orders[other][round_] == n for n, order in enumerate(orders) for round_, other in enumerate(order))


def test_rows_come_back_as_they_were() -> None:
    rows = list(way(failed(well(3), 0, 1, "timeout", "ä"), 1, 2, sent=None).rows.values())
    assert findings.load(findings.dump(rows), 3) == rows


def damaged(change: Any) -> bytes:
    plain = json.loads(findings.dump(well().rows.values()))
    change(plain)
    return json.dumps(plain).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"{}",
        b"[" * 100_000,
        b"[NaN]",
        damaged(lambda rows: rows[0].pop("began")),
        damaged(lambda rows: rows[0].update(began="now")),
        damaged(lambda rows: rows[0].update(began=float("inf"))),
        damaged(lambda rows: rows[0].update(extra=1)),
        damaged(lambda rows: rows[0].update(host=2)),
        damaged(lambda rows: rows[0].update(done=1)),
        damaged(lambda rows: rows[0].update(driver="x" * 2000)),
        damaged(lambda rows: rows[0].update(driver="\x1b[2J")),
        damaged(lambda rows: rows[0]["names"][0].update(addresses=["nonsense"])),
        damaged(lambda rows: rows[0]["names"][0].update(host=2)),
        damaged(lambda rows: rows[0]["ways"][0].update(to=-1)),
        damaged(lambda rows: rows[0].update(reached=[[]])),
        damaged(lambda rows: rows.extend(rows * 2)),
    ],
)
def test_rows_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="findings that are none"):
        findings.load(data, 2)


@given(st.binary(max_size=200))
def test_no_bytes_at_all_break_the_reader(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert findings.load(data, 2) == []


def test_the_newest_row_of_a_host_holds_and_a_doctor_that_began_again_counts_anew() -> None:
    row = well().rows[0]
    newer, restarted = replace(row, version=2), replace(row, began=2.0, version=0)
    assert merge({0: newer}, [row]) == {0: newer}
    assert merge({0: newer}, [restarted]) == {0: restarted}


# --- this machine -----------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="who listens on a port is read from Linux's /proc")
def test_who_listens_on_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"(pid {os.getpid()})" in machine.listener(port)
    assert machine.listener(port) == ""


def test_names_are_looked_up_and_those_that_fail_say_why() -> None:
    found = machine.look_up([Host(0, "127.0.0.1", ()), Host(1, "two..dots", ())])
    assert [name.addresses for name in found] == [("127.0.0.1",), ()] and found[1].error
    assert machine.is_here("127.0.0.1") and not machine.is_here("192.0.2.1")


def test_a_device_that_is_not_here_is_told_by_where_it_was_named() -> None:
    lines = tuple(
        PeerLine(rank, "a", 29400 + rank, device, f"a-{rank}", 1) for rank, device in enumerate((None, "cuda:98"))
    )
    found, _, _ = machine.devices(Host(0, "a", lines), "cuda:99")
    assert not any(device.there for device in found)
    assert found[0].text.startswith("--device 'cuda:99'") and found[1].text.startswith("device= 'cuda:98'")


def test_another_version_of_the_protocol_is_told_once(tmp_path: Path) -> None:
    """By the port that it holds here, and by the way to where it listens."""
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = here.getsockname()[1]
        there = stack.enter_context(socket.create_server(("127.0.0.2", port)))
        for server in (here, there):
            threading.Thread(target=speak_another_version, args=(server,), daemon=True).start()
        file = tmp_path / "hosts.txt"
        file.write_text(f"127.0.0.1:{port}\n127.0.0.2:{port}\n")
        report = examine(RunConfig(exchange=ExchangeSettings(advertise="127.0.0.1")), file, None, 0.0, print)
    seen = "the other side speaks version 3 of the protocol, this side version 4"
    texts = {verdict.about: f"{verdict.text}: {verdict.advice}" for verdict in report.verdicts}
    assert texts["reach"] == f"127.0.0.1 → 127.0.0.2:{port}: {seen}: install the same gossipx on both"
    assert texts["ports"].startswith(
        f"port {port} of 127.0.0.1: a gossipx run of another version listens there ({seen}"
    )
    assert report.exit_code == 1


def speak_another_version(server: socket.socket) -> None:
    with contextlib.suppress(OSError), contextlib.ExitStack() as open_ones:
        while True:
            accepted = open_ones.enter_context(server.accept()[0])
            accepted.sendall(b"GSPX\x00\x03")


@pytest.mark.parametrize(
    ("text", "advertise", "cause"),
    [
        ("192.0.2.1\n", None, "no line is this machine"),
        ("192.0.2.1\n", "192.0.2.1", "--bind 0.0.0.0"),
        ("192.0.2.1\n", "b", "no line has the host 'b'"),
    ],
)
def test_what_a_run_would_refuse_is_refused(tmp_path: Path, text: str, advertise: str | None, cause: str) -> None:
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
        (["doctor"], "who the peers are is not given: --peers hosts.txt"),
    ):
        ended = CliRunner().invoke(main, command)
        assert ended.exit_code == 2 and ended.stderr.startswith(cause), ended.output


def test_the_command_prints_a_verdict_a_line_and_json_for_programs(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = tmp_path / "hosts.txt"
    file.write_text(f"127.0.0.1:{port}\n127.0.0.2:{port}\n")
    printed = CliRunner().invoke(main, ["doctor", "--peers", str(file), "--wait", "5"])
    assert printed.exit_code == 0, printed.output
    for about in ("names", "ports", "reach", "versions", "clock", "latency", "bandwidth", "devices"):
        assert sum(line.startswith(f"ok    {about} ") for line in printed.output.splitlines()) == 1, printed.output
    plain = json.loads(CliRunner().invoke(main, ["doctor", "--peers", str(file), "--json"]).stdout)
    assert plain["exit_code"] == 0 and len(plain["findings"]) == len(read_hosts(file)) == 2


# --- a run that is asked ----------------------------------------------------------------------------


def asked(first: CheckupRequest, secret: Secret | None = None) -> tuple[Any, BaseException | None]:
    """What a peer of a run answers to the first question on a connection; and how that ends for it."""
    me, other = (Hello(rank, name, 2, "digest", "model") for rank, name in enumerate("ab"))
    links = Links("a", 2, 10.0)
    ended: list[BaseException | None] = []
    listener = tcp.listen(Address("127.0.0.1", 0))

    def serve() -> None:
        link = links.add(listener.accept())
        try:
            if secret is not None:
                handshake.challenge(link, secret, me, time_limit())
            handshake.admit(link, me, "ab", ["127.0.0.1"] * 2, Welcome(0, "a", "model"), time_limit())
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
        if secret is not None:
            handshake.prove(link, secret, other, "a", time_limit())
        answer = link.ask(first, 0, time_limit()).message
        link.ask(other, 0, time_limit())  # and then it may join, as ever
    except Exception as error:
        answer = error
    finally:
        links.drop(link)
    serving.join()
    listener.close()
    return answer, ended[0]


def time_limit() -> float:
    return time.monotonic() + 10


@pytest.mark.parametrize("secret", [None, Secret(b"0123456789abcdef")])
def test_a_peer_of_a_run_tells_its_facts_and_nothing_else(secret: Secret | None) -> None:
    answer, ended = asked(CheckupRequest("b", "facts"), secret)
    assert ended is None, "the connection is still good for a peer's Hello"
    assert answer.report["role"] == "run" and answer.report["model"] == "model" and answer.report["protocol"] == 4
    for part in ("peers", "turn", "load", "findings"):
        answer, ended = asked(CheckupRequest("b", part, back=2**24), secret)
        assert isinstance(answer, Exception) and isinstance(ended, ProtocolError), part


def test_a_stranger_is_told_nothing() -> None:
    links = Links("a", 2, 10.0)
    listener = tcp.listen(Address("127.0.0.1", 0))
    refused: list[BaseException] = []

    def serve() -> None:
        link = links.add(listener.accept())
        try:
            handshake.challenge(link, Secret(b"0123456789abcdef"), Hello(0, "a", 2, "", ""), time_limit())
        except NotAuthorisedError as error:
            refused.append(error)
        finally:
            links.drop(link)

    serving = threading.Thread(target=serve)
    serving.start()
    link = links.add(tcp.connect(listener.address, time_limit()))
    with pytest.raises(NotAuthorisedError, match="this run has a secret"):
        link.ask(CheckupRequest("b", "facts"), 0, time_limit())
    links.drop(link)
    serving.join()
    listener.close()
    assert len(refused) == 1


@pytest.mark.cuda
def test_cuda_devices_are_described_and_a_shared_one_and_one_too_many_are_told() -> None:
    import torch

    beyond = torch.cuda.device_count()
    named = ("cuda:0", "cuda:0", f"cuda:{beyond}", "cpu")
    lines = tuple(PeerLine(rank, "a", 29400 + rank, device, f"a-{rank}", 1) for rank, device in enumerate(named))
    found, accelerators, driver = machine.devices(Host(0, "a", lines), "cpu")
    assert [device.there for device in found] == [True, True, False, True]
    assert torch.cuda.get_device_name(0) in found[0].text and "shared by 2 lines" in found[0].text
    assert len(accelerators) == beyond and "GiB" in accelerators[0]
    assert driver.count(".") >= 1
