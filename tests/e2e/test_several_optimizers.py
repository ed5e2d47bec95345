"""Peers whose model has several optimizers, in a real run that is continued."""

from __future__ import annotations

import pytest
import torch
from resuming import resumed
from served_loops import Join, loop, net, plain, same, sgd
from torch import nn

from gossipx.errors import UsageError
from gossipx.optimizers import muon
from runs import TEN_LINES, Folder, agree

SCRIPT = """
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
muon = torch.optim.Muon([one for one in model.parameters() if one.ndim == 2], lr=0.01)
adamw = torch.optim.AdamW([one for one in model.parameters() if one.ndim != 2], lr=0.01)
schedule = torch.optim.lr_scheduler.LinearLR(muon)
with gossipx.join(model, [adamw, muon]) as peer:
    peer.checkpoint_part("rate", state_dict=schedule.state_dict, load_state_dict=schedule.load_state_dict)
    began = peer.iteration, [int(one["step"]) for one in adamw.state.values()], len(muon.state)
    while peer.iteration < int((FOLDER / "until").read_text()):
        (model(batch(peer)) - 1).square().mean().backward()
        for one in (muon, adamw):
            one.step()
            one.zero_grad()
        schedule.step()
tell(peer, began=began, ended=peer.iteration, steps=[int(one["step"]) for one in adamw.state.values()])
"""


@pytest.mark.fault(83)
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_beside_adamw_exchanges_and_resumes(two: Folder) -> None:
    until = two.path / "until"
    until.write_text("20")
    options = ("--policy", "tau:5", "--blocking", "--peer-timeout", "20", "--checkpoint-every", "10")
    first = two.run(*options, two.script(SCRIPT), two.path)
    assert agree(first, 2) and first.summary["iterations"] == 20 and min(first.summary["retrievals"]) >= 2
    for rank in range(2):
        assert two.told(rank) == {"began": [0, [], 0], "ended": 20, "steps": [20, 20]}
    until.write_text("30")
    again = resumed(two)
    assert agree(again, 2) and again.summary["iterations"] == 30
    for rank in range(2):
        assert two.told(rank) == {"began": [20, [20, 20], 2], "ended": 30, "steps": [30, 30]}


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_and_adamw_as_one_make_the_same_steps_on_a_server(join: Join) -> None:
    """Of a kernel and a matrix too, each in its shape."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        kernel = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 8, 2), nn.Flatten())
        return nn.Sequential(kernel, nn.Linear(24, 5), nn.Tanh(), nn.Linear(5, 2))

    model, alone = made(), made()
    with join(model, optimizer := muon(model, 0.05)):
        loop(model, optimizer, plain)
    same(model, loop(alone, muon(alone, 0.05), plain), rtol=1e-4, atol=1e-4)


# --- Scripts whose training leaves the joined optimizer, in real runs ----------------------------------


CHANGES = (
    TEN_LINES
    + """
def closure():
    other.zero_grad()
    loss = (model(batch(peer)) - 1).square().mean()
    loss.backward()
    return loss

with peer:
    train(peer, model, optimizer, 40)
    other = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)
    for _ in range(40):
        other.step(closure)
"""
)


@pytest.mark.fault(48)
def test_a_second_optimizer_is_told_of_and_ends_the_counting(two: Folder) -> None:
    run = two.run("--policy", "tau:5", "--peer-timeout", "20", two.script(CHANGES), two.path)
    lines = [line for line in run.ended.output.splitlines() if "the model changes without" in line]
    assert len(lines) == 2, run.ended.shown
    assert all("the joined optimizer's step" in one and "since iteration 40; call peer.step()" in one for one in lines)
    assert run.summary["iterations"] == 40 and agree(run, 2)


@pytest.mark.fault(48)
def test_servers_keep_their_optimizer(join: Join) -> None:
    with join(model := net(), sgd(model)) as peer:
        with pytest.raises(
            UsageError, match=r"servers make the updates, by the optimizer given to gossipx\.join: keep"
        ):
            peer.join_optimizer(sgd(model))
        peer.close()


# --- Peers with schedule-free optimizers, whose parameters are not the model that they evaluate --------


WITHOUT_A_SCHEDULE = """
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
    run = two.run("--policy", "tau:5", "--blocking", two.script(WITHOUT_A_SCHEDULE), two.path, how)
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
