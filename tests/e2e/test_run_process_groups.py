"""``gossipx run --transport gloo|nccl``: real peers whose models are sent through torch.distributed."""

from __future__ import annotations

import pytest
import torch

from runs import Folder, Run, differences

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
