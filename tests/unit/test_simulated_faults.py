"""Faults of simulated runs: crashes, pauses, partitions, churn, and how a run ends that they spoil."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulated import ALONE, TRAFFIC, command, scenario, simulated

from gossipx.metrics import summary
from gossipx.sim import World


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


def test_a_peer_that_never_reaches_the_others_is_a_failure(tmp_path: Path) -> None:
    """It was neither late nor started again."""
    apart = {"kind": "partition", "peers": [5], "at": 0.0}
    run = simulated(scenario(tmp_path, TRAFFIC, {"exchange": {"peer_timeout": 3.0}}, faults=[apart]), code=4)
    assert run.lost == ["peer-05"]


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
    churn = {"churn": {"rate": 6.0, "downtime": 1.0}, "exchange": {"peer_timeout": 2.0}, "sync": {"policy": "tau:10"}}
    run = simulated(scenario(tmp_path, TRAFFIC, churn))
    assert sum(n or 0 for n in run.suspicions) > 0 and len(run.lost) < 6
    crashes, restarts, lost = ([n or 0 for n in each] for each in (run.crashes, run.restarts, run.lost_iterations))
    assert sum(crashes) >= sum(restarts) > 0 and sum(crashes) - sum(restarts) <= len(run.lost)
    assert all((one > 0) <= (crashed > 0) for one, crashed in zip(lost, crashes, strict=True)) and sum(lost) > 0


def test_churn_without_a_crash_is_told(tmp_path: Path) -> None:
    churn = {"churn": {"rate": 0.05, "downtime": 1.0}}
    fault = {"kind": "crash", "peers": [4], "at": 3.0}
    for faults in ([], [fault]):
        done = command(scenario(tmp_path, TRAFFIC, churn, faults=faults), "--overwrite", "--name", "one")
        assert done.exit_code == 0
        assert "no peer crashed: a rate of 0.05 is 0.1 crashes of 6 peers in 1" in done.output, done.output


def test_a_partition_and_a_late_peer(tmp_path: Path) -> None:
    faults = [
        {"kind": "partition", "peers": [0, 1, 2], "at": 4.0, "until": 9.0},
        {"kind": "late", "peers": [5], "at": 2.0},
        {"kind": "pause", "peers": [3], "at": 6.0, "until": 7.0},
    ]
    run = simulated(scenario(tmp_path, TRAFFIC, {"exchange": {"peer_timeout": 3.0}}, faults=faults))
    assert run.lost == [] and sum(n or 0 for n in run.failed) + sum(n or 0 for n in run.suspicions) > 0


def test_too_few_peers_are_told_and_seen_in_the_exit_code(tmp_path: Path) -> None:
    faults = [{"kind": "crash", "peers": [1, 2, 3, 4, 5], "at": 3.0}]
    settings = {"sync": {"min_peers": 3, "policy": "tau:10"}, "exchange": {"peer_timeout": 2.0}}
    simulated(scenario(tmp_path, TRAFFIC, settings, faults=faults), code=4)


SERVED = {
    "simulation": {"peers": 3},
    "server": {"servers": "0", "servers_only": True},
    "exchange": {"peer_timeout": 2.0},
}
"""Two workers and a server."""


def test_a_lost_server_stops_the_workers_that_wait_for_it(tmp_path: Path) -> None:
    crash = {"kind": "crash", "peers": [0], "at": 1.0}
    run = simulated(scenario(tmp_path, TRAFFIC, SERVED, {"server": {"server_lost": "stop"}}, faults=[crash]), code=4)
    assert run.wall_seconds < 60


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


@pytest.mark.parametrize("work", ["traffic", "real"])
@pytest.mark.parametrize(("until", "seconds"), [(2.9, 10.8), (5.05, 12.95)], ids=["in an iteration", "in several"])
def test_a_pause_suspends_the_computation(tmp_path: Path, work: str, until: float, seconds: float) -> None:
    """As SIGSTOP does. A pause within another adds nothing."""
    settings: dict[str, dict[str, Any]] = {
        "simulation": {"peers": 2, "work": work},
        "compute": {"seconds": 1.0},
        "run": {"iterations": 10, "recorder": "none"},
        "sync": {"policy": "never", "finish": "none"},
    }
    if work == "traffic":
        settings["simulation"]["model"] = "resnet110"
    else:
        settings["run"]["eval_interval"] = 0
    faults = [
        {"kind": "pause", "peers": [0], "at": 2.1, "until": until},
        {"kind": "pause", "peers": [0], "at": 2.2, "until": 2.3},
    ]
    run = simulated(scenario(tmp_path, settings, faults=faults))
    assert run.train_seconds == [pytest.approx(seconds, abs=0.01), pytest.approx(10.0, abs=0.01)]


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
    ("fault", "words"),
    [
        ({"kind": "crash", "peers": [1], "at": 2000.0}, "the crash at 2000 s had no effect on peer-01"),
        ({"kind": "partition", "peers": [1], "at": 2000.0}, "the partition at 2000 s had no effect on peer-01"),
        ({"kind": "leave", "peers": [2], "at": 5.0}, "the leave at 5 s had no effect on peer-02"),
    ],
)
def test_a_fault_without_an_effect_is_told(tmp_path: Path, fault: dict[str, Any], words: str) -> None:
    gone = {"kind": "crash", "peers": [2], "at": 1.0}
    told = command(scenario(tmp_path, TRAFFIC, ALONE, faults=[gone, fault]))
    assert words in told.output, told.output
    assert told.output.count("had no effect") == 1


def test_a_run_of_many_peers_is_not_given_up_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wave in each iteration has more events for each peer, the more peers there are."""
    monkeypatch.setattr("gossipx.launch.simulation.run.STALLED", 0)
    waves = {"policy": "tau:1", "exchange": "waves", "blocking": True}
    many = {"simulation": {"peers": 300}, "run": {"iterations": 5}, "sync": waves}
    assert simulated(scenario(tmp_path, TRAFFIC, ALONE, many)).iterations == 5


def test_a_run_that_no_peer_ends_is_a_failure(tmp_path: Path) -> None:
    file = scenario(tmp_path, TRAFFIC, faults=[{"kind": "crash", "peers": list(range(6)), "at": 3.0}])
    told = command(file, "--name", "one")
    assert told.exit_code == 1 and "no peer has trained to its end" in told.output, told.output
    assert 35 < summary.read(tmp_path / "runs" / "one").iterations < 45, "those of 3 s"


def test_whether_models_of_traffic_agree_is_not_known(tmp_path: Path) -> None:
    apart = {"kind": "partition", "peers": [0], "at": 2.0, "one_way": True}
    run = simulated(scenario(tmp_path, TRAFFIC, {"exchange": {"peer_timeout": 2.0}}, faults=[apart]))
    assert run.agreed is None
