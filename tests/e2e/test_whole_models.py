"""The whole of a model on all peers: what exchanges do not move. Row 72 of the table of faults."""

from __future__ import annotations

import pytest

from runs import Folder

pytestmark = pytest.mark.fault(72)

SCRIPT = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 16)
        self.norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 1)
        self.register_buffer("perm", torch.randperm(16))
        self.register_buffer("mask", torch.rand(16) > 0.5)
        self.register_buffer("used", torch.zeros(16, dtype=torch.int64))

    def forward(self, x):
        return self.out(self.norm(self.linear(x))[:, self.perm] * self.mask)


torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first = model.perm.tolist(), model.mask.tolist()
with gossipx.join(model, optimizer) as peer:
    began = model.perm.tolist(), model.mask.tolist()
    if sys.argv[2] == "differ":
        model.used += peer.rank
    train(peer, model, optimizer, 20)
model.eval()
out = float(model(torch.ones(1, 4)))
tell(peer, first=first, began=began, out=out)
"""
MODES = {
    "pulls": ("--policy", "tau:5"),
    "waves": ("--policy", "tau:5", "--exchange", "waves"),
    "pairs": ("--policy", "tau:5", "--mode", "pushpull"),
    "coded": ("--policy", "tau:5", "--codec", "int8"),
    "fragments": ("--policy", "tau:5", "--fragments", "3"),
    "hub": ("--policy", "tau:5", "--hub", "0"),
    "servers": ("--servers", "0"),
}


@pytest.mark.parametrize(
    "mode", [mode if mode in ("pulls", "servers") else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES]
)
def test_integer_and_bool_buffers_are_those_of_one_peer(two: Folder, mode: str) -> None:
    """Drawn without a seed, as DDP's would be those of rank 0; BatchNorm's statistics stay local with servers."""
    run = two.run(*MODES[mode], "--peer-timeout", "20", two.script(SCRIPT), two.path, "same")
    told = two.told(0), two.told(1)
    assert told[0]["first"] != told[1]["first"]
    assert told[0]["began"] == told[1]["began"] == told[0]["first"]
    assert run.summary["agreed"] is True
    if mode != "servers":
        assert told[0]["out"] == told[1]["out"]
    assert "have no average" not in run.ended.output, run.ended.shown


def test_a_buffer_that_differs_at_the_end_is_named(two: Folder) -> None:
    """Once, and not BatchNorm's count of batches, which is each peer's own."""
    run = two.run("--policy", "tau:5", "--peer-timeout", "20", two.script(SCRIPT), two.path, "differ")
    lines = [line for line in run.ended.output.splitlines() if "have no average" in line]
    assert len(lines) == 1 and lines[0].endswith("1 tensors that have no average differ between the peers: 'used'")
    assert run.summary["agreed"] is True
