"""``gossipx.attach``: foreign solvers and gossipx's own as peers in real processes.

Each of two peers has images of one half of the classes, so that no peer can learn the other half alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from forks.client import TESTS
from ports import places
from resuming import resumed
from solving import Made, weights
from torch import Tensor, nn

import gossipx
from gossipx.errors import UsageError
from gossipx.solver.solver import Solver
from runs import Folder, differences, one_line

NUMPY = f"""
sys.path.append({str(TESTS)!r})
import functools
import numpy as np
from numpy_solver import NumpySolver

def data(classes, seed, count=2000):
    draw = np.random.default_rng(seed)
    y = draw.choice(classes, count)
    means = np.random.default_rng(0).normal(size=(4, 6))
    return (means[y] + draw.normal(size=(count, 6)) * 0.5).astype(np.float32), y

def solver_of(rank):
    x, y = data([2 * rank, 2 * rank + 1], 1 + rank)
    return NumpySolver([(x[i:i + 20], y[i:i + 20]) for i in range(0, len(x), 20)], 6, 4, rate=0.1)

def judge(solver):
    return solver.accuracy(*data(range(4), 9))

rank = int(os.environ["GOSSIPX_RANK"])
alone = solver_of(rank)
alone.step(60)
solver = solver_of(rank)
"""
RUN = ("--policy", "tau:5", "--peer-timeout", "20", "--blocking")


TELL = """
tell(peer.peer, accuracy=judge(solver), alone=judge(alone), iterations=peer.peer.iteration, mixes=peer.peer.mixes,
     weights=[blob.data.tolist() for blob in solver.net.params["score"]])
"""
LOOPS = {
    "callbacks": """
with gossipx.attach(solver, evaluate=judge) as peer:
    solver.step(40)
    solver.step(20)
""",
    "a loop": """
del NumpySolver.add_callback
with gossipx.attach(solver, evaluate=judge) as peer:
    while solver.iter < 60:
        solver.compute()
        solver.apply_update()
        peer.step()
""",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_solver_in_numpy_gossips(two: Folder, loop: str) -> None:
    run = two.run(*RUN, two.script(NUMPY + LOOPS[loop] + TELL), two.path)
    told = [two.told(rank) for rank in (0, 1)]
    for one in told:
        assert one["alone"] < 0.55  # half of the classes
        assert one["accuracy"] > 0.9
        assert one["iterations"] == 60
        assert one["mixes"] > 5
    assert sum(run.summary["retrievals"]) > 10
    assert run.summary["consensus_accuracy"] > 0.9
    np.testing.assert_allclose(told[0]["weights"][0], told[1]["weights"][0], atol=1e-5)
    np.testing.assert_allclose(told[0]["weights"][0], run.model(0)["score[0]"].numpy(), atol=1e-6)


def test_a_solver_in_numpy_trains_by_a_parameter_server(two: Folder) -> None:
    text = """
optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
with gossipx.attach(solver, optimizer=optimizer, evaluate=judge) as peer:
    solver.step(60)
"""
    two.run(*two.training(text + TELL, "--servers", "0", "--peer-timeout", "20", start=NUMPY))
    told = [two.told(rank) for rank in (0, 1)]
    assert told[0]["weights"] == told[1]["weights"]  # the table's values, not the results of each solver's own update
    assert min(one["accuracy"] for one in told) > 0.9 and max(one["alone"] for one in told) < 0.55


PYCAFFE = """
import caffe
import numpy as np

caffe.set_mode_cpu()
rank = int(os.environ["GOSSIPX_RANK"])
(FOLDER / f"{rank}.prototxt").write_text(
    'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 snapshot_after_train: false net_param { '''
    '''layer { name: "data" type: "Input" top: "data" top: "label"
      input_param { shape { dim: 16 dim: 6 } shape { dim: 16 } } }
    layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
      inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
    layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" } } '''
)
solver = caffe.get_solver(str(FOLDER / f"{rank}.prototxt"))
means = np.random.default_rng(0).normal(size=(4, 6))

def feed(draw, classes):
    y = draw.choice(classes, 16)
    solver.net.blobs["data"].data[...] = means[y] + draw.normal(size=(16, 6)) * 0.5
    solver.net.blobs["label"].data[...] = y

def accuracy():
    draw, right = np.random.default_rng(9), 0.0
    for _ in range(50):
        feed(draw, range(4))
        solver.net.forward()
        right += (solver.net.blobs["ip"].data.argmax(1) == solver.net.blobs["label"].data).mean() / 50
    return right

with gossipx.attach(solver) as peer:
    draw = np.random.default_rng(1 + rank)
    for _ in range(60):
        feed(draw, [2 * rank, 2 * rank + 1])
        solver.step(1)
tell(peer.peer, accuracy=accuracy(), iterations=peer.peer.iteration, mixes=peer.peer.mixes,
     weights=[blob.data.tolist() for blob in solver.net.params["ip"]])
