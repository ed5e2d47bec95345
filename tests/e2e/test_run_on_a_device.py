"""Peers with their models on devices, started by ``gossipx run``: two on one GPU, or by torch.distributed's groups.

The same runs on a CPU show that a failure is due to the device; ``bin/gpu-check`` runs those on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from gossipx.memory import PIECE
from runs import Folder, Run, differences

STILL = """
device = os.environ["GOSSIPX_DEVICE"]
model = nn.Linear(1000, 3000, device=device)
nn.init.constant_(model.weight, float(os.environ["GOSSIPX_RANK"]))
nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
ones = torch.ones(8, 1000, device=device)


def range_of(model):
    return [float(model.weight.min()), float(model.weight.max())]


with gossipx.join(model, optimizer) as peer:
    while not all_have(peer, "mixed", peer._role.sync.retrievals >= 3, range(2)):
        optimizer.zero_grad()
        (model(ones) * 0).sum().backward()
        optimizer.step()
    before, retrievals = range_of(model), peer._role.sync.retrievals
tell(
    peer,
    before=before,
    after=range_of(model),
    retrievals=retrievals,
    device=str(model.weight.device),
    bytes=sum(parameter.nbytes for parameter in model.parameters()),
)
"""
"""Peers whose weights equal their rank and that do not train, so that only mixing changes them."""
MODES = {
    "pull": (),
    "push": ("--mode", "push", "--transport", "tcp"),
    "pushpull": ("--mode", "pushpull"),
}
CASES = [
    pytest.param("cpu", "pull"),
    *(pytest.param("cpu", mode, marks=pytest.mark.slow) for mode in ("push", "pushpull")),
    *(pytest.param("cuda:0", mode, marks=pytest.mark.cuda) for mode in MODES),
]


@pytest.mark.parametrize(("device", "mode"), CASES)
def test_two_peers_on_one_device_exchange_and_agree(two: Folder, device: str, mode: str) -> None:
    """Models consist of several pieces; the finish is a wave."""
    two.hosts.write_text("".join(f"{name} device={device}\n" for name in two.names))
    options = (*MODES[mode], "--policy", "tau:3", "--init", "own", "--peer-timeout", "20")
    run = two.run(*options, two.script(STILL), two.path)
    told = [two.told(rank) for rank in (0, 1)]
    for one in told:
        assert one["device"] == device and one["bytes"] > 2 * PIECE
        assert one["retrievals"] >= 3
        low, high = one["before"]
        assert 0 < low <= high < low + 1e-6 < 1, "no model is partly applied, and each has some of both"
        low, high = one["after"]
        assert 0 < low <= high < low + 1e-6 < 1, "nor in the finish"
    assert told[0]["after"] == pytest.approx(told[1]["after"], abs=1e-6)
    if mode == "pushpull":
        assert told[0]["after"] == pytest.approx([0.5, 0.5], abs=1e-6), "each pair keeps the sum"
    summary = run.summary
    assert (sum(summary["poisoned"]), summary["lost"]) == (0, [])
    assert min(summary["finish_bytes"]) >= told[0]["bytes"], "a whole model each"


# --- models that are sent through torch.distributed: gossipx run --transport gloo|nccl ------------------


COUNTING = """
from gossipx.transports.process_group import PairGroup

came, receive = [], PairGroup.receive


def counting(group, nbytes, deadline):
    yield from receive(group, nbytes, deadline)
    came.append(nbytes)


class OnDevice(nn.Linear):
    def forward(self, x):
        return super().forward(x.to(self.weight.device))


PairGroup.receive = counting
model = OnDevice(4, 50, device=os.environ["GOSSIPX_DEVICE"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 100)
    if peer.rank == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    train(peer, model, optimizer, 200)
tell(peer, came=came)
"""
MODEL = 1088  # bytes: 4 · 50 + 50 values, with alignment


def check_exchanged(here: Folder, run: Run, ranks: set[int]) -> None:
    """Check that these peers got models by groups, not over the connection, and agree; the others are lost."""
    assert run.summary["lost"] == [name for rank, name in enumerate(here.names) if rank not in ranks]
    assert all(here.told(rank)["came"].count(MODEL) > 50 for rank in ranks)
    assert "over sockets" not in run.ended.output + run.ended.errors
    assert max(differences(run.model(0), run.model(1)).values()) <= 1e-5


@pytest.mark.parametrize("victim", [pytest.param(-1, marks=pytest.mark.slow), 2])
def test_peers_exchange_by_gloo_to_the_end_and_one_may_die(three: Folder, victim: int) -> None:
    options = ("--transport", "gloo", "--policy", "tau:2", "--blocking", "--peer-timeout", "10")
    run = three.run(*options, three.script(COUNTING), three.path, str(victim))
    check_exchanged(three, run, {0, 1, 2} - {victim})


@pytest.mark.cuda
def test_peers_exchange_by_nccl_to_the_end(two: Folder) -> None:
    if not torch.distributed.is_nccl_available() or torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs")
    two.hosts.write_text("".join(f"{name} device=cuda:{rank}\n" for rank, name in enumerate(two.names)))
    options = ("--transport", "nccl", "--policy", "tau:2", "--blocking")
    check_exchanged(two, two.run(*options, two.script(COUNTING), two.path, "-1"), {0, 1})


@pytest.mark.skipif(
    torch.distributed.is_nccl_available() and torch.cuda.is_available(), reason="only where there is no NCCL"
)
def test_nccl_without_a_gpu_is_refused_before_anything_starts(two: Folder) -> None:
    assert two.refused("--transport", "nccl").startswith("--transport nccl: this ")
    assert not (two.path / "x").exists()
