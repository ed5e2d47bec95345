"""``gossipx simulate``: whole runs in virtual time, from the command line to the directory that they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from stale import SSPConsistency

from gossipx.cli import main
from gossipx.figures import FIGURES
from gossipx.launch.simulation.run import simulate
from gossipx.metrics import summary
from gossipx.metrics.summary import Summary
from gossipx.parts import Parts
from gossipx.settings.scenario import load
from gossipx.sim import World, traces
from gossipx.sync import SyncManager

MODEL = 4 * 1_727_962
"""Bytes of resnet110."""
TRAFFIC = {
    "simulation": {"peers": 6, "work": "traffic", "model": "resnet110"},
    "run": {"iterations": 200, "recorder": "none"},
}
ALONE = {"simulation": {"announcements": False}, "sync": {"finish": "none"}}


def scenario(folder: Path, *layers: dict[str, Any], faults: list[dict[str, Any]] | None = None) -> Path:
    """Write a scenario: tables of values, of which later ones replace earlier ones."""
    tables: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for table, values in layer.items():
            tables.setdefault(table, {}).update(values)
    lines = []
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    for fault in faults or []:
        lines += ["[[faults]]", *(f"{name} = {json.dumps(value)}" for name, value in fault.items())]
    file = folder / "mine.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


def command(file: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["simulate", str(file), "--logdir", str(file.parent / "runs"), *options])


def simulated(file: Path, *options: str, code: int = 0) -> Summary:
    """Run a scenario; return its summary."""
    done = command(file, "--overwrite", "--name", "one", *options)
    assert done.exit_code == code, done.output + str(done.exception)
    return summary.read(file.parent / "runs" / "one")


# --- what comes out ---------------------------------------------------------------------------------


def test_tau_gives_the_retrievals_and_bytes_that_it_must(tmp_path: Path) -> None:
    run = simulated(scenario(tmp_path, TRAFFIC, {"sync": {"policy": "tau:20", "blocking": True, "finish": "none"}}))
    assert run.retrievals == [10.0] * 6 and run.bytes_received == [10 * MODEL] * 6
    assert run.lost == [] and run.model == "resnet110" and run.agreed is None


RATE = 100e6 / 8 * 1448 / 1538
"""Bytes of a model per second on a link of 100mbit."""


@pytest.mark.parametrize(
    ("network", "pull"),
    [
        ({}, MODEL / RATE),
        ({"per_message": 0.01}, MODEL / RATE + 0.01),  # a pull has one message with tensors
        ({"slow_share": 0.5, "slow_factor": 4.0}, 4 * MODEL / RATE),  # between a slow peer and another, both directions
    ],
    ids=str,
)
def test_the_time_is_that_of_iterations_and_pulls(tmp_path: Path, network: dict[str, float], pull: float) -> None:
    """Two peers that pull from each other at the same time use different directions of their links."""
    settings = {
        "simulation": {"peers": 2},
        "compute": {"seconds": 0.05},
        "network": {"preset": "100mbit", "latency": 0.0, **network},
        "sync": {"policy": "tau:20", "blocking": True, "finish": "none"},
    }
    run = simulated(scenario(tmp_path, TRAFFIC, settings))
    assert run.train_seconds == [pytest.approx(200 * 0.05 + 10 * pull, rel=1e-6)] * 2
    assert run.blocked_seconds == [pytest.approx(10 * pull, rel=1e-6)] * 2


@pytest.mark.parametrize("wait_free", [True, False])
def test_training_that_waits_for_all_values_takes_longer(tmp_path: Path, wait_free: bool) -> None:
    """Without an overlap an iteration is a pull, the computation and a push, one after the other; the first tables are
    there before training begins."""
    settings: dict[str, dict[str, Any]] = {
        "simulation": {"peers": 2},
        "server": {"servers": "0", "servers_only": True, "wait_free": wait_free},
        "network": {"preset": "100mbit", "latency": 0.0},
        "run": {"iterations": 5},
    }
    layers = [{"compute": {"seconds": 1.0}}, {"compute": {"seconds": 1.0, "forward": 0.0}}]
    overlapping, waiting = (simulated(scenario(tmp_path, TRAFFIC, settings, one)).train_seconds[1] for one in layers)
    assert overlapping < waiting  # type: ignore[operator]
    if not wait_free:
        assert waiting == pytest.approx(5 * 1.0 + 9 * MODEL / RATE, rel=0.01)


def test_custom_parts_of_a_server_are_simulated(tmp_path: Path) -> None:
    """Workers that fetch only every fifth iteration receive less than with bsp, in which they do in each."""
    served = {"server": {"servers": "0"}, "run": {"iterations": 20}, "simulation": {"peers": 3}}
    file = scenario(tmp_path, TRAFFIC, served)

    def received(name: str, parts: Parts) -> float:
        assert simulate(load(file, {"logdir": str(tmp_path / "runs"), "name": name}), name, parts) == 0
        return sum(summary.read(tmp_path / "runs" / name).bytes_received[1:])  # type: ignore[arg-type]

    assert 0 < received("stale", Parts(sync=SSPConsistency(5))) < received("bsp", Parts()) / 3


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
    run = {"iterations": 20, "recorder": "none"}
    common = {"simulation": {"peers": 4}, "run": run, "compute": {"seconds": 0.1}}
    real = {"run": {"eval_interval": 0}, "task": {"batch_size": 2}}
    traffic = {"simulation": {"work": "traffic", "model": "lenet", "encoded": 0.25}}

    def received(work: dict[str, Any], around: dict[str, Any]) -> list[float]:
        run = simulated(scenario(tmp_path, common, work, around))
        return [float(n or 0) for n in (*run.bytes_received, *run.finish_bytes)]

    for around in (
        {"sync": {"policy": "tau:10", "exchange": "waves", "codec": "int8"}},
        {"sync": {"policy": "tau:10", "codec": "int8"}},
        {"server": {"servers": "0", "servers_only": True, "push_codec": "int8"}},
        {"server": {"servers": "0", "servers_only": True, "push_codec": "int8", "pull_codec": "int8"}},
    ):
        assert received(traffic, around) == pytest.approx(received(real, around), rel=0.01), around


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
    assert tags - {figure.where.tag for figure in FIGURES} == {"tag"}, "the heading"
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


@pytest.mark.parametrize(
    "work",
    [TRAFFIC, {"simulation": {"peers": 3}, "run": {"eval_interval": 0}, "task": {"batch_size": 2}}],
    ids=["traffic", "real"],
)
def test_the_same_seed_gives_the_same_files(tmp_path: Path, work: dict[str, Any]) -> None:
    compute = {"seconds": 0.1, "spread": "log-normal:sigma=0.3"}
    common = {"compute": compute, "run": {"recorder": "csv", "iterations": 30}, "sync": {"policy": "random:p=0.2"}}
    file = scenario(tmp_path, work, common)

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
    assert [command(file, *given).exit_code for given in ([], ["--overwrite"], [], ["--name", "mine"])] == [0, 0, 0, 2]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"mine", "mine-2"}


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
        ({"faults": [{"kind": "partition", "peers": [0, 1, 2, 3, 4, 5]}]}, "all peers"),
        ({"faults": [{"kind": "late", "peers": [1], "at": at} for at in (1.0, 2.0)]}, "twice"),
    ],
)
def test_what_cannot_be_simulated_is_told_before_the_run(tmp_path: Path, tables: dict[str, Any], words: str) -> None:
    settings = {name: table for name, table in tables.items() if name != "faults"}
    told = command(scenario(tmp_path, TRAFFIC, settings, faults=tables.get("faults")))
    assert told.exit_code == 2 and words in told.stderr and told.stderr.count("\n") == 1, told.stderr
    assert "mine.toml" in told.stderr or ".txt" in told.stderr
    assert not (tmp_path / "runs").exists()


def test_the_evaluation_takes_time_with_traffic(tmp_path: Path) -> None:
    layers = [{"compute": {"evaluation": seconds}} for seconds in (0.0, 5.0)]
    without, evaluated = (simulated(scenario(tmp_path, TRAFFIC, ALONE, one)).wall_seconds for one in layers)
    assert evaluated == pytest.approx(without + 5.0)


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


# --- Faults of simulated runs: crashes, pauses, partitions, churn, and how a run ends that they spoil ---


def test_a_crashed_peer_that_does_not_return_is_lost(tmp_path: Path) -> None:
    run = simulated(scenario(tmp_path, TRAFFIC, faults=[{"kind": "crash", "peers": [4], "at": 3.0}]))
    assert run.lost == ["peer-04"] and run.iterations == 200
    assert run.crashes == [0, 0, 0, 0, 1, 0] and run.restarts == [0] * 6
    assert sum(n or 0 for n in run.lost_iterations) == run.lost_iterations[4] == pytest.approx(2.8 / 0.0741, abs=3)


@pytest.mark.parametrize("until", [14.75, 1000.0], ids=["while it joins", "before it starts"])
def test_a_peer_that_returns_when_the_others_have_ended_is_lost(tmp_path: Path, until: float) -> None:
    """As in a real run, it is too late to spoil the run."""
    crash = {"kind": "crash", "peers": [3], "at": 5.0, "until": until}
    run = simulated(scenario(tmp_path, TRAFFIC, ALONE, {"network": {"preset": "100mbit"}}, faults=[crash]))
    assert run.lost == ["peer-03"]
    assert run.wall_seconds < 100


def test_a_run_without_announcements_ends_under_churn(tmp_path: Path) -> None:
    """Peers that were started again wait for none of those that have ended, and only peers that train crash."""
    churn = {"simulation": {"peers": 12}, "churn": {"rate": 6.0, "downtime": 1.0}}
    run = simulated(scenario(tmp_path, TRAFFIC, ALONE, churn))
    assert sum(n or 0 for n in run.suspicions) > 0 and len(run.lost) < 3, "one that returns at the end is too late"
    assert run.wall_seconds < 60, "200 iterations of 0.074 s, and a few crashes of those that are behind"


def test_a_late_peer_takes_the_model_of_another(tmp_path: Path) -> None:
    run = simulated(scenario(tmp_path, TRAFFIC, ALONE, faults=[{"kind": "late", "peers": [5], "at": 7.0}]))
    assert run.wall_seconds == pytest.approx(200 * 0.0741, rel=0.03) and run.lost == []
    assert float(run.train_seconds[5] or 0) == pytest.approx(200 * 0.0741 - 7.0, rel=0.05)


def test_the_wall_time_counts_from_the_first_process(tmp_path: Path) -> None:
    """All peers crash and are started again."""
    faults = [{"kind": "crash", "peers": list(range(6)), "at": 5.0, "until": 6.0}]
    run = simulated(scenario(tmp_path, TRAFFIC, faults=faults))
    assert run.wall_seconds > 6.0 + 200 * 0.0741


def test_a_peer_that_has_ended_does_not_crash(tmp_path: Path) -> None:
    slow = {"compute": {"seconds": 0.1, "straggler_share": 0.2, "straggler_factor": 4.0}}
    plain = simulated(scenario(tmp_path, TRAFFIC, slow, ALONE))
    crash = {"kind": "crash", "peers": [0, 1, 2, 3, 4, 5], "at": 30.0, "until": 31.0}
    ended = [rank for rank, seconds in enumerate(plain.train_seconds) if float(seconds or 0) < 30]
    again = simulated(scenario(tmp_path, TRAFFIC, slow, ALONE, faults=[crash]))
    assert len(ended) == 5
    assert [again.retrievals[rank] for rank in ended] == [plain.retrievals[rank] for rank in ended]


def test_warnings_of_peers_are_told_once_per_kind(tmp_path: Path) -> None:
    """A model takes 5.9 s on these links, and a pull has 2 s."""
    slow = {"network": {"preset": "10mbit"}, "exchange": {"peer_timeout": 2.0}}
    file = scenario(tmp_path, TRAFFIC, slow, ALONE)
    done = command(file)
    assert done.exit_code == 0
    warned = [line for line in done.output.splitlines() if "deadline" in line]
    assert len(warned) == 1 and "more of this kind" in warned[0], done.output


def test_a_full_disk_and_a_lost_one_cost_the_state(tmp_path: Path) -> None:
    """A peer that is started again continues at its last checkpoint; without one it takes the model of another."""
    settings = {
        "simulation": {"peers": 3},
        "task": {"batch_size": 2},
        "compute": {"seconds": 0.1},
        "run": {"iterations": 60, "eval_interval": 0, "checkpoint_every": "10", "recorder": "none"},
        "sync": {"policy": "never", "finish": "none"},
        "exchange": {"peer_timeout": 2.0},
    }
    crash = {"kind": "crash", "peers": [1], "at": 3.55, "until": 4.05}

    def ended(*faults: dict[str, Any]) -> tuple[float, float]:
        run = simulated(scenario(tmp_path, settings, faults=list(faults)))
        assert (run.crashes, run.restarts) == ([0, 1, 0], [0, 1, 0])
        return round(float(run.train_seconds[1] or 0), 0), run.lost_iterations[1] or 0

    assert ended({**crash, "state": "kept"}) == (3.0, 5), "the iterations from 30 to 60, after the restart"
    assert ended({**crash, "state": "lost"}) == (2.0, 35), "the others were at 40"
    again = {**crash, "at": 5.0, "until": 5.5, "state": "lost"}
    run = simulated(scenario(tmp_path, settings, faults=[{**crash, "state": "lost"}, again]))
    assert (run.crashes[1], run.restarts[1]) == (2, 2)
    assert 35 + 8 <= (run.lost_iterations[1] or 0) <= 35 + 10, "the second process began at about 40"


def test_churn_lets_peers_crash_and_return(tmp_path: Path) -> None:
    churn = {"churn": {"rate": 6.0, "downtime": 1.0}, "sync": {"policy": "tau:10"}}
    run = simulated(scenario(tmp_path, TRAFFIC, churn, FAST))
    assert sum(n or 0 for n in run.suspicions) > 0 and len(run.lost) < 6
    crashes, restarts, lost = ([n or 0 for n in each] for each in (run.crashes, run.restarts, run.lost_iterations))
    assert sum(crashes) >= sum(restarts) > 0 and sum(crashes) - sum(restarts) <= len(run.lost)
    assert all((one > 0) <= (crashed > 0) for one, crashed in zip(lost, crashes, strict=True)) and sum(lost) > 0


def test_a_partition_and_a_late_peer(tmp_path: Path) -> None:
    """Whether models of traffic agree is not known."""
    faults = [
        {"kind": "partition", "peers": [0, 1, 2], "at": 4.0, "until": 9.0},
        {"kind": "late", "peers": [5], "at": 2.0},
        {"kind": "pause", "peers": [3], "at": 6.0, "until": 7.0},
    ]
    run = simulated(scenario(tmp_path, TRAFFIC, {"exchange": {"peer_timeout": 3.0}}, faults=faults))
    assert run.lost == [] and sum(n or 0 for n in run.failed) + sum(n or 0 for n in run.suspicions) > 0
    assert run.agreed is None


FAST = {"exchange": {"peer_timeout": 2.0}}
SERVED = {"simulation": {"peers": 3}, "server": {"servers": "0", "servers_only": True}, **FAST}
"""Two workers and a server."""


def test_a_run_that_cannot_go_on_is_given_up_with_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers wait for a server that does not return; what comes later is not said to have had no effect."""
    monkeypatch.setattr("gossipx.launch.simulation.run.STALLED", 20_000)
    faults = [{"kind": "crash", "peers": [0], "at": 1.0}, {"kind": "crash", "peers": [1], "at": 1e6}]
    file = scenario(tmp_path, TRAFFIC, SERVED, faults=faults)
    told = command(file, "--name", "one")
    assert "no effect" not in told.output
    assert told.exit_code == 1 and "peer-01" in told.output and "peer 0" in told.output, told.output
    run = summary.read(tmp_path / "runs" / "one")
    assert run.stopped == ["peer-01", "peer-02"] and 2 < run.iterations < 8


