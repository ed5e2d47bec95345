"""Caffe's solver for a torch module: steps as Caffe's, pycaffe's interface, the log, snapshots, signals, and errors."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_disks import SmallDisk
from solving import BASICS, Made, batches, module, right, weights
from torch import Tensor, nn

import gossipx
from gossipx.errors import GossipxError, UsageError
from gossipx.launch.loops.attach import Blobs
from gossipx.solver.optimizers import TYPES
from gossipx.solver.prototxt import solver_from_text
from gossipx.solver.rates import learning_rate
from gossipx.solver.solver import Solver

# --- a step -------------------------------------------------------------------------------------------


def test_the_order_of_a_step(tmp_path: Path):
    """Clear, test, on_start, iter_size passes, display, on_gradients_ready, update, snapshot."""
    seen: list[str] = []

    def loss(output: Tensor, y: Tensor) -> Tensor:
        grads = [one.grad is not None and bool(one.grad.any()) for one in solver.net.module.parameters()]
        seen.append(("train" if output.requires_grad else "test") + (" on gradients" if any(grads) else ""))
        return nn.functional.cross_entropy(output, y)

    made = Made(
        tmp_path,
        f'iter_size: 2\ndisplay: 1\ntest_iter: 1\ntest_interval: 1\nsnapshot: 1\nsnapshot_prefix: "{tmp_path}/s"',
        test=batches(),
        loss=loss,
    )
    solver = made.solver
    before = weights(solver)
    solver.add_callback(
        lambda: seen.append(f"on_start {solver.iter}"),
        lambda: seen.append(f"ready {solver.iter} {torch.equal(weights(solver), before)}"),
    )
    solver.step(2)
    one = ["test", "on_start {}", "train", "train on gradients", "ready {}"]
    assert seen[:5] == [*one[:1], "on_start 0", *one[2:4], "ready 0 True"]
    assert seen[5:] == [*one[:1], "on_start 1", *one[2:4], "ready 1 False"]
    told = [re.sub(r" [\d.]+( \(.*)?$| /.*", "", line) for line in made.lines]
    assert told[:8] == [
        "Iteration 0, Testing net (#0)",
        "    Test net output #0: loss =",
        "Iteration 0, loss =",
        "    Train net output #0: loss =",
        "Iteration 0, lr =",
        "Snapshotting to safetensors file",
        "Snapshotting solver state to safetensors file",
        "Iteration 1, Testing net (#0)",
    ]


def test_batches_restart_and_each_is_used(tmp_path: Path):
    seen: list[float] = []
    pairs = [(torch.full((2, 3), float(number)), torch.tensor([0, 1])) for number in range(3)]

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return output.sum() * 0

    made = Made(tmp_path, train=pairs, loss=loss)
    made.solver.net.module.register_forward_pre_hook(lambda _, given: seen.append(float(given[0][0, 0])))
    made.solver.step(7)
    assert seen == [0, 1, 2, 0, 1, 2, 0]


def test_displayed_loss_is_the_mean_of_average_loss_iterations(tmp_path: Path):
    losses = [5.0, 1.0, 3.0, 8.0, 2.0]
    pairs = [(torch.zeros(1, 3), torch.tensor(value)) for value in losses]

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return y + 0 * output.sum()

    made = Made(tmp_path, "average_loss: 3\ndisplay: 1", train=pairs, loss=loss)
    made.solver.step(5)
    told = [float(line.split("loss = ")[1]) for line in made.lines if re.match(r"Iteration \d+, loss", line)]
    assert told == pytest.approx([5, 3, 3, 4, 13 / 3])


def test_solve_ends_as_caffe_ends(tmp_path: Path):
    text = f'display: 3\ntest_iter: 2\ntest_interval: 3\nsnapshot_prefix: "{tmp_path}/s"'
    made = Made(tmp_path, text, test=batches(2), scores={"accuracy": right})
    made.solver.solve()
    assert made.solver.iter == 6
    assert made.lines[:2] == ["Solving Sequential", "Learning Rate Policy: fixed"]
    assert [line.split(",")[0] for line in made.lines if "Testing" in line] == [f"Iteration {i}" for i in (0, 3, 6)]
    assert made.lines[-1] == "Optimization Done."
    assert (tmp_path / "s_iter_6.solverstate").exists()
    assert (tmp_path / "s_iter_6.safetensors").exists()
    iteration, (means,) = made.solver.results
    assert iteration == 6
    assert means["accuracy"] == np.mean([float(right(made.solver.net.module(x), y)) for x, y in batches(2)])


def test_modes_and_gradients_of_passes(tmp_path: Path):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net[1].eval()  # frozen on purpose: it stays so
    made = Made(tmp_path, "test_iter: 1\ntest_interval: 1", net=net, test=batches())
    modes: list[tuple[bool, bool]] = []
    net.register_forward_hook(lambda *_: modes.append((net.training, net[1].training)))
    made.solver.step(1)
    assert modes == [(False, False), (True, False)]
    assert net.training


# --- update rules and rates ---------------------------------------------------------------------------


@pytest.mark.parametrize("type_", TYPES)
def test_an_update_leaves_its_gradient_as_it_is(type_: str):
    """Servers may hold it elsewhere."""
    weights = nn.Parameter(torch.randn(4, 3))
    weights.grad = torch.randn(4, 3)
    before = weights.grad.clone()
    TYPES[type_]([weights], lr=0.1, momentum=0.9, weight_decay=0.01).step()
    assert torch.equal(weights.grad, before)


def test_an_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="nesterov"):
        TYPES["SGD"]([nn.Parameter(torch.ones(1))], nesterov=True)


def test_rates_far_out_are_numbers():
    text = 'base_lr: 0.1 gamma: -1 stepsize: 1000000 power: 0.5 max_iter: 10 lr_policy: "{}"'
    assert learning_rate(solver_from_text(text.format("sigmoid").replace("-1", "1"), Path("s")), 0) == 0.0
    assert learning_rate(solver_from_text(text.format("poly"), Path("s")), 11) == 0.0


CAFFE: dict[str, Any] = json.loads((Path(__file__).parent.parent / "caffe_steps.json").read_text())
"""Results of BVLC Caffe 1.0.0: the weights and rates of 12 updates in each of 18 cases."""


@pytest.mark.parametrize("case", CAFFE["cases"], ids=lambda case: case["name"])
def test_steps_are_those_of_caffe_itself(case: dict[str, Any]) -> None:
    """Sequences of clipping, scaling, decay, multipliers, rates and updates, recorded from pycaffe's apply_update."""
    net, log = nn.Linear(2, 3), io.StringIO()
    solver = Solver(
        solver_from_text(case["solver"] + " solver_mode: CPU"),
        net=net,
        loss=nn.functional.mse_loss,
        train=[],
        lr_mult=dict(zip(("weight", "bias"), case["lr_mult"], strict=True)),
        decay_mult=dict(zip(("weight", "bias"), case["decay_mult"], strict=True)),
        stream=log,
    )
    blobs = solver.net.params["Linear"]
    for blob, start in zip(blobs, CAFFE["start"], strict=True):
        blob.data.reshape(-1)[:] = start
    for gradients, rate, expected in zip(CAFFE["gradients"], case["lr"], case["weights"], strict=True):
        for blob, gradient in zip(blobs, gradients, strict=True):
            blob.diff.reshape(-1)[:] = gradient
        assert solver.lr == pytest.approx(rate, rel=1e-5)  # Caffe's are of 32 bits
        solver.apply_update()
        for blob, of_caffe in zip(blobs, expected, strict=True):
            off = np.abs(blob.data.reshape(-1) - of_caffe) / (np.abs(of_caffe) + 0.01)
            assert off.max() < 1e-4
    clipped = "clip_gradients" in case["solver"]
    assert (
        bool(re.search(r"Gradient clipping: .* \(L2 norm [\d.]+ > [\d.]+\) by scale factor", log.getvalue())) == clipped
    )


