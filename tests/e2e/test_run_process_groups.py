"""``gossipx run --transport gloo|nccl``: real peers whose models are sent through torch.distributed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runs import differences, folder

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


@pytest.mark.parametrize("victim", [pytest.param(-1, marks=pytest.mark.slow), 2])
def test_peers_exchange_by_gloo_to_the_end_and_one_may_die(tmp_path: Path, victim: int) -> None:
    with folder(tmp_path, 3) as here:
        script = here.script(COUNTING)
        options = ("--transport", "gloo", "--policy", "tau:2", "--blocking", "--peer-timeout", "10")
        run = here.run(*options, script, tmp_path, str(victim))
        lost = [here.names[victim]] if victim >= 0 else []
        assert run.summary["lost"] == lost
        for rank in {0, 1, 2} - {victim}:
            assert here.told(rank)["came"].count(MODEL) > 50, "by a group, not over the connection"
        assert "over sockets" not in run.ended.output + run.ended.errors
        assert max(differences(run.model(0), run.model(1)).values()) <= 1e-5


@pytest.mark.cuda
def test_peers_exchange_by_nccl_to_the_end(tmp_path: Path) -> None:
    if not torch.distributed.is_nccl_available() or torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs")
    with folder(tmp_path, 2) as here:
        here.hosts.write_text("".join(f"{name} device=cuda:{rank}\n" for rank, name in enumerate(here.names)))
        options = ("--transport", "nccl", "--policy", "tau:2", "--blocking")
        run = here.run(*options, here.script(COUNTING), tmp_path, "-1")
        assert run.summary["lost"] == []
        for rank in (0, 1):
            assert here.told(rank)["came"].count(MODEL) > 50, "by a group, not over the connection"
        assert "over sockets" not in run.ended.output + run.ended.errors
        assert max(differences(run.model(0), run.model(1)).values()) <= 1e-5


@pytest.mark.skipif(
    torch.distributed.is_nccl_available() and torch.cuda.is_available(), reason="only where there is no NCCL"
)
def test_nccl_without_a_gpu_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with folder(tmp_path, 2) as here:
        assert here.refused("--transport", "nccl").startswith("--transport nccl: this ")
        assert not (tmp_path / "x").exists()