"""


def test_a_real_pycaffe_solver_gossips(two: Folder) -> None:
    pytest.importorskip("caffe", reason="pycaffe is not installed")
    two.run(*RUN, two.script(PYCAFFE), two.path)
    told = [two.told(rank) for rank in (0, 1)]
    for one in told:
        assert one["iterations"] == 60 and one["mixes"] > 5
        assert one["accuracy"] > 0.8  # four classes, of which its own data has two
    np.testing.assert_allclose(told[0]["weights"][0], told[1]["weights"][0], atol=1e-5)


OWN = """
(FOLDER / f"s{os.environ['GOSSIPX_RANK']}.prototxt").write_text(
    'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 max_iter: 40 solver_mode: CPU display: 10 snapshot: 20'
    f' snapshot_prefix: "{FOLDER}/snap"'
)
torch.manual_seed(int(os.environ["GOSSIPX_RANK"]))
rank = int(os.environ["GOSSIPX_RANK"])
x = torch.randn(400, 4)
y = (x[:, 0] * 2 + x[:, 1 + rank] > 0).long()
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
solver = gossipx.get_solver(
    FOLDER / f"s{rank}.prototxt", net=net, loss=nn.functional.cross_entropy,
    train=[(x[i:i + 40], y[i:i + 40]) for i in range(0, 400, 40)], test=None,
)
with gossipx.attach(solver) as peer:
    before = peer.peer.iteration
    solver.solve()
tell(peer.peer, before=before, iter=solver.iter, iterations=peer.peer.iteration, mixes=peer.peer.mixes)
"""


def test_gossipxs_own_solver_gossips_and_snapshots_by_itself(two: Folder) -> None:
    run = two.run(*RUN, two.script(OWN), two.path)
    for rank in (0, 1):
        told = two.told(rank)
        assert told["iter"] == told["iterations"] == 40 and told["mixes"] > 3
        for iteration in (20, 40):
            assert (two.path / f"snap_peer-{rank:02d}_iter_{iteration}.solverstate").exists()
    assert max(differences(run.model(0), run.model(1)).values()) < 1e-6
    assert "Iteration 30, loss = " in run.ended.output


def test_gossipxs_own_solver_resumes_from_a_checkpoint(two: Folder) -> None:
    script = two.script(OWN)
    again = two.script(OWN.replace("max_iter: 40", "max_iter: 20"), "half.py")
    two.run(*RUN, "--checkpoint-every", "20", again, two.path, name="half")
    (two.path / "half.py").write_text(script.read_text())  # with more iterations
    resumed(two, name=two.path / "half")
    told = two.told(0)
    assert told["before"] == 20 and told["iter"] == told["iterations"] == 40


RULES = ["momentum: 0.9", 'type: "Adam"', "clip_gradients: 0.1", "iter_size: 3", "iter_size: 2\nclip_gradients: 0.1"]


@pytest.mark.fault(46)
@pytest.mark.parametrize("text", RULES)
def test_one_worker_and_its_server_compute_what_the_solver_computes_alone(tmp_path: Path, text: str) -> None:
    """The server applies Caffe's update rule. The first gradients are below the limit."""

    def solver(name: str) -> Solver:
        losses = iter([0.001] * 3 + [1.0] * 100)
        (folder := tmp_path / name).mkdir()

        def loss(output: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(output, y) * next(losses)

        return Made(folder, text, loss=loss).solver

    hosts = tmp_path / "hosts.txt"
    hosts.write_text(f"{places(1)[0]}\n")
    served, alone = solver("served"), solver("alone")
    with gossipx.attach(served, peers=hosts, rank=0, servers="0", peer_timeout=20.0, logdir=str(tmp_path)):
        served.step(6)
    alone.step(6)
    torch.testing.assert_close(weights(served), weights(alone))


def solver_with(*values: object) -> SimpleNamespace:
    blobs = [SimpleNamespace(data=data, diff=np.zeros(2)) for data in values]
    return SimpleNamespace(net=SimpleNamespace(params={"score": blobs} if blobs else {}))


READ_ONLY = np.zeros(2)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("solver", "options", "told"),
    [
        (object(), {}, "object is not a solver: attach needs its net.params"),
        (solver_with(np.zeros(2)), {"optimizer": torch.optim.SGD}, "optimizer= is for a run with a parameter server"),
        (solver_with([1.0]), {}, "blob score[0]: its data is list"),
        (solver_with(np.zeros(2), READ_ONLY), {}, "blob score[1]: its data is read-only"),
        (solver_with(), {}, "the solver's net.params holds no blobs"),
    ],
)
def test_invalid_uses_of_attach_are_refused(solver: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(told)}"):
        gossipx.attach(solver, peers="nowhere.txt", **options)


def test_a_typo_in_a_scripts_solver_file_is_one_line(two: Folder) -> None:
    """With line and column, and exit code 2; without ``gossipx run`` too."""
    script = two.script(
        """
(FOLDER / "typo.prototxt").write_text('base_lr: 0.1\\n  lr_polycy: "fixed"\\n')
gossipx.get_solver(FOLDER / "typo.prototxt", net=nn.Linear(4, 2), loss=nn.functional.cross_entropy, train=[])
"""
    )
    told = f"{two.path}/typo.prototxt:2:3: SolverParameter has no field 'lr_polycy' (did you mean 'lr_policy'?)"
    assert two.refused(*RUN, script, two.path) == told
    assert one_line(two.start(script, two.path).end(), 2) == told
