"""Peers whose model has several optimizers, in a real run that is continued."""

from __future__ import annotations

import pytest
import torch
from resuming import resumed

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


# --- Scripts whose training leaves the joined optimizer, in real runs ----------------------------------


BRIEF = ("--policy", "tau:5", "--peer-timeout", "20")

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
    if sys.argv[2] == "joins":
        peer.join_optimizer(other)
    for _ in range(int(sys.argv[3])):
        other.step(closure)
tell(peer, iteration=peer.iteration)
"""
)


@pytest.mark.fault(48)
@pytest.mark.parametrize("updates", ["40", "5"])
def test_a_second_optimizer_is_told_of_and_ends_the_counting(two: Folder, updates: str) -> None:
    run = two.run(*BRIEF, two.script(CHANGES), two.path, "leaves", updates)
    lines = [line for line in run.ended.output.splitlines() if "the model changes without" in line]
    assert len(lines) == 2, run.ended.shown
    assert all(
        "the joined optimizer's step" in line and "since iteration 40; call peer.step()" in line for line in lines
    )
    assert run.summary["iterations"] == 40 and agree(run, 2)


@pytest.mark.fault(48)
def test_servers_keep_their_optimizer(two: Folder) -> None:
    script = two.script(
        TEN_LINES
        + """
with peer:
    train(peer, model, optimizer, 3)
    try:
        peer.join_optimizer(torch.optim.Adam(model.parameters()))
    except gossipx.errors.UsageError as error:
        tell(peer, told=str(error))
"""
    )
    two.run("--servers", "0", "--peer-timeout", "20", script, two.path)
    told = "servers make the updates, by the optimizer given to gossipx.join: keep that one"
    assert two.told(0) == two.told(1) == {"told": told}
