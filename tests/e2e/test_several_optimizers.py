"""Peers whose model has several optimizers, in a real run that is continued."""

from __future__ import annotations

import pytest
import torch
from resuming import resumed

from runs import Folder, agree

pytestmark = pytest.mark.fault(83)

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