# --- pycaffe's surface --------------------------------------------------------------------------------


def test_blobs_are_the_weights_themselves(tmp_path: Path):
    solver = Made(tmp_path).solver
    shapes = {name: [blob.shape for blob in blobs] for name, blobs in solver.net.params.items()}
    assert shapes == {"0": [(4, 3), (4,)], "2": [(2, 4), (2,)]}
    solver.net.params["0"][0].data[...] = 0.5
    assert bool((solver.net.module[0].weight == 0.5).all())
    assert not solver.net.params["0"][0].diff.any()
    assert solver.net.forward().keys() == {"loss"}
    solver.net.backward()
    assert solver.net.params["0"][0].diff.any()
    assert solver.test_nets == []


def test_a_gradient_array_stays_valid(tmp_path: Path):
    """As in pycaffe, gradients are summed and cleared in place."""
    solver = Made(tmp_path).solver
    held = solver.net.params["0"][0].diff
    solver.net.forward()
    solver.net.backward()
    first = held.copy()
    assert first.any()
    solver.net.clear_param_diffs()
    assert not held.any()
    solver.step(2)
    np.testing.assert_array_equal(held, solver.net.module[0].weight.grad.numpy())
    assert held.any()
    held[...] = 1
    before = solver.net.params["0"][0].data.copy()
    solver.apply_update()
    np.testing.assert_allclose(solver.net.params["0"][0].data, before - 0.1, rtol=1e-6)


