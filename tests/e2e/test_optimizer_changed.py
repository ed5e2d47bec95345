"""Scripts whose training leaves the joined optimizer, in real runs."""

from __future__ import annotations

import pytest

from runs import TEN_LINES, Folder, agree

pytestmark = pytest.mark.fault(48)
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


@pytest.mark.parametrize("updates", ["40", "5"])
def test_a_second_optimizer_is_told_of_and_ends_the_counting(two: Folder, updates: str) -> None:
    run = two.run(*BRIEF, two.script(CHANGES), two.path, "leaves", updates)
    lines = [line for line in run.ended.output.splitlines() if "the model changes without" in line]
    assert len(lines) == 2, run.ended.shown
    assert all(
        "the joined optimizer's step" in line and "since iteration 40; call peer.step()" in line for line in lines
    )
    assert run.summary["iterations"] == 40 and agree(run, 2)


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
