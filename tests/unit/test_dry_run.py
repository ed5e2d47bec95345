"""``gossipx run --dry-run``: the plan and expected traffic of a run that is not started."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from gossipx.cli import main
from gossipx.errors import UsageError
from gossipx.model.arena import ParameterArena
from gossipx.model.layout import nbytes
from gossipx.settings import files
from gossipx.tasks.models import MODELS, build_model
from gossipx.tools.dry_run import ASSUMED, DryRun, dry_run, link_seconds, parse_size

LENET = 411_648
"""Bytes of its 102,882 values, each tensor from a cache line on."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a working directory with hosts files."""
    (tmp_path / "hosts.txt").write_text("localhost slots=4\n", encoding="utf-8")
    (tmp_path / "two.txt").write_text("10.0.0.1 slots=2 name=a\n10.0.0.2 slots=2 name=b\n", encoding="utf-8")
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def look(
    *script: str, hosts: str = "hosts.txt", link: str | None = None, size: str | None = None, **given: Any
) -> DryRun:
    """Dry-run with the settings ``given``, and assert that nothing was written."""
    before = sorted(Path().rglob("*"))
    found = dry_run(files.resolve(given), Path(hosts), list(script), link, size)
    assert sorted(Path().rglob("*")) == before
    return found


def gossipx(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", "--dry-run", *arguments], prog_name="gossipx")


# --- traffic --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "exchanges", "received", "busiest"),
    [
        ({}, 20, 20, 60),  # in a star all peers pull from rank 0
        ({"mode": "push"}, 20, 20, 60),
        ({"mode": "pushpull"}, 26, 26, 53),  # a peer is in one pair at a time
        ({"policy": "never"}, 0, 0, 0),
        ({"policy": "random:p=0.1"}, 20, 20, 60),
        ({"exchange": "waves"}, 20, 30, 30),  # of 2 · 3/4 models
        ({"hub": "1"}, 20, 30, 60),  # the others send a model and receive the centre
        ({"hub": "1", "hub_only": True}, 20, 30, 60),
    ],
    ids=["pull", "push", "pushpull", "never", "random", "waves", "hub", "hub-only"],
)
def test_traffic_follows_the_mode(
    place: Path, settings: dict[str, Any], exchanges: float, received: float, busiest: float
) -> None:
    star = {} if settings.keys() & {"exchange", "hub"} else {"topology": "star"}
    exact = settings.keys() <= {"hub", "hub_only"} or settings == {"policy": "never"}
    row = look(**{"policy": "tau:10", "iterations": 200, **star, **settings}).traffic[-1]
    assert row.source == "simulated"
    found = (row.exchanges, row.received_bytes / LENET, row.busiest_bytes / LENET)
    assert found == pytest.approx((exchanges, received, busiest), rel=1e-3 if exact else 0.35)


def test_workers_push_to_and_pull_from_the_servers_of_other_peers(place: Path) -> None:
    (plain,) = look(servers="0,1", iterations=200).traffic
    assert (plain.policy, plain.exchanges, plain.source) == ("bsp", 200, "simulated, 20 iterations")
    # Of each shard, three of the four workers are at other peers.
    assert plain.received_bytes * 4 == pytest.approx(200 * 2 * 3 * 4 * 102_882, rel=0.02)
    (coded,) = look(servers="0,1", iterations=200, push_codec="int8").traffic
    assert coded.received_bytes == pytest.approx(plain.received_bytes * (1 + 0.25) / 2, rel=0.02)
    (script,) = look("train.py", size="45MB", servers="0,1", iterations=200).traffic
    assert script.received_bytes * 4 == pytest.approx(200 * 2 * 3 * 45e6, rel=0.02)


def test_a_long_run_is_extrapolated_and_a_period_is_seen(place: Path) -> None:
    short, long = (look("train.py", policy="tau:4000", iterations=n).traffic[-1] for n in (8000, 80_000))
    assert (short.exchanges, short.source) == (2, "simulated")
    assert (long.exchanges, long.source) == (20, "simulated, 8,000 iterations")
    assert long.received_bytes == 10 * short.received_bytes