@pytest.mark.parametrize(
    ("net", "names", "called"),
    [(module(), ["0", "2"], "Sequential"), (nn.Linear(3, 2), ["Linear"], "Linear")],
    ids=["layers", "one layer"],
)
def test_a_compiled_net_has_the_names_of_the_plain_one(tmp_path: Path, net: nn.Module, names: list[str], called: str):
    solver = Made(tmp_path, net=torch.compile(net, backend="eager")).solver
    assert (list(solver.net.params), solver.net.name) == (names, called)


def test_copied_blobs_are_synchronised_in_both_directions(tmp_path: Path):
    """numpy has no bfloat16, which stands for any memory that it cannot access."""
    net = nn.Linear(3, 2).bfloat16()
    solver = Made(tmp_path, net=net, train=[(x.bfloat16(), y) for x, y in batches()]).solver
    blob = solver.net.params["Linear"][0]
    seen = blob.data
    assert blob.data is seen  # nothing is newer
    seen[...] = 0.25
    solver.step(1)
    moved = blob.data
    np.testing.assert_array_equal(moved, net.weight.detach().float().numpy())
    assert abs(float(moved.mean()) - 0.25) < 0.1  # trained from what was written
    assert not np.array_equal(moved, seen)


# --- the log ------------------------------------------------------------------------------------------


def test_caffes_log_parser_reads_it(tmp_path: Path):
    """The patterns are those of Caffe's tools/extra/parse_log.py and extract_seconds.py."""
    text = (
        'base_lr: 0.1 lr_policy: "step" gamma: 0.5 stepsize: 4 max_iter: 6 solver_mode: CPU'
        " display: 2 test_iter: 1 test_interval: 4 snapshot_after_train: false"
    )
    made = Made(tmp_path, text, basics="", test=batches(), scores={"accuracy": right})
    made.solver.solve()
    lines = made.stream.getvalue().splitlines()
    rates: dict[int, float] = {}
    outputs: dict[tuple[str, int, str], float] = {}
    iteration = -1
    for line in lines:
        moment = line.split()
        assert 1 <= int(moment[0][1:3]) <= 12
        assert 1 <= int(moment[0][3:]) <= 31
        assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{6}", moment[1])
        if found := re.search(r"Iteration (\d+)", line):
            iteration = int(found.group(1))
        if found := re.search(r"lr = ([-+]?[0-9]*\.?[0-9]+([eE]?[-+]?[0-9]+)?)", line):
            rates[iteration] = float(found.group(1))
        for kind in ("Train", "Test"):
            if found := re.search(kind + r" net output #(\d+): (\S+) = ([\.\deE+-]+)", line):
                outputs[kind, iteration, found.group(2)] = float(found.group(3))
    assert "] Solving " in lines[0]  # where its clock begins
    assert rates == {0: 0.1, 2: 0.1, 4: 0.05}
    tested = {key[1:] for key in outputs if key[0] == "Test"}
    assert tested == {(iteration, name) for iteration in (0, 4) for name in ("accuracy", "loss")}
    assert {key[1] for key in outputs if key[0] == "Train"} == {0, 2, 4}


