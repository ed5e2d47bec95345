"""Peers with schedule-free optimizers, whose parameters are not the model that they evaluate."""

from __future__ import annotations

import pytest

from runs import Folder, agree

SCRIPT = """
import schedulefree

from gossipx.integrations import ddp

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01)
began = [parameter.detach().clone() for parameter in model.parameters()]
judged = []


def judge(module):
    judged.append([float(parameter.detach().sum()) for parameter in module.parameters()])
    return 0.5


join = {"own": gossipx.join, "ddp": ddp.join}[sys.argv[2]]
with join(model, optimizer, evaluate=judge) as peer:
    optimizer.train()
    while peer.iteration < 42:  # not 40: if both pull at the same time, both hold the mean
        optimizer.zero_grad()
        (model(batch(peer)) - peer.rank).square().mean().backward()  # peers' data differ
        optimizer.step()
    y = [float(parameter.detach().sum()) for parameter in model.parameters()]
    z = [float(optimizer.state[parameter]["z"].sum()) for parameter in model.parameters()]
x = [float(parameter.detach().sum()) for parameter in model.parameters()]
optimizer.eval()
after = [float(parameter.detach().sum()) for parameter in model.parameters()]
kept = [float(optimizer.state[parameter]["z"].sum()) for parameter in model.parameters()]
tell(peer, y=y, z=z, x=x, after=after, kept=kept, judged=judged, buffers=len(list(model.buffers())))
"""


@pytest.mark.parametrize("how", ["own", "ddp"])
def test_peers_end_with_one_model_to_evaluate(two: Folder, how: str) -> None:
    pytest.importorskip("schedulefree")
    run = two.run("--policy", "tau:5", "--blocking", two.script(SCRIPT), two.path, how)
    one, other = two.told(0), two.told(1)
    assert agree(run, 2) and run.summary["agreed"] and run.summary["retrievals"] == [8, 8]
    assert one["z"] != other["z"] and one["kept"] == pytest.approx(other["kept"], abs=1e-5)
    mean = [(a + b) / 2 for a, b in zip(one["z"], other["z"], strict=True)]
    assert one["kept"] == pytest.approx(mean, abs=1e-4), "z is averaged as the weights are"
    # x from y = (1 - β) z + β x, with the default β = 0.9, of the average of both peers
    y = [(a + b) / 2 for a, b in zip(one["y"], other["y"], strict=True)]
    expected = [(a - 0.1 * b) / 0.9 for a, b in zip(y, mean, strict=True)]
    for told in (one, other):
        assert told["x"] == told["after"] == told["judged"][1] == pytest.approx(expected, abs=1e-4)
        assert told["buffers"] == 0
    assert expected != pytest.approx(y, abs=1e-3), "the weights of training are others"


def test_servers_are_refused_in_one_line(two: Folder) -> None:
    pytest.importorskip("schedulefree")
    told = two.refused("--servers", "0", two.script(SCRIPT), two.path, "own")
    assert "AdamWScheduleFree cannot train on servers" in told