def test_deltas_are_those_of_a_recorded_run(place: Path) -> None:
    """And a policy is compared with the reference; that of drifts has no estimate."""
    policy = "adaptive:threshold=0.025"
    (reference, own) = look(policy=policy, iterations=500).traffic
    assert (reference.source, own.source) == ("simulated", "simulated, deltas of lenet")
    assert 0 < own.exchanges < reference.exchanges
    assert look("train.py", policy=policy, iterations=500).traffic[1].source == "simulated, deltas of lenet"
    for given, shown in (("tau:period=10", ["tau:period=10"]), ("never", ["tau:10", "never"])):
        assert [row.policy for row in look(policy=given, iterations=20).traffic] == shown
    said = gossipx("--peers", "hosts.txt", "--policy", "drift:0.1", "--iterations", "100").stdout
    assert "tau:10" in said and "no estimate for drift:0.1: it measures the drift of models" in said


def test_link_seconds_count_traffic_between_machines_in_the_busier_direction() -> None:
    models = np.array([[0, 5, 1, 0], [5, 0, 0, 2], [4, 0, 0, 9], [0, 4, 9, 0]], float)
    assert link_seconds(models, [0, 0, 1, 1], 2.0, None) == 4  # the first machine receives 3 and sends 8
    assert link_seconds(models, [0, 1, 2, 3], 1.0, None) == 13  # rank 2 and rank 3 each receive 13
    # Each of its two peers sends 4 of the 8.
    assert link_seconds(models, [0, 0, 1, 1], 2.0, 0.5) == 8


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lenet", "convnet", "resnet20"])
@pytest.mark.parametrize("mixed", [True, False])
def test_bytes_are_those_that_an_arena_has(name: str, mixed: bool) -> None:
    facts = MODELS[name]
    module = build_model(name, classes=facts.classes, channels=facts.channels, pixels=facts.pixels)
    found = nbytes(module, mixed)
    arena = ParameterArena(module, mix_buffers=mixed)
    assert found == (arena.nbytes(), arena.nbytes(whole=True))


def test_a_codec_is_measured_on_normally_distributed_values(place: Path) -> None:
    fixed, ternary, sparse = (look(codec=codec, iterations=20).model for codec in ("int8", "3lc", "topk:ratio=0.01"))
    assert fixed.exchanged_bytes / fixed.encoded_bytes == pytest.approx(4, rel=0.02)
    assert ternary.encoded_bytes * 8 / 102_882 < 1.6, "3LC, section 3.2: at most 1.6 bits per value"
    assert sparse.encoded_bytes < 0.05 * LENET


def test_sizes_have_a_unit() -> None:
    assert [parse_size(text) for text in ("45MB", "1.5 gb", "500kB")] == [45_000_000, 1_500_000_000, 500_000]
    for text in ("45", "MB", "-1MB", "0MB", "1e9GB", "infMB"):
        with pytest.raises(UsageError, match=r"--model-size '.*': give bytes with a unit"):
            parse_size(text)


# --- together -------------------------------------------------------------------------------------


def test_peers_of_this_machine_and_of_others(place: Path) -> None:
    (place / "secret").write_bytes(os.urandom(32).hex().encode())
    (place / "secret").chmod(0o600)
    settings = {"advertise": "10.0.0.1", "bind": "0.0.0.0", "secret_file": "secret", "topology": "ring"}
    found = look(hosts="two.txt", link="100mbit", policy="tau:10", iterations=1000, **settings)
    assert {peer.name: peer.here for peer in found.peers} == {"a-0": True, "a-1": True, "b-0": False, "b-1": False}
    (row,) = found.traffic
    assert row.exchanges == 100 and row.received_bytes == 100 * LENET
    # Each of a machine's two peers pulls from the other machine about every second time: one model per round each way.
    assert row.link_seconds == pytest.approx(100 * LENET / 12.5e6, rel=0.25) and found.between_machines
    slower = look(hosts="two.txt", link="1gbit", policy="tau:10", iterations=1000, max_rate="25mbit", **settings)
    assert (slower.exchange_rate, slower.exchange_seconds) == ("25mbit", LENET / 3.125e6)
    # Each peer sends about half a model per round to the other machine, at a quarter of the rate.
    assert slower.traffic[0].link_seconds == pytest.approx(2 * row.link_seconds, rel=0.25)


