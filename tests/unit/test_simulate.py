"""``gossipx simulate``: whole runs in virtual time, from the command line to the directory that they leave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from simulated import ALONE, MODEL, TRAFFIC, command, scenario, simulated
from stale import SSPConsistency

from gossipx.cli import main
from gossipx.launch.simulation.run import simulate
from gossipx.metrics import summary
from gossipx.parts import Parts
from gossipx.settings.scenario import load
from gossipx.sim import World, traces
from gossipx.sync import SyncManager

# --- what comes out ---------------------------------------------------------------------------------


def test_tau_gives_the_retrievals_and_bytes_that_it_must(tmp_path: Path) -> None:
    run = simulated(scenario(tmp_path, TRAFFIC, {"sync": {"policy": "tau:20", "blocking": True, "finish": "none"}}))
    assert run.retrievals == [10.0] * 6 and run.bytes_received == [10 * MODEL] * 6
    assert run.lost == [] and run.model == "resnet110" and run.agreed is None


def test_the_time_is_that_of_iterations_and_blocked_pulls(tmp_path: Path) -> None:
    """Two peers that pull from each other at the same time use different directions of their links."""
    settings = {
        "simulation": {"peers": 2},
        "compute": {"seconds": 0.05},
        "network": {"preset": "100mbit", "latency": 0.0},
        "sync": {"policy": "tau:20", "blocking": True, "finish": "none"},
    }
    run = simulated(scenario(tmp_path, TRAFFIC, settings))
    pull = MODEL / (100e6 / 8 * 1448 / 1538)
    assert run.train_seconds == [pytest.approx(200 * 0.05 + 10 * pull, rel=1e-6)] * 2
    assert run.blocked_seconds == [pytest.approx(10 * pull, rel=1e-6)] * 2


def test_a_cost_per_message_is_in_the_time(tmp_path: Path) -> None:
    """A pull has one message with tensors."""
    sync = {"policy": "tau:20", "blocking": True, "finish": "none"}
    layers = [{"simulation": {"peers": 2}, "sync": sync, "network": {"per_message": cost}} for cost in (0.0, 0.01)]
    both = [simulated(scenario(tmp_path, TRAFFIC, one)) for one in layers]
    assert both[1].blocked_seconds == [pytest.approx((both[0].blocked_seconds[0] or 0) + 0.1, rel=1e-6)] * 2


@pytest.mark.parametrize("wait_free", [True, False])
def test_training_that_waits_for_all_values_takes_longer(tmp_path: Path, wait_free: bool) -> None:
    """Without an overlap an iteration is a pull, the computation and a push, one after the other; the first tables are
    there before training begins."""
    rate = 100e6 / 8 * 1448 / 1538
    settings: dict[str, dict[str, Any]] = {
        "simulation": {"peers": 2},
        "server": {"servers": "0", "servers_only": True, "wait_free": wait_free},
        "compute": {"seconds": 1.0},
        "network": {"preset": "100mbit", "latency": 0.0},
        "run": {"iterations": 5},
    }
    layers = [settings, {**settings, "compute": {"seconds": 1.0, "forward": 0.0}}]
    seconds = [float(simulated(scenario(tmp_path, TRAFFIC, one)).train_seconds[1] or 0.0) for one in layers]
    assert seconds[0] < seconds[1]
    if not wait_free:
        assert seconds[1] == pytest.approx(5 * 1.0 + 9 * MODEL / rate, rel=0.01)


def test_custom_parts_of_a_server_are_simulated(tmp_path: Path) -> None:
    """Workers that fetch only every fifth iteration receive less than with bsp, in which they do in each."""
    served = {"server": {"servers": "0"}, "run": {"iterations": 20}, "simulation": {"peers": 3}}
    file = scenario(tmp_path, TRAFFIC, served)

    def received(name: str, parts: Parts) -> float:
        assert simulate(load(file, {"logdir": str(tmp_path / "runs"), "name": name}), name, parts) == 0
        return sum(summary.read(tmp_path / "runs" / name).bytes_received[1:])  # type: ignore[arg-type]

    assert 0 < received("stale", Parts(sync=SSPConsistency(5))) < received("bsp", Parts()) / 3


def test_a_share_of_the_peers_has_slower_links(tmp_path: Path) -> None:
    """Of two peers one is slow, and a pull between them is as slow in both directions."""
    settings = {
        "simulation": {"peers": 2},
        "network": {"preset": "100mbit", "latency": 0.0, "slow_share": 0.5, "slow_factor": 4.0},
        "sync": {"policy": "tau:20", "blocking": True, "finish": "none"},
    }
    run = simulated(scenario(tmp_path, TRAFFIC, settings))
    pull = MODEL / (100e6 / 4 / 8 * 1448 / 1538)
    assert run.blocked_seconds == [pytest.approx(10 * pull, rel=1e-6)] * 2
    alike = simulated(scenario(tmp_path, TRAFFIC, settings, {"network": {"slow_share": 0.0}}))
    assert alike.blocked_seconds == [pytest.approx(10 * pull / 4, rel=1e-6)] * 2


def test_given_retrievals_replace_the_policy(tmp_path: Path) -> None:
    run = simulated(scenario(tmp_path, TRAFFIC, {"simulation": {"retrievals": [0, 1, 2, 3, 4, 50]}}))
    assert run.retrievals[:5] == [0, 1, 2, 3, 4] and 45 <= (run.retrievals[5] or 0) <= 50
    assert run.policy == "given retrievals"


@pytest.mark.parametrize("announcements", [True, False])
def test_announcements_change_nothing_but_their_messages(tmp_path: Path, announcements: bool) -> None:
    own = {
        "simulation": {"announcements": announcements, "deltas": "lenet"},
        "sync": {"policy": "travel:distance=1", "finish": "none"},
    }
    run = simulated(scenario(tmp_path, TRAFFIC, own))
    trace, expected = traces.load("lenet"), []
    for rank in range(6):
        sync = SyncManager("travel:distance=1")
        for step in range(1, 200):  # a pull of the last iteration is cancelled
            if sync.step(step, trace.delta(rank, step)):
                sync.requested()
                sync.completed()
        expected.append(sync.retrievals)
    assert run.retrievals == expected and run.iterations == 200


@pytest.mark.parametrize(
    "around",
    [
        {"sync": {"policy": "tau:20", "exchange": "waves"}},
        {"sync": {"policy": "tau:20", "mode": "pushpull"}},
        {"sync": {"policy": "tau:20"}, "hub": {"hub": "0"}},
        {"server": {"servers": "0,1", "sync": "ssp:staleness=3"}},
    ],
    ids=["waves", "pairs", "hub", "server"],
)
def test_every_kind_of_exchange_has_traffic(tmp_path: Path, around: dict[str, Any]) -> None:
    run = simulated(scenario(tmp_path, TRAFFIC, around))
    assert run.lost == [] and min(map(float, run.bytes_received)) >= 8 * MODEL  # type: ignore[arg-type]


def test_a_codec_shrinks_the_bytes_of_traffic_as_those_of_training(tmp_path: Path) -> None:
    """In a wave, a peer passes on the changes of all whose models it has averaged; the finish has no codec."""

    def received(work: dict[str, Any], around: dict[str, Any]) -> list[float]:
        common = {
            "simulation": {"peers": 4},
            "run": {"iterations": 20, "recorder": "none"},
            "compute": {"seconds": 0.1},
        }
        run = simulated(scenario(tmp_path, common, work, around))
        return [float(n or 0) for n in (*run.bytes_received, *run.finish_bytes)]

    real = {"run": {"eval_interval": 0}, "task": {"batch_size": 2}}
    for around in (
        {"sync": {"policy": "tau:10", "exchange": "waves", "codec": "int8"}},
        {"sync": {"policy": "tau:10", "codec": "int8"}},
        {"server": {"servers": "0", "servers_only": True, "push_codec": "int8"}},
        {"server": {"servers": "0", "servers_only": True, "push_codec": "int8", "pull_codec": "int8"}},
    ):
        traffic = {"simulation": {"work": "traffic", "model": "lenet", "encoded": 0.25}}
        found = received(traffic, around)
        assert found == pytest.approx(received(real, around), rel=0.01), around


def test_real_work_learns_and_records_the_exact_distance(tmp_path: Path) -> None:
    settings = {
        "simulation": {"peers": 3},
        "compute": {"seconds": 0.1},
        "run": {"iterations": 100, "eval_interval": 50, "recorder": "csv"},
        "sync": {"policy": "tau:10"},
    }
    run = simulated(scenario(tmp_path, settings))
    assert run.agreed and min(run.test_accuracy) > 0.6 and run.consensus_accuracy == run.test_accuracy[0]  # type: ignore
    rows = (tmp_path / "runs" / "one" / "peer-01" / "metrics.csv").read_text().splitlines()
    tags = {row.split(",")[2] for row in rows}
    assert {"train/loss", "test/accuracy", "sync/delta", "sync/exact_consensus_distance"} <= tags
    assert max(float(row.split(",")[1]) for row in rows[1:]) == pytest.approx(10.0, abs=0.2), "virtual seconds"


def test_real_work_without_announcements_begins_with_one_model_and_evaluates_those_that_are_recorded(tmp_path: Path):
    own = {"simulation": {"peers": 3, "recorded": 1}, "compute": {"seconds": 0.1}, "run": {"iterations": 5}}
    apart, none = {"sync": {"policy": "never", "finish": "none"}}, {"simulation": {"recorded": 0}}
    announced, alone, unseen = (simulated(scenario(tmp_path, own, apart, *of)) for of in ([], [ALONE], [ALONE, none]))
    assert alone.test_loss == [announced.test_loss[0], None, None] and alone.lost == []
    assert alone.consensus_loss == unseen.consensus_loss == announced.consensus_loss


def test_the_tools_for_runs_read_a_simulated_one(tmp_path: Path) -> None:
    short = {"run": {"iterations": 30, "recorder": "tensorboard", "log_interval": 5}, "sync": {"policy": "tau:5"}}
    simulated(scenario(tmp_path, TRAFFIC, short))
    logdir, one = tmp_path / "runs", str(tmp_path / "runs" / "one")
    plot, page = tmp_path / "plot.png", tmp_path / "page.html"
    done = CliRunner().invoke(main, ["compare", one, "--plot", str(plot), "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert plot.stat().st_size > 10_000 and "peer-05" in page.read_text()
    assert " done " in CliRunner().invoke(main, ["runs", str(logdir)]).output


@pytest.mark.parametrize("words", ["status {}", "peer drain {} peer-01", "run --resume {}", "server set-sync {} asp"])
def test_what_needs_processes_refuses_a_simulated_run(tmp_path: Path, words: str) -> None:
    simulated(scenario(tmp_path, TRAFFIC, {"run": {"iterations": 5}}))
    done = CliRunner().invoke(main, words.format(tmp_path / "runs" / "one").split())
    assert done.exit_code == 2 and done.output.count("\n") == 1
    assert "simulated" in done.output and "gossipx simulate" in done.output


# --- the same seed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("work", ["real", "traffic"])
def test_the_same_seed_gives_the_same_files(tmp_path: Path, work: str) -> None:
    common = {
        "compute": {"seconds": 0.1, "spread": "log-normal:sigma=0.3"},
        "run": {"recorder": "csv", "iterations": 30},
    }
    kind = (
        TRAFFIC
        if work == "traffic"
        else {"simulation": {"peers": 3}, "run": {"eval_interval": 0}, "task": {"batch_size": 2}}
    )
    file = scenario(tmp_path, kind, common, {"sync": {"policy": "random:p=0.2"}})

    def files(*options: str) -> dict[str, bytes]:
        simulated(file, *options)
        directory = tmp_path / "runs" / "one"
        return {str(one.relative_to(directory)): one.read_bytes() for one in directory.rglob("*") if one.is_file()}

    first = files()
    assert any(name.endswith("metrics.csv") for name in first) and "summary.json" in first
    assert files() == first
    assert files("--seed", "1")["summary.json"] != first["summary.json"]


# --- the command ------------------------------------------------------------------------------------


def test_the_list_names_every_scenario_with_what_it_shows() -> None:
    done = CliRunner().invoke(main, ["simulate", "--list"])
    assert done.exit_code == 0 and all(name in done.output for name in ("thousand", "stragglers", "churn", "two-sites"))


def test_a_name_in_use_is_refused_and_the_default_gets_a_number(tmp_path: Path) -> None:
    file = scenario(tmp_path, TRAFFIC, {"run": {"iterations": 5}})
    assert [command(file).exit_code for _ in range(2)] == [0, 0]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"mine", "mine-2"}
    refused = command(file, "--name", "mine")
    assert refused.exit_code == 2


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"simulation": {"model": "alexnet-2"}}, "unknown model"),
        ({"simulation": {"deltas": "nothing"}, "sync": {"policy": "travel:distance=1"}}, "nothing"),
        ({"simulation": {"deltas": "lenet"}}, "deltas"),
        ({"sync": {"policy": "adaptive"}}, "deltas"),
        ({"simulation": {"encoded": 0.25}}, "codec"),
        ({"simulation": {"retrievals": [201]}}, "retrievals"),
        ({"simulation": {"retrievals": [20]}, "sync": {"policy": "tau:10"}}, "policy"),
        ({"simulation": {"retrievals": [20]}, "server": {"servers": "0"}}, "servers"),
        ({"compute": {"spread": "normal:deviation=0.1"}}, "one of constant, log-normal"),
        ({"compute": {"spread": "log-normal:sigma=1000"}}, "sigma"),
        ({"sync": {"policy": "drift:distance=2"}}, "drift"),
        ({"sync": {"codec": "int8"}}, "encoded"),
        ({"compute": {"forward": 0.5}}, "forward"),
        ({"churn": {"rate": 1.0, "state": "kept"}}, "real"),
        ({"simulation": {"announcements": False}}, "finish"),
        ({"simulation": {"retrievals": [1.5]}}, "whole"),
        ({"simulation": {"retrievals": [1, 2, 3, 4, 5, 6]}, "sync": {"exchange": "waves"}}, "a wave"),
        ({"compute": {"straggler_share": 0.05}}, "straggler_share"),
        ({"compute": {"delay_share": 0.05}}, "delay_share"),
        ({"network": {"slow_share": 0.05}}, "slow_share"),
        ({"network": {"loss": 0.01, "latency": 0.0}}, "latency"),
        ({"sync": {"distance_interval": 5}}, "distance_interval"),
    ],
)
def test_what_cannot_be_simulated_is_told_before_the_run(tmp_path: Path, tables: dict[str, Any], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gossipx", "simulate", str(scenario(tmp_path, TRAFFIC, tables))],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert "mine.toml" in done.stderr or ".txt" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ([{"kind": "partition", "peers": [0, 1, 2, 3, 4, 5]}], "all peers"),
        ([{"kind": "late", "peers": [1], "at": 1.0}, {"kind": "late", "peers": [1], "at": 2.0}], "twice"),
    ],
)
def test_a_fault_that_cannot_have_an_effect_is_told_before_the_run(
    tmp_path: Path, faults: list[dict[str, Any]], words: str
) -> None:
    told = command(scenario(tmp_path, TRAFFIC, faults=faults))
    assert told.exit_code == 2 and words in told.output, told.output


def test_more_peers_than_usual_are_told_that_a_finish_costs_announcements(tmp_path: Path) -> None:
    told = command(scenario(tmp_path, TRAFFIC, {"simulation": {"peers": 65}, "run": {"iterations": 2}}))
    assert told.exit_code == 0 and 'finish = "none"' in told.output, told.output


def test_overwriting_takes_the_plain_name(tmp_path: Path) -> None:
    file = scenario(tmp_path, TRAFFIC, {"run": {"iterations": 5}})
    assert [command(file, "--overwrite").exit_code for _ in range(2)] == [0, 0]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"mine"}


def test_the_evaluation_takes_time_with_traffic(tmp_path: Path) -> None:
    both = [
        simulated(scenario(tmp_path, TRAFFIC, ALONE, {"compute": {"evaluation": seconds}})).wall_seconds
        for seconds in (0.0, 5.0)
    ]
    assert both[1] == pytest.approx(both[0] + 5.0)


def test_an_interrupted_run_leaves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C, after some thousands of the million iterations of each peer."""
    advance = World.advance

    def interrupted(world: World[Any], events: int) -> bool:
        if sum(peer.step for peer in world.peers.values()) > 12_000:
            raise KeyboardInterrupt
        return advance(world, events)

    monkeypatch.setattr(World, "advance", interrupted)
    run = simulated(scenario(tmp_path, TRAFFIC, {"run": {"iterations": 10**6}}), code=130)
    assert len(run.stopped) == 6 and run.lost == [] and 1000 < run.iterations < 20_000


def test_an_interruption_before_the_training_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(World, "start", interrupted)
    assert command(scenario(tmp_path, TRAFFIC)).exit_code == 130
    assert not (tmp_path / "runs" / "mine").exists()
