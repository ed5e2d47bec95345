"""``gossipx tune`` in real processes: on one machine with a script, and between two hosts with a slow link."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import EmulatedNetwork, lacking

from runs import LONG, TEN_LINES, Folder, one_line

pytestmark = pytest.mark.slow


def test_a_script_is_measured_and_the_suggestion_can_be_run(two: Folder) -> None:
    script = two.script(TEN_LINES + "with peer:\n    train(peer, model, optimizer, int(sys.argv[2]))\n")
    options = ("--peers", two.hosts, "--seconds", "2", "--write", "run.toml", "--json")
    found = json.loads(two.gossipx("tune", *options, script, two.path, "100000000").end(code=0).output)
    pulls, coded, pairs = found["measured"]
    assert not any(one["why"] for one in found["measured"]), found
    assert pulls["model_bytes"] == pytest.approx(4 * (4 * 16 + 16 + 16 + 1), rel=2), "with the frame of a message"
    assert (pulls["period"], coded["period"], pairs["period"]) == (10, 10, 5)
    assert all(
        one["step_seconds"] > 0 and one["exchange_seconds"] > 0 and one["delta"] > 0 for one in found["measured"]
    )
    assert not found["between_machines"]
    assert not list(two.path.glob("tune*")), "nothing is left"
    two.gossipx("run", "--config", "run.toml", "--logdir", two.path, script, two.path, "40").end(code=0)
    again = two.gossipx("tune", "--peers", two.hosts, "--write", "run.toml", script).end()
    assert "the file exists" in one_line(again, 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise SystemExit('no data here')\n", ("no data here", "the run ended early, with exit code 1")),
        (TEN_LINES + "with peer:\n    train(peer, model, optimizer, 20)\n", ("let the script train longer",)),
    ],
    ids=["fails", "too short"],
)
def test_a_script_that_cannot_be_measured_is_tried_once(two: Folder, text: str, told: tuple[str, ...]) -> None:
    tuned = ("tune", "--peers", two.hosts, "--seconds", "3600", two.script(text), two.path)
    failed = two.gossipx(*tuned).end(code=1)
    assert failed.errors.splitlines()[-1].startswith("nothing could be measured: the run ended early")
    assert all(one in failed.errors for one in told) and failed.errors.count("measuring") == 1, failed.shown


@pytest.mark.usefixtures("forked_hosts")
def test_a_slow_link_gets_fewer_bytes(tmp_path: Path) -> None:
    """LeNet has 0.4 MB, which take 0.33 s at 10 Mbit/s: more than ten of its iterations."""
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    secret = tmp_path / "secret"
    secret.write_text("a secret of more than 16 bytes\n")
    secret.chmod(0o600)
    hosts = tmp_path / "hosts.txt"
    with EmulatedNetwork(2, "10mbit", delay_ms=5) as net:
        hosts.write_text("".join(f"{host.address}\n" for host in net.hosts))
        started = []
        for host in net.hosts:
            tune = (sys.executable, "-m", "gossipx", "tune", "--peers", hosts, "--seconds", "3", "--json")
            place = ("--bind", host.address, "--advertise", host.address, "--secret-file", secret)
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            started.append(host.popen([*tune, *place], cwd=tmp_path, text=True, **pipes))
        ended = [process.communicate(timeout=2 * LONG) for process in started]
    for process, (output, errors) in zip(started, ended, strict=True):
        assert process.returncode == 0, errors
        found = json.loads(output)
        pulls = found["measured"][0]
        assert found["between_machines"] and not pulls["why"], found
        assert 8 * pulls["model_bytes"] / pulls["exchange_seconds"] < 15e6, "the link's rate, and what its bucket adds"
        assert found["chosen"] != {"policy": "tau:10"} and "codec" in found["chosen"], found
