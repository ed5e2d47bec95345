"""``gossipx run --hub`` in real processes. Its effect on the weights is compared in tests/papers/test_elastic.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from seeds import some

from runs import Run, children, differences, folder

BRIEF = ("--policy", "tau:10", "--batch-size", "8", "--eval-interval", "0", "--log-interval", "1")
ITERATIONS = ("--iterations", "150")


@pytest.mark.parametrize("only", some([False, True], False))
def test_all_end_with_the_centre(tmp_path: Path, only: bool) -> None:
    """A peer that does not wait for the centre may do many steps before it arrives, and exchanges less often."""
    with folder(tmp_path, 3) as here:
        hub = ("--hub", here.names[1], *(["--hub-only", "--blocking"] if only else []))
        run = here.run(*BRIEF, *ITERATIONS, *hub)
    summary, workers = run.summary, [0, 2] if only else [0, 1, 2]
    assert all(max(differences(run.model(0), run.model(rank)).values()) == 0 for rank in (1, 2))
    assert len(set(summary["test_accuracy"])) == 1
    exchanges = [summary["retrievals"][rank] for rank in workers]
    assert exchanges == [15, 15] if only else (sum(exchanges) >= 1 and max(exchanges) <= 15)
    assert summary["merged_by_hub"] == [0, pytest.approx(sum(summary["retrievals"]), abs=3), 0]
    model = sum(tensor.nbytes for tensor in run.model(0).values())
    # The hub's exchanges with itself use no connection.
    others = sum(summary["retrievals"][rank] for rank in (0, 2))
    assert others * model <= summary["bytes_received"][1] + summary["finish_bytes"][1] <= (others + 6) * model + 60_000
    if only:
        assert summary["retrievals"][1] == 0 and summary["test_accuracy_before_finish"][1] is None
    assert (summary["lost"], sum(summary["failed"])) == ([], 0)


@pytest.mark.slow
def test_a_script_need_not_mention_the_hub(tmp_path: Path) -> None:
    """If the hub only serves, ``join`` does that and exits the process: only workers run the loop below it."""
    script = """
model = nn.Linear(4, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with gossipx.join(model, optimizer) as peer:
    tell(peer, trains=True)
    train(peer, model, optimizer, 2000)
"""
    with folder(tmp_path, 3) as here:
        run = here.run(
            "--policy", "adaptive:threshold=0.001", "--hub", "0", "--hub-only", here.script(script), here.path
        )
        assert not (tmp_path / "0.json").exists() and here.told(1) == here.told(2) == {"trains": True}
    assert run.summary["merged_by_hub"][0] >= 2
    assert max(differences(run.model(1), run.model(2)).values()) == 0


def test_an_exchange_that_reaches_a_peer_before_its_first_iteration_counts_as_training(tmp_path: Path) -> None:
    """The hub's main thread returns from joining only after the worker's last exchange."""
    script = """
from gossipx.runtime.figures.reporting import Reporter

begin = Reporter.training_begins

def begin_late(reporter):
    (FOLDER / "exchanged").read_bytes()
    begin(reporter)

model = nn.Linear(4, 2500)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
if os.environ["GOSSIPX_RANK"] == "0":
    Reporter.training_begins = begin_late
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 10)
    (FOLDER / "exchanged").write_bytes(b"")
"""
    os.mkfifo(tmp_path / "exchanged")
    with folder(tmp_path, 2) as here:
        options = ("--policy", "tau:1", "--hub", "0", "--hub-only", "--blocking")
        run = here.run(*options, here.script(script), here.path)
    model = sum(tensor.nbytes for tensor in run.model(0).values())
    none, retrievals = run.summary["retrievals"]
    # The first iterations of the worker may be over before the hub has joined.
    assert none == 0 < retrievals == 10 - run.summary["skipped"][1]
    assert retrievals * model <= run.summary["bytes_received"][0] <= (retrievals + 1) * model


def test_a_worker_that_waits_does_algorithm_1_as_printed(tmp_path: Path) -> None:
    """Lines 3, 5, 6 and 8: the gradient and the elastic difference are of the same x, and then both are applied."""
    script = """
model = nn.Linear(1, 50, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
with gossipx.join(model, optimizer) as peer:
    x = centre = model.weight.detach().clone()
    v, apart, exchanges = torch.zeros_like(x), 0.0, 0
    for _ in range(30):
        optimizer.zero_grad()
        (0.5 * (model.weight - 1).square()).sum().backward()
        before = peer.mixes
        optimizer.step()
        difference = (x - centre) * (peer.mixes - before)
        v = 0.5 * v + (x - 1)
        x, centre = x - 0.1 * v - 0.5 * difference, centre + 0.25 * difference
        apart = max(apart, float((model.weight - x).detach().abs().max()))
        exchanges += peer.mixes - before
    tell(peer, apart=apart, exchanges=exchanges)
"""
    with folder(tmp_path, 2) as here:
        options = ("--policy", "tau:2", "--hub", "0", "--hub-only", "--blocking", "--alpha", "0.5", "--beta", "0.25")
        here.run(*options, here.script(script), here.path)
        told = here.told(1)
    assert told["exchanges"] >= 10  # the first may find the hub busy with the start
    assert told["apart"] < 1e-5


@pytest.mark.parametrize(
    ("lost", "code"),
    [
        pytest.param("gossip", 0, marks=pytest.mark.slow),
        pytest.param("wait", 0, marks=pytest.mark.slow),
        ("stop", 4),
    ],
)
@pytest.mark.fault(38)
def test_a_hub_that_is_killed_blocks_nobody(tmp_path: Path, lost: str, code: int) -> None:
    with folder(tmp_path, 3) as here:
        # Workers that share two cores end some seconds apart, and must wait for each other.
        options = ("--hub", "0", "--hub-only", "--hub-lost", lost, "--iterations", "1000", "--peer-timeout", "30")
        process = here.start_run(*BRIEF, *options)
        process.line(rf"{here.names[0]} serve .*{here.names[1]} train .* pulls [1-9]")
        os.kill(children(process.pid)[0], signal.SIGKILL)
        ended = process.end()
    assert ended.code == code, ended.shown
    assert "Traceback" not in ended.output + ended.errors
    assert f"peer {here.names[0]} is lost" in ended.output
    if lost == "stop":
        assert "the hub, peer 0, is gone, and --hub-lost is stop" in ended.errors
        return
    run = Run(tmp_path / "x", ended)
    assert run.summary["lost"] == [here.names[0]]
    assert all(accuracy > 0.6 for accuracy in run.summary["test_accuracy"][1:])
    # Without a centre, the final model is the mean of all.
    assert max(differences(run.model(1), run.model(2)).values()) <= 1e-5, ended.shown


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--hub", "3"), "--hub '3' is not a peer: give a rank from 0 to 2, or a name"),
        (("--hub-only",), "--hub-only needs a hub: name it with --hub, or leave --hub-only out"),
        (("--alpha", "0.2"), "--alpha needs a hub: name it with --hub, or leave --alpha out"),
        (("--hub", "0", "--alpha", "1.5"), "--alpha is 1.5: at most 1"),
        (("--hub", "0", "--beta", "4"), "--beta 4 moves the centre past a worker's model: at most 3, 1 per worker"),
        (("--hub", "0", "--mode", "push"), "--mode push is for peers that exchange with each other"),
        (("--hub", "0", "--exchange", "waves"), "--exchange waves is for peers that exchange with each other"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    with folder(tmp_path, 3) as here:
        assert told in here.refused(*BRIEF, *options)