# --- ``gossipx.attach`` with foreign solvers: their blobs as a module's parameters, and the checks of bl


def blob(*values: float) -> SimpleNamespace:
    return SimpleNamespace(data=np.array(values, float), diff=np.zeros(len(values)))


def net(**layers: SimpleNamespace) -> Any:
    return SimpleNamespace(params={layer: [one] for layer, one in layers.items()})


def test_each_blob_has_a_unique_name_and_position() -> None:
    """Parameter names have no dots, but layer names may."""
    names = ["a.b", "a_b", "a%2Eb", "a.b[0]", "inception_3a/1x1"]
    given = net(**{name: blob(float(number)) for number, name in enumerate(names)})
    blobs = Blobs(given)
    assert [name for name, _ in blobs.named_parameters()] == [
        "a%2Eb[0]", "a_b[0]", "a%252Eb[0]", "a%2Eb[0][0]", "inception_3a/1x1[0]"
    ]  # fmt: skip
    for number, parameter in enumerate(blobs.parameters()):
        assert parameter.tolist() == [number]
        parameter.data += 10
    blobs.to_solver()
    assert [float(given.params[name][0].data[0]) for name in names] == [10, 11, 12, 13, 14]
    given.params["a.b"][0].data = np.array([3.0])  # replaced with another array of this shape
    blobs.to_arena()
    assert next(blobs.parameters()).tolist() == [3]


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ("data", np.zeros(1), "blob fit[0]: its data is of shape [1], but its data had shape [2] when it was"),
        ("data", [0.0, 0.0], "blob fit[0]: its data is list, but its data had shape [2]"),
        ("diff", np.zeros((2, 1)), "blob fit[0]: its diff is of shape [2, 1], but its data had shape [2]"),
    ],
)
@pytest.mark.parametrize("copy", [Blobs.to_solver, Blobs.to_arena])
def test_a_blob_replaced_with_another_shape_is_refused(
    part: str, value: object, told: str, copy: Callable[[Blobs], None]
) -> None:
    """numpy would broadcast a single value."""
    given = net(fit=blob(1, 2))
    blobs = Blobs(given)
    setattr(given.params["fit"][0], part, value)
    with pytest.raises(UsageError, match=re.escape(told)):
        list(blobs.gradients())
        copy(blobs)


@pytest.mark.parametrize(
    "add_callback",
    [lambda: None, lambda one: None, lambda one, two, three: None, 5],
    ids=["none", "one", "three", "no function"],
)
def test_a_foreign_add_callback_is_refused_before_the_run_waits_for_peers(add_callback: object) -> None:
    solver = SimpleNamespace(net=net(fit=blob(1, 2)), add_callback=add_callback)
    with pytest.raises(UsageError, match=r"SimpleNamespace.add_callback is not pycaffe's add_callback\(on_start, on_"):
        gossipx.attach(solver, peers="nowhere.txt")


# --- snapshots, signals and errors ------------------------------------------------------------------


