"""Caffe's solver for a torch module: the order of a step, its rules as Caffe's, pycaffe's interface, the log."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from solving import Made, batches, module, right, weights
from torch import Tensor, nn

import gossipx
from gossipx.errors import UsageError
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
    assert {name: [blob.shape for blob in blobs] for name, blobs in solver.net.params.items()} == {
        "0": [(4, 3), (4,)],
        "2": [(2, 4), (2,)],
    }
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
    assert {key for key in outputs if key[0] == "Test"} == {
        ("Test", i, name) for i in (0, 4) for name in ("accuracy", "loss")
    }
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


def test_a_blob_replaced_with_the_same_shape_is_accepted() -> None:
    given = net(fit=blob(1, 2))
    blobs = Blobs(given)
    given.params["fit"][0].data = np.array([3.0, 4.0])
    blobs.to_arena()
    assert next(blobs.parameters()).tolist() == [3, 4]


@pytest.mark.parametrize(
    "add_callback",
    [lambda: None, lambda one: None, lambda one, two, three: None, 5],
    ids=["none", "one", "three", "no function"],
)
def test_a_foreign_add_callback_is_refused_before_the_run_waits_for_peers(add_callback: object) -> None:
    solver = SimpleNamespace(net=net(fit=blob(1, 2)), add_callback=add_callback)
    with pytest.raises(UsageError, match=r"SimpleNamespace.add_callback is not pycaffe's add_callback\(on_start, on_"):
        gossipx.attach(solver, peers="nowhere.txt")
