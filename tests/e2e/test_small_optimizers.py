"""Optimizers with a state of 8 bits, whose packages are no extra of gossipx: tests run where they are installed."""

from __future__ import annotations

import pytest

from runs import Folder, agree

SCRIPT = """
from bitsandbytes.optim import AdamW8bit

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 2048), nn.ReLU(), nn.Linear(2048, 8), nn.Linear(8, 1))
optimizer = AdamW8bit(model.parameters(), lr=1e-3)  # tensors below 4096 values have 32 bits
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, int(sys.argv[2]))
state = optimizer.state[model[0].weight]
tell(peer, iteration=peer.iteration, kinds=sorted({str(one.dtype) for one in state.values() if hasattr(one, "dtype")}))
"""
BRIEF = ("--policy", "tau:5", "--blocking")


@pytest.mark.slow
def test_a_run_with_bitsandbytes_is_resumed(two: Folder) -> None:
    pytest.importorskip("bitsandbytes")
    script = two.script(SCRIPT)
    run = two.run(*BRIEF, "--checkpoint-every", "10", script, two.path, "10")
    assert agree(run, 2) and run.summary["agreed"]
    assert "torch.uint8" in two.told(0)["kinds"]
    ended = two.start("-m", "gossipx", "run", "--resume", run.directory, script, two.path, "20").end()
    assert ended.code == 0, ended.shown
    assert two.told(0)["iteration"] == two.told(1)["iteration"] == 20 and agree(run, 2)
    assert "torch.uint8" in two.told(0)["kinds"]