# --- snapshots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", ["SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam"])
def test_a_restored_solver_continues_as_if_it_had_never_stopped(tmp_path: Path, type_: str):
    momentum = "" if type_ in ("AdaGrad", "RMSProp") else "momentum: 0.9"
    text = f'type: "{type_}"\n{momentum}\nweight_decay: 0.01\nsnapshot: 3\nsnapshot_prefix: "{tmp_path}/s"'
    whole = Made(tmp_path, text).solver
    whole.step(6)
    rest = Made(tmp_path, text, net=module(9), train=batches()[3:] + batches()[:3]).solver
    rest.restore(tmp_path / "s_iter_3.solverstate")
    assert rest.iter == 3
    rest.step(3)
    assert torch.equal(weights(rest), weights(whole))


@pytest.mark.fault(57, 28)
def test_a_full_disk_costs_snapshots_and_lines_but_no_iteration(
    small_disk: SmallDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    prefix = small_disk.path / "s"
    text = f'snapshot: 2\ndisplay: 1\nsnapshot_prefix: "{prefix}"'
    (small_disk.path / "log").write_text("x" * 4096)  # a page, whose end has no room
    with (small_disk.path / "log").open("a", buffering=1) as stream:
        solver = Made(tmp_path, text, stream=stream).solver
        small_disk.fill()
        with pytest.raises(GossipxError, match=r"s_iter_6\.safetensors: it cannot be written"):
            solver.solve()  # the last one is lost: this ends the process with exit code 1
        assert solver.iter == 6
        small_disk.free()
        solver.step(2)
    assert [path.name for path in sorted(small_disk.path.glob("s_*.solverstate"))] == ["s_iter_8.solverstate"]
    assert "] Iteration 7, loss" in (small_disk.path / "log").read_text()
    told = [re.search(r"\w+: (?=.* cannot be written)", text) for text in caplog.messages]
    assert [one and one[0] for one in told] == ["log: ", "safetensors: ", "safetensors: ", "safetensors: "]
    assert "Logging error" not in capsys.readouterr().err


def test_a_failed_restore_changes_nothing(tmp_path: Path):
    made = Made(tmp_path, f'snapshot_prefix: "{tmp_path}/s"')
    state = made.solver.snapshot()
    other = Made(tmp_path, 'type: "Adam"').solver
    before = weights(other)
    wider = Made(tmp_path, net=nn.Linear(3, 5)).solver
    (tmp_path / "junk.solverstate").write_bytes(b"\x0a\x03junk")
    weight_file = state.with_suffix(".safetensors")
    for solver, file, told in (
        (other, state, "it belongs to a solver of type SGD, and this one is Adam"),
        (wider, state, "none of its tensors belongs to this net"),
        (other, tmp_path / "none.solverstate", "it cannot be read"),
        (other, tmp_path / "junk.solverstate", "Caffe's binary files are not supported"),
        (other, weight_file, "not the state of a solver"),
    ):
        with pytest.raises(UsageError, match=f"^{re.escape(str(file))}: .*{re.escape(told)}|{re.escape(told)}"):
            solver.restore(file)
    weight_file.unlink()
    with pytest.raises(UsageError, match="it cannot be read"):
        Made(tmp_path).solver.restore(state)
    assert torch.equal(weights(other), before)
    assert other.iter == 0


def test_finetuning_takes_weights_by_name(tmp_path: Path):
    first = Made(tmp_path, f'snapshot_prefix: "{tmp_path}/s"').solver
    first.step(2)
    first.snapshot()
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Linear(2, 2))
    tuned = Made(tmp_path, f'weights: "{tmp_path}/s_iter_2.safetensors"', net=net).solver
    assert torch.equal(weights(tuned)[: len(weights(first))], weights(first))
    with pytest.raises(UsageError, match=r"'0.bias' is \[4\] there, and \[5\] here"):
        Made(tmp_path, f'weights: "{tmp_path}/s_iter_2.safetensors"', net=nn.Sequential(nn.Linear(3, 5)))


