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
    tell(peer, trains=True)
    train(peer, model, optimizer, 10)
    (FOLDER / "exchanged").write_bytes(b"")
"""
    os.mkfifo(tmp_path / "exchanged")
    with folder(tmp_path, 2) as here:
        options = ("--policy", "tau:1", "--hub", "0", "--hub-only", "--blocking")
        run = here.run(*options, here.script(script), here.path)
        assert here.told(1) == {"trains": True} and not (tmp_path / "0.json").exists(), "the hub runs no loop"
    model = sum(tensor.nbytes for tensor in run.model(0).values())
    none, retrievals = run.summary["retrievals"]
    # The first iterations of the worker may be over before the hub has joined.
    assert none == 0 < retrievals == 10 - run.summary["skipped"][1]
    assert retrievals * model <= run.summary["bytes_received"][0] <= (retrievals + 1) * model


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
