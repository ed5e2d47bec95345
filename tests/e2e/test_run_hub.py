"""``gossipx run --hub`` in real processes. Its effect on the weights is compared in tests/papers/test_elastic.py."""

from __future__ import annotations

import os
import signal

import pytest
from seeds import some

from runs import Folder, children, differences

BRIEF = ("--policy", "tau:10", "--batch-size", "8", "--eval-interval", "0", "--log-interval", "1")


@pytest.mark.parametrize("only", some([False, True], False))
def test_all_end_with_the_centre(three: Folder, only: bool) -> None:
    """A peer that does not wait for the centre may do many steps before it arrives, and exchanges less often."""
    hub = ("--hub", three.names[1], *(["--hub-only", "--blocking"] if only else []))
    run = three.run(*BRIEF, "--iterations", "150", *hub)
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


def test_an_exchange_that_reaches_a_peer_before_its_first_iteration_counts_as_training(two: Folder) -> None:
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
    os.mkfifo(two.path / "exchanged")
    options = ("--policy", "tau:1", "--hub", "0", "--hub-only", "--blocking")
    run = two.run(*options, two.script(script), two.path)
    assert two.told(1) == {"trains": True} and not (two.path / "0.json").exists(), "the hub runs no loop"
    model = sum(tensor.nbytes for tensor in run.model(0).values())
    none, retrievals = run.summary["retrievals"]
    # The first iterations of the worker may be over before the hub has joined.
    assert none == 0 < retrievals == 10 - run.summary["skipped"][1]
    assert retrievals * model <= run.summary["bytes_received"][0] <= (retrievals + 1) * model


@pytest.mark.fault(38)
def test_workers_stop_without_their_hub_if_configured(three: Folder) -> None:
    options = ("--hub", "0", "--hub-only", "--hub-lost", "stop", "--iterations", "1000", "--peer-timeout", "30")
    process = three.start_run(*BRIEF, *options)
    process.line(rf"{three.names[0]} serve .*{three.names[1]} train .* pulls [1-9]")
    os.kill(children(process.pid)[0], signal.SIGKILL)
    ended = process.end(code=4)
    assert f"peer {three.names[0]} is lost" in ended.output
    assert "the hub, peer 0, is gone, and --hub-lost is stop" in ended.errors