@pytest.mark.parametrize(
    ("given", "stem"), [("", "solver"), ("{}/", "solver"), ("{}", "solver"), ("{}/named", "named")]
)
def test_the_path_of_snapshots(tmp_path: Path, given: str, stem: str):
    prefix = given.format(tmp_path)
    made = Made(tmp_path, f'snapshot_prefix: "{prefix}"' if given else "")
    assert made.solver.snapshot() == tmp_path / f"{stem}_iter_0.solverstate"


@pytest.mark.parametrize("text", ["snapshot: 1 snapshot_after_train: false", ""], ids=["now and then", "at the end"])
def test_unwritable_snapshots_are_reported_before_training(tmp_path: Path, text: str):
    with pytest.raises(UsageError, match=r"solver\.prototxt:6:1: snapshot_prefix: snapshots cannot be written") as told:
        Made(tmp_path, f'{text}\nsnapshot_prefix: "{tmp_path}/none/s"').solver.solve()
    assert told.value.__suppress_context__  # what the system said is in the line
    Made(tmp_path, f'snapshot_after_train: false\nsnapshot_prefix: "{tmp_path}/none/s"').solver.solve()
    Made(tmp_path, f'snapshot_prefix: "{tmp_path}/none/s"').solver.step(1)  # which writes none