def test_an_exchange_of_fragments_moves_a_part(place: Path) -> None:
    """The finish and the start are of the whole model."""
    whole, parts = (look(policy="tau:10", iterations=1000, fragments=number) for number in (1, 4))
    assert parts.traffic[0].received_bytes == whole.traffic[0].received_bytes / 4 == 25 * LENET
    assert parts.exchange_seconds == whole.exchange_seconds / 4
    assert (parts.start_bytes, parts.finish_bytes) == (whole.start_bytes, whole.finish_bytes)
    said = CliRunner().invoke(main, ["run", "--dry-run", "--peers", "hosts.txt", "--fragments", "4"]).output
    assert "an exchange moves one of 4 fragments: 0.1029 MB" in said


def test_figures_of_a_script_are_per_megabyte_or_for_the_given_model_size(place: Path) -> None:
    unknown = look("train.py", policy="tau:10", iterations=1000)
    assert not unknown.model.is_known and unknown.traffic[0].received_bytes == 100 * ASSUMED
    known = look("train.py", size="45MB", policy="tau:10", iterations=1000)
    assert known.model.is_known and known.traffic[0].received_bytes == 4.5e9
    with pytest.raises(UsageError, match="applies only to a script: the built-in task's model is known"):
        look(size="45MB")


@pytest.mark.parametrize(
    ("settings", "models"),
    [
        ({}, 2.0),
        ({"finish": "none"}, 0.0),
        ({"hub": "0"}, 0.75),
        ({"exchange": "waves"}, 2.0),
        ({"servers": "1"}, None),
    ],
)
def test_the_finish_is_an_agreement_or_the_centre(place: Path, settings: dict[str, Any], models: float | None) -> None:
    found = look(iterations=20, **settings)
    assert found.finish_bytes == (None if models is None else models * LENET)
    assert found.start_bytes == LENET


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--min-peers", "9"], "hosts.txt: --min-peers 9 is more than the 4 peers of the run"),
        (["--name", "taken"], "a run 'taken' already exists"),
        (["--link", "fast"], "--link 'fast': not a rate from 8kbit"),
        (["--resume", "taken"], "--dry-run shows a new run"),
        (["--task", "cifar10", "--data-dir", "nowhere"], "nowhere: neither cifar-10-binary.tar.gz"),
        (["--logdir", "hosts.txt/runs"], "cannot write the run"),
    ],
)
def test_a_wrong_setting_gives_the_error_of_a_run(place: Path, arguments: list[str], cause: str) -> None:
    (place / "runs" / "taken").mkdir(parents=True)
    result = gossipx("--peers", "hosts.txt", *arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and cause in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("option", [["--link", "1gbit"], ["--model-size", "1MB"], ["--json"]])
def test_options_that_need_dry_run(place: Path, option: list[str]) -> None:
    result = CliRunner().invoke(main, ["run", "--peers", "hosts.txt", *option], prog_name="gossipx")
    assert result.exit_code == 2 and f"{option[0]} requires --dry-run" in result.stderr


def test_json_and_text_output(place: Path) -> None:
    plain = json.loads(gossipx("--peers", "hosts.txt", "--policy", "tau:10", "--iterations", "100", "--json").stdout)
    assert plain["traffic"][0]["exchanges"] == 10
    shown = gossipx("--peers", "hosts.txt", "--policy", "tau:10", "--iterations", "100", "--codec", "3lc").stdout
    for word in ("Nothing was started", "localhost:29403", "tau:10", "s at 1gbit", "for normally distributed values"):
        assert word in shown
    assert not (place / "runs").exists()