@pytest.mark.parametrize("work", [{"work": "traffic", "model": "resnet110"}, {"work": "real"}])
@pytest.mark.parametrize(("until", "seconds"), [(2.9, 10.8), (5.05, 12.95)], ids=["in an iteration", "in several"])
def test_a_pause_suspends_the_computation(tmp_path: Path, work: dict[str, Any], until: float, seconds: float) -> None:
    """As SIGSTOP does. A pause within another adds nothing."""
    run = {"iterations": 10, "recorder": "none"} | ({"eval_interval": 0} if work["work"] == "real" else {})
    sync = {"policy": "never", "finish": "none"}
    settings = {"simulation": {"peers": 2, **work}, "compute": {"seconds": 1.0}, "run": run, "sync": sync}
    faults = [
        {"kind": "pause", "peers": [0], "at": 2.1, "until": until},
        {"kind": "pause", "peers": [0], "at": 2.2, "until": 2.3},
    ]
    paused = simulated(scenario(tmp_path, settings, faults=faults))
    assert paused.train_seconds == [pytest.approx(seconds, abs=0.01), pytest.approx(10.0, abs=0.01)]


def test_a_crash_as_the_scenario_says_does_not_end_churn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash that is drawn for the time in which the peer is down is left out, and the next is drawn."""
    crashed: list[tuple[int, float]] = []
    crash = World.crash
    monkeypatch.setattr(World, "crash", lambda world, rank, at: (crashed.append((rank, at)), crash(world, rank, at)))
    settings = {
        "run": {"iterations": 800},
        "churn": {"rate": 3.0, "downtime": 0.5},
        "sync": {"policy": "never"},
        "exchange": {"peer_timeout": 1.0},
    }
    down = {"kind": "crash", "peers": list(range(6)), "at": 0.2, "until": 30.0}
    simulated(scenario(tmp_path, TRAFFIC, ALONE, settings, faults=[down]))
    assert len({rank for rank, at in crashed if at > 30.0}) >= 5, "each has three on average in 59 s"


@pytest.mark.parametrize(
    ("layers", "fault"),
    [
        # It was neither late nor started again, and never reaches the others; too few are left; workers wait.
        ([{"exchange": {"peer_timeout": 3.0}}], {"kind": "partition", "peers": [5], "at": 0.0}),
        ([FAST, {"sync": {"min_peers": 3}}], {"kind": "crash", "peers": [1, 2, 3, 4, 5], "at": 3.0}),
        ([SERVED, {"server": {"server_lost": "stop"}}], {"kind": "crash", "peers": [0], "at": 1.0}),
    ],
    ids=["never there", "too few", "a server"],
)
def test_a_run_that_cannot_be_completed_has_an_exit_code(
    tmp_path: Path, layers: list[dict[str, Any]], fault: dict[str, Any]
) -> None:
    run = simulated(scenario(tmp_path, TRAFFIC, *layers, faults=[fault]), code=4)
    assert run.wall_seconds < 60 and {f"peer-{rank:02d}" for rank in fault["peers"]} <= {*run.lost}


GONE = {"kind": "crash", "peers": [2], "at": 1.0}
RARELY = {"churn": {"rate": 0.05, "downtime": 1.0}}
NO_CRASH = "no peer crashed: a rate of 0.05 is 0.1 crashes of 6 peers in 1"


@pytest.mark.parametrize(
    ("settings", "faults", "words"),
    [
        (ALONE, [GONE, {**GONE, "peers": [1], "at": 2000.0}], "the crash at 2000 s had no effect on peer-01"),
        (ALONE, [GONE, {"kind": "partition", "peers": [1], "at": 2000.0}], "the partition at 2000 s had no effect on"),
        (ALONE, [GONE, {"kind": "leave", "peers": [2], "at": 5.0}], "the leave at 5 s had no effect on peer-02"),
        (RARELY, [], NO_CRASH),
        (RARELY, [GONE], NO_CRASH),
        (
            {"simulation": {"peers": 65}, "run": {"iterations": 2}},
            [],
            'finish = "none"',
        ),  # a finish costs announcements
    ],
)
def test_what_has_no_effect_or_costs_much_is_told(
    tmp_path: Path, settings: dict[str, Any], faults: list[dict[str, Any]], words: str
) -> None:
    told = command(scenario(tmp_path, TRAFFIC, settings, faults=faults))
    assert told.exit_code == 0 and words in told.output, told.output
    assert told.output.count("had no effect") == words.count("had no effect")


def test_a_run_of_many_peers_is_not_given_up_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wave has more events for each peer, the more peers there are."""
    monkeypatch.setattr("gossipx.launch.simulation.run.STALLED", 0)
    monkeypatch.setattr("gossipx.launch.simulation.run.OF_PEER", 0)
    waves = {"policy": "tau:1", "exchange": "waves", "blocking": True}
    many = {"simulation": {"peers": 64}, "run": {"iterations": 3}, "sync": waves}
    assert simulated(scenario(tmp_path, TRAFFIC, ALONE, many)).iterations == 3


def test_a_run_that_no_peer_ends_is_a_failure(tmp_path: Path) -> None:
    file = scenario(tmp_path, TRAFFIC, faults=[{"kind": "crash", "peers": list(range(6)), "at": 3.0}])
    told = command(file, "--name", "one")
    assert told.exit_code == 1 and "no peer has trained to its end" in told.output, told.output
    assert 35 < summary.read(tmp_path / "runs" / "one").iterations < 45, "those of 3 s"
