"""Two peers with their models on one device, started by ``gossipx run``: one GPU suffices to test transfers.

The same runs on a CPU show that a failure is due to the device; ``bin/gpu-check`` runs those on a GPU.
"""

from __future__ import annotations

import pytest

from gossipx.memory import PIECE
from runs import Folder

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
