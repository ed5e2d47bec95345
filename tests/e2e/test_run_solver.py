"""``gossipx run --solver``: the built-in task with Caffe's solver, in real processes.

The number in brackets is a row of the project's fault list.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from runs import Folder, folder

SOLVER = """
net: "lenet" base_lr: 0.01 momentum: 0.9 weight_decay: 0.0005 lr_policy: "inv" gamma: 0.0001 power: 0.75
display: 20 max_iter: 60 test_iter: 20 test_interval: 30 snapshot: 30 snapshot_prefix: "examples/mnist/lenet"
solver_mode: CPU
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Folder]:
    """Provide a folder for two peers."""
    with folder(tmp_path, 2) as made:
        (tmp_path / "solver.prototxt").write_text(SOLVER)
        yield made


def test_the_built_in_task_by_a_solver_file(two: Folder) -> None:
    run = two.run("--policy", "tau:5", "--blocking", "--solver", "solver.prototxt")
    summary = run.summary
    assert summary["model"] == "lenet" and summary["iterations"] == 60  # the file's
    assert summary["consensus_accuracy"] > 0.5 and min(summary["retrievals"]) > 5
    (warning,) = [line for line in run.ended.errors.splitlines() if "no effect:" in line]
    assert "solver_mode: has no effect: --device" in warning  # net has one: the built-in model
    for rank in (0, 1):
        own = run.directory / f"peer-{rank:02d}"
        log = (own / "caffe.log").read_text()
        assert "no effect:" not in log
        assert re.search(r"\] Iteration 30, Testing net \(#0\)\n.* Test net output #0: accuracy = 0\.[3-9]", log)
        assert re.findall(r"Iteration (\d+), lr = ([\d.]+)", log) == [
            (str(i), f"{0.01 * (1 + 0.0001 * i) ** -0.75:g}") for i in (0, 20, 40)
        ]
        assert {file.name for file in own.glob("lenet_iter_*")} == {
            f"lenet_iter_{i}.{kind}" for i in (30, 60) for kind in ("safetensors", "solverstate")
        }


@pytest.mark.fault(41)
def test_an_error_in_the_file_is_one_line_with_its_position(two: Folder) -> None:
    """A typo in solver.prototxt: exit code 2, line and column; nothing is started."""
    (two.path / "typo.prototxt").write_text('net: "lenet"\n  base_lrr: 0.1\n')
    (two.path / "value.prototxt").write_text('base_lr: 0.1 max_iter: 9 lr_policy: "steps"\n')
    assert two.refused("--solver", "typo.prototxt") == (
        "typo.prototxt:2:3: unknown field 'base_lrr' (did you mean 'base_lr'?)"
    )
    assert re.match(
        r".*value\.prototxt:1:26: lr_policy: unknown lr_policy 'steps'", two.refused("--solver", "value.prototxt")
    )
    assert "--momentum is set by the solver file" in two.refused("--solver", "convnet", "--momentum", "0.5")
    assert "solver file not found; the built-in ones are alexnet" in two.refused("--solver", "nowhere.prototxt")
    assert not (two.path / "x").exists()


LENGTHLESS = """
net: "lenet" base_lr: 0.01 lr_policy: "poly" power: 1 display: 2 snapshot_prefix: "s"
"""


def test_iterations_are_the_length_of_a_file_without_one(two: Folder) -> None:
    """It is also the length in lr_policy poly: base_lr (1 - i / max_iter)."""
    (two.path / "long.prototxt").write_text(LENGTHLESS)
    assert two.run("--solver", "long.prototxt", "--iterations", "8").summary["iterations"] == 8
    log = (two.path / "x" / "peer-01" / "caffe.log").read_text()
    assert re.findall(r"Iteration (\d+), lr = ([\d.]+)", log) == [
        ("0", "0.01"), ("2", "0.0075"), ("4", "0.005"), ("6", "0.0025")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "test_iter: [1, 2] test_interval: 1",
            "3:1: test_iter: it is given 2 times, once per test net, and the run has 1",
        ),
        ('weights: "gone.safetensors"', "3:1: weights: there is no file 'gone.safetensors'"),
        ('weights: ""', "3:1: weights: there is no file ''"),
    ],
    ids=["two test nets", "no weights", "weights without a name"],
)
def test_unsupported_fields_are_refused_before_the_start(two: Folder, text: str, told: str) -> None:
    (two.path / "asks.prototxt").write_text(LENGTHLESS + text)
    assert f"asks.prototxt:{told}" in two.refused("--solver", "asks.prototxt")
    assert not (two.path / "x").exists()


def test_on_sighup_each_peer_writes_a_snapshot_and_the_run_continues(two: Folder) -> None:
    """The signal is sent to the command, whose process id a user knows."""
    (two.path / "s.prototxt").write_text(SOLVER.replace("snapshot: 30", ""))
    process = two.start_run("--solver", "s.prototxt", "--iterations", "100000", "--policy", "never")
    process.line(r"train [1-9].*train [1-9]")
    process.signal(signal.SIGHUP)
    own = [two.path / "x" / f"peer-{rank:02d}" for rank in (0, 1)]
    while not all(list(one.glob("lenet_iter_*.solverstate")) for one in own):
        process.line("train")
    taken = max(int(re.sub(r"\D", "", one.stem)) for place in own for one in place.glob("lenet_iter_*.solverstate"))
    while min(int(done) for done in re.findall(r"train (\d+)/", process.line("train"))) <= taken:
        pass
    process.signal(signal.SIGINT)
    assert process.end().code == 130


def test_ctrl_c_writes_a_snapshot_of_each_peer(two: Folder) -> None:
    process = two.start_run("--solver", "solver.prototxt", "--iterations", "100000", "--policy", "never")
    process.line(r"train [1-9]")
    process.signal(signal.SIGINT)
    ended = process.end()
    assert ended.code == 130, ended.shown
    for rank in (0, 1):
        log = (two.path / "x" / f"peer-{rank:02d}" / "caffe.log").read_text()
        assert log.splitlines()[-1].endswith("Optimization stopped early.")
        last = max(int(one) for one in re.findall(r"lenet_iter_(\d+)\.solverstate", log))
        assert (two.path / "x" / f"peer-{rank:02d}" / f"lenet_iter_{last}.solverstate").exists()


@pytest.mark.slow
def test_a_run_resumes_with_its_solver(two: Folder) -> None:
    two.run("--solver", "solver.prototxt", "--iterations", "30", "--checkpoint-every", "30", "--policy", "tau:5")
    ended = two.start("-m", "gossipx", "run", "--resume", two.path / "x", "--iterations", "60").end()
    assert ended.code == 0, ended.shown
    log = (two.path / "x" / "peer-00" / "caffe.log").read_text()
    first, second = log.split("Optimization Done.")[:2]
    assert "Iteration 40, lr" not in first and "Iteration 40, lr" in second and "Iteration 0, lr" not in second
