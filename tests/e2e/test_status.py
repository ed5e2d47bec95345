"""``gossipx status`` and ``gossipx runs``, and figures for Prometheus: runs in real processes, seen from outside."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports
from resuming import BRIEF

from runs import LONG, Folder, Process, children, kill_processes, one_line

ENDLESS = ("--policy", "tau:5", "--iterations", "100000", *BRIEF)


def training(here: Folder, *options: str | Path) -> Process:
    """Return a run all of whose peers train."""
    run = here.start_run(*options)
    run.line(".*".join(rf"{name} train \d+" for name in here.names))
    return run


def status(here: Folder, *options: str | Path, code: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(here.gossipx("status", "--json", *options).end(code=code).output)
    return found


@pytest.mark.fault(1)
def test_each_peer_shows_its_progress_and_the_peers_that_it_has_lost(three: Folder) -> None:
    run = training(three, *ENDLESS)
    found = status(three, "x", "--logdir", three.path)
    assert [one["name"] for one in found] == three.names
    for rank, one in enumerate(found):
        assert one["stage"] == "train" and one["iteration"] > 0 and one["retrievals"] > 0
        assert one["last_exchange"] in set(three.names) - {three.names[rank]}
        assert one["suspects"] == one["lost"] == one["left"] == one["waits_for"] == []
    kill_processes(children(run.pid)[2])
    by = time.monotonic() + LONG
    while True:
        first, second, third = status(three, "x", "--logdir", three.path, code=1)
        if first["lost"] == second["lost"] == [three.names[2]]:
            break
        assert time.monotonic() < by, (first, second)
    assert "not running" in third["why"] and "stage" not in third
    shown = three.gossipx("status", "--peers", three.hosts).end(code=1)
    assert shown.output.count(f"has lost {three.names[2]}") == 2 and "not running" in shown.output, shown.shown
    run.signal(signal.SIGTERM)
    run.end()
    gone = three.gossipx("status", "x", "--logdir", three.path).end(code=1)
    assert gone.output.count("not running") == 3 and "no peer answers" in gone.errors, gone.shown


def test_status_is_authorised_like_any_other_request(two: Folder) -> None:
    secrets = {name: two.path / name for name in ("right", "wrong")}
    for name, file in secrets.items():
        file.write_text(f"{name} secret of more than 16 bytes\n")
        file.chmod(0o600)
    run = training(two, "--secret-file", secrets["right"], *ENDLESS)
    assert status(two, "x", "--logdir", two.path)[1]["stage"] == "train", "config.toml names the secret"
    assert len(status(two, "--peers", two.hosts, "--secret-file", secrets["right"])) == 2
    for options in ((), ("--secret-file", secrets["wrong"])):
        found = status(two, "--peers", two.hosts, *options, code=5)
        assert all("not authorised" in one["why"] and "stage" not in one for one in found), found
    drained = two.gossipx("peer", "drain", "--peers", two.hosts, "--secret-file", secrets["wrong"], two.names[0])
    assert "not authorised" in one_line(drained.end(), 5)
    assert status(two, "x", "--logdir", two.path)[0]["stage"] == "train"
    run.signal(signal.SIGTERM)
    run.end(code=0)


def test_watching_ends_with_the_run(two: Folder) -> None:
    run = training(two, *ENDLESS)
    watching = two.gossipx("status", "x", "--logdir", two.path, "--watch", "--json")
    first, second = (json.loads(watching.line(r"^\[")) for _ in range(2))
    assert second[0]["iteration"] > first[0]["iteration"]
    run.signal(signal.SIGTERM)
    run.end()
    watching.end(code=0)


def test_a_wrong_question_is_answered_by_one_line(two: Folder) -> None:
    for options, told in (
        ((), "give the RUN, or --peers hosts.txt"),
        (("x", "--peers", two.hosts), "and not both"),
        (("x", "--logdir", two.path), "no such run"),
    ):
        assert told in one_line(two.gossipx("status", *options).end(), 2)


def test_each_peer_serves_its_figures_to_prometheus(two: Folder) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    free = free_ports(64)
    port = next(port for port in free if port + 1 in free)
    run = training(two, "--metrics-port", str(port), *ENDLESS)
    for rank, name in enumerate(two.names):
        with urllib.request.urlopen(f"http://127.0.0.1:{port + rank}/metrics", timeout=LONG) as answer:
            families = list(parser.text_string_to_metric_families(answer.read().decode()))
        samples = {sample.name: sample for family in families for sample in family.samples}
        assert all(sample.labels["peer"] == name and sample.labels["run"] == "x" for sample in samples.values())
        assert samples["gossipx_iterations_total"].value > 0
        assert samples["gossipx_received_bytes_total"].value > 0
        assert samples["gossipx_stage"].labels["stage"] == "train"
        assert samples["gossipx_peers_lost"].value == 0
    taken = two.refused("--metrics-port", str(port), "--iterations", "10", name="other")
    assert "cannot listen" in taken or "address already in use" in taken.lower(), taken
    run.signal(signal.SIGTERM)
    run.end(code=0)