def test_peers_that_probe_one_prefix_use_separate_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two peers probe at the same time, and leave no file."""
    tried: list[str] = []
    make = tempfile.NamedTemporaryFile

    def twice(**given: Any) -> Any:
        if not tried:
            tried.append("other")
            Made(tmp_path, f'snapshot: 9\nsnapshot_prefix: "{tmp_path}/s"')
        made = make(**given)
        tried.append(made.name)
        return made

    others = tmp_path / "s_iter_0.tempfile"
    others.touch()
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", twice)
    Made(tmp_path, f'snapshot: 9\nsnapshot_prefix: "{tmp_path}/s"')
    assert len(set(tried)) == 3
    assert {file.name for file in tmp_path.iterdir()} == {"solver.prototxt", others.name}


# --- signals ------------------------------------------------------------------------------------------


def send(number: int, times: int = 1, at: int = 2) -> Callable[[Solver], None]:
    def arm(solver: Solver) -> None:
        def ready() -> None:
            if solver.iter == at:
                for _ in range(times):
                    os.kill(os.getpid(), number)

        solver.add_callback(lambda: None, ready)

    return arm


@pytest.mark.parametrize("times", [1, 2])
def test_sigint_stops_after_the_iteration_and_a_snapshot_and_a_second_one_at_once(tmp_path: Path, times: int):
    made, before = Made(tmp_path, f'snapshot_prefix: "{tmp_path}/s"'), signal.getsignal(signal.SIGINT)
    send(signal.SIGINT, times)(made.solver)
    with pytest.raises(KeyboardInterrupt):
        made.solver.solve()
    assert made.solver.iter == (3 if times == 1 else 2)
    assert [path.name for path in tmp_path.glob("s_iter*.solverstate")] == ["s_iter_3.solverstate"] * (times == 1)
    assert (made.lines[-1] == "Optimization stopped early.") == (times == 1)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_test_after_a_stop_is_not_interrupted(tmp_path: Path):
    """The request by SIGINT is cleared when it has been handled."""
    text = f'test_iter: 1\ntest_interval: 100\nsnapshot_prefix: "{tmp_path}/s"'
    made = Made(tmp_path, text, test=batches())
    send(signal.SIGINT)(made.solver)
    with pytest.raises(KeyboardInterrupt):
        made.solver.solve()
    told = len(made.lines)
    with contextlib.suppress(KeyboardInterrupt):  # which would end the tests, too
        made.solver.test()
    assert made.solver.results[1][0].keys() == {"loss"}
    assert made.solver.results[0] == 3
    assert not [line for line in made.lines[told:] if "Snapshotting" in line]


def test_a_sigint_after_the_last_check_is_not_lost(tmp_path: Path):
    """It arrives during the last snapshot, which is completed; code after the solver does not run."""
    solver = Made(tmp_path, f'snapshot_prefix: "{tmp_path}/s"').solver
    solver.settle = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        solver.solve()
    assert solver.iter == 6
    assert (tmp_path / "s_iter_6.solverstate").exists()


def test_sighup_requests_a_snapshot_and_training_continues(tmp_path: Path):
    made = Made(tmp_path, f'snapshot_prefix: "{tmp_path}/s"\nsnapshot_after_train: false')
    send(signal.SIGHUP)(made.solver)
    made.solver.solve()
    assert made.solver.iter == 6
    assert [file.name for file in sorted(tmp_path.glob("s_iter*.solverstate"))] == ["s_iter_3.solverstate"]


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('type: "Adamm"', "5:1: type: unknown type 'Adamm' (did you mean 'Adam'?)"),
        ("iter_size: 0", "5:1: iter_size: 0 is less than 1"),
        ("momentum: -0.5", "5:1: momentum: -0.5 is less than 0"),
        ("momentum: nan", "5:1: momentum: nan is less than 0"),
        ('type: "AdaGrad" momentum: 0.9', "5:17: momentum: AdaGrad does not use it: leave it out"),
        ('type: "RMSProp" rms_decay: 1', "5:17: rms_decay: 1 is not in [0, 1)"),
        ('regularization_type: "L3"', "5:1: regularization_type: unknown regularization_type 'L3'"),
        ("test_iter: 5 test_interval: 1", "5:1: test_iter: it is given 1 times, once per test net, and test= has 0"),
        ('weights: "none.safetensors"', "5:1: weights: there is no file 'none.safetensors'"),
        ('weights: ""', "5:1: weights: there is no file ''"),
    ],
)
def test_invalid_parameters_are_reported_with_their_position(tmp_path: Path, text: str, told: str):
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path}/solver.prototxt:{told}")):
        Made(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_iter: 5 base_lr: 1", "lr_policy: it is missing: one of fixed, step"),
        ('max_iter: 5 lr_policy: "fixed"', "base_lr: it is missing"),
        ('base_lr: 1 max_iter: 5 lr_policy: "step" gamma: 0.1', 'stepsize: it is missing, and lr_policy: "step" needs'),
        ('base_lr: 1 lr_policy: "step" gamma: 0.1 stepsize: 0', "stepsize: 0 is less than 1"),
        ('base_lr: 1 lr_policy: "multistep" gamma: 1 stepvalue: [5, 3]', "stepvalue: must be in ascending order: 5, 3"),
        ('base_lr: 1 lr_policy: "poly" power: 1', 'max_iter: it is missing, and lr_policy: "poly" needs it'),
        ('base_lr: 1 lr_policy: "poly" power: 1 max_iter: 0', ":1:39: max_iter: 0 is less than 1"),
        ('base_lr: 1 lr_policy: "poly" power: -2 max_iter: 5', ":1:30: power: -2 is less than 0"),
    ],
)
def test_invalid_rates_are_reported(tmp_path: Path, text: str, told: str):
    with pytest.raises(UsageError, match=re.escape(told)):
        Made(tmp_path, text, basics="")


def test_invalid_arguments_are_reported(tmp_path: Path):
    with pytest.raises(UsageError, match="test= has no batch, or cannot be iterated again"):
        Made(tmp_path, "test_iter: 1\ntest_interval: 1", test=iter(())).solver.test()
    with pytest.raises(UsageError, match="train= has no batch, or cannot be iterated again"):
        Made(tmp_path, train=iter(batches())).solver.step(5)
    with pytest.raises(UsageError, match=r"train= gives Tensor, and a batch is a pair \(x, y\)"):
        Made(tmp_path, train=[torch.zeros(4, 3)]).solver.step(1)
    with pytest.raises(UsageError, match=r"the loss is \[8\], and must be a tensor of one number"):
        Made(tmp_path, loss=lambda output, y: output[:, 0]).solver.step(1)
    with pytest.raises(UsageError, match=r"lr_mult: '\*.bais' matches none of the parameters: 0.weight, 0.bias"):
        Made(tmp_path, lr_mult={"*.bais": 2})
    with pytest.raises(UsageError, match="train= is of type int, and must be batches"):
        Made(tmp_path, train=5)
    with pytest.raises(UsageError, match="net= has no trained parameters"):
        Made(tmp_path, net=module().requires_grad_(False))
    with pytest.raises(UsageError, match="net= is of type str, and must be a torch module"):
        Made(tmp_path, net="lenet")
    with pytest.raises(UsageError, match=r"loss= gives a tensor without a gradient: compute it from module\(x\)"):
        Made(tmp_path, loss=lambda output, y: output.detach().sum()).solver.step(1)
    with pytest.raises(UsageError, match="scores= has a score 'loss'"):
        Made(tmp_path, scores={"loss": right})


@pytest.mark.parametrize(
    ("score", "given"),
    [
        (lambda output, y: output, r"a tensor of \[8, 2\]"),
        (lambda output, y: None, "NoneType"),
        (lambda output, y: output.numpy(), "ndarray"),
    ],
)
def test_a_score_that_is_not_one_number_is_refused(tmp_path: Path, score: Callable[..., object], given: str):
    made = Made(tmp_path, "test_iter: 1\ntest_interval: 1", test=batches(), scores={"mine": score})
    with pytest.raises(UsageError, match=rf"scores\['mine'\] gives {given}, and must give one number"):
        made.solver.test()


def test_batches_that_can_be_iterated_only_once_give_a_warning(tmp_path: Path):
    """One warning per source, with its name; it is no error, because a generator may be endless."""
    both = {"easy": batches(), "hard": iter(batches())}
    made = Made(tmp_path, "test_iter: [1, 1]\ntest_interval: 3", train=(one for one in batches() * 9), test=both)
    made.solver.solve()
    told = [line.split(" can be")[0] for line in made.lines if "can be iterated only once" in line]
    assert told == ["train=", "test={'hard'}"]
    assert made.solver.iter == 6


def test_multipliers_of_single_parameters(tmp_path: Path):
    made = Made(tmp_path, lr_mult={"*.bias": 2, "0.weight": 0})
    factors = {
        tuple(one.shape): group["lr_mult"] for group in made.solver.optimizer.param_groups for one in group["params"]
    }
    assert factors == {(4, 3): 0, (4,): 2, (2, 4): 1, (2,): 2}


def test_several_test_nets(tmp_path: Path):
    both = {"easy": batches(1), "hard": batches(2, seed=3)}
    made = Made(tmp_path, "test_iter: 1\ntest_iter: 2\ntest_interval: 2", test=both)
    assert [sorted(means) for means in made.solver.test()] == [["loss"], ["loss"]]
    assert [line for line in made.lines if "Testing" in line] == [f"Iteration 0, Testing net (#{n})" for n in (0, 1)]


ON_GPU = BASICS.replace("solver_mode: CPU\n", "")  # GPU is Caffe's default


def test_without_a_gpu_the_solver_warns_and_trains_on_the_cpu(tmp_path: Path):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    made = Made(tmp_path, basics=ON_GPU)
    assert re.match(r"W\d{4} .*\] solver_mode: GPU: no CUDA device found", made.stream.getvalue())


@pytest.mark.cuda
def test_on_a_gpu_the_net_is_moved_there_and_blobs_follow(tmp_path: Path):
    net = module()
    solver = Made(tmp_path, basics=ON_GPU, net=net).solver
    assert {one.device.type for one in net.parameters()} == {"cuda"}
    solver.net.params["0"][0].data[...] = 0.25
    solver.step(1)
    moved = solver.net.params["0"][0].data
    np.testing.assert_array_equal(moved, net[0].weight.detach().cpu().numpy())
    assert 0 < abs(float(moved.mean()) - 0.25) < 0.1
