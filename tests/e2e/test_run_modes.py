"""``gossipx run`` with pushes, pairs and a hub over real sockets. The scenarios test their effect on the weights."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from seeds import some

from runs import TEN_LINES, Folder, Run, agree, children, differences

EVERY, ITERATIONS = 20, 240
MODES = {
    "push": ("--mode", "push"),
    "push-sum": ("--mode", "push", "--weights", "push-sum"),
    "pushpull": ("--mode", "pushpull"),
}
BRIEF = ("--policy", f"tau:{EVERY}", "--iterations", str(ITERATIONS), "--batch-size", "8", "--eval-interval", "0")


def check_exchanged(run: Run, peers: int, part: int, finish_of: float) -> None:
    """Check that each retrieval has moved ``part`` bytes, and that all hold one model in the end."""
    summary = run.summary
    kept = ("bytes_received", "retrievals", "finish_bytes")
    for received, retrievals, finish in zip(*(summary[key] for key in kept), strict=True):
        # Some are abandoned at the end.
        assert retrievals * part * 0.99 <= received <= (retrievals + 4) * part + 60_000, "models, and small messages"
        assert finish > finish_of * part * 0.99
    assert (sum(summary["failed"]), sum(summary["poisoned"]), summary["lost"]) == (0, 0, [])
    assert all(max(differences(run.model(0), run.model(rank)).values()) <= 1e-5 for rank in range(1, peers))


@pytest.mark.parametrize("mode", some(MODES, "push-sum"))
def test_four_peers_exchange_and_agree(four: Folder, mode: str) -> None:
    run = four.run(*BRIEF, *MODES[mode], *(["--blocking"] if mode != "push" else []))
    model = sum(tensor.nbytes for tensor in run.model(0).values())
    decisions = 4 * ITERATIONS // EVERY
    # Peers at different iterations pair before the period of one of them is over.
    assert decisions / 3 < sum(run.summary["retrievals"]) <= decisions * (1.5 if mode == "pushpull" else 1), run.summary
    check_exchanged(run, 4, model, finish_of=2)


def test_an_exchange_of_fragments_moves_a_part_of_the_model(three: Folder) -> None:
    """A quarter of the bytes each time, and all peers hold one model in the end."""
    often = (*BRIEF, "--policy", "tau:5", "--transport", "tcp")
    run = three.run(*often, "--fragments", "4", "--mode", "pushpull", "--outer", "momentum:0.3")
    assert min(run.summary["retrievals"]) >= 8, "each fragment twice"
    check_exchanged(run, 3, sum(tensor.nbytes for tensor in run.model(0).values()) // 4, finish_of=4)


# --- models trained in 16 bits, and sampled deltas ------------------------------------------------------


HALF = """
model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with gossipx.join(model, optimizer) as peer:
    while not all_have(peer, "mixed", peer._role.sync.retrievals > 0, range(3)):
        optimizer.zero_grad()
        (model(batch(peer).bfloat16()).float() - 1).square().mean().backward()
        optimizer.step()
tell(peer, dtype=str(model[0].weight.dtype))
"""


@pytest.mark.parametrize(
    "options",
    [
        ("--delta", "sampled", "--policy", "tau:5"),
        pytest.param(("--delta", "exact", "--policy", "tau:20", "--exchange", "waves"), marks=pytest.mark.slow),
        pytest.param(("--delta", "sampled", "--policy", "tau:5", "--mode", "pushpull"), marks=pytest.mark.slow),
    ],
    ids=["pulls", "waves", "pairs"],
)
def test_peers_in_bfloat16_agree(three: Folder, options: tuple[str, ...]) -> None:
    """This includes requests that arrive within a step, at a peer that keeps no copy of the last boundary."""
    run = three.run(*options, "--peer-timeout", "20", three.script(HALF), three.path)
    assert [three.told(rank)["dtype"] for rank in range(3)] == ["torch.bfloat16"] * 3
    summary = run.summary
    assert min(summary["retrievals"]) > 0, summary
    assert (sum(summary["poisoned"]), summary["lost"]) == (0, [])
    assert {tensor.dtype for tensor in run.model(0).values()} == {torch.bfloat16}
    assert all(max(differences(run.model(0), run.model(rank)).values()) == 0 for rank in (1, 2))


# --- topologies and schedules ---------------------------------------------------------------------


def test_a_run_over_a_file_of_ones_own_by_its_path(three: Folder) -> None:
    """And by another schedule than the file's. Every peer pulls, and the finish leaves all models equal."""
    (three.path / "mine").mkdir()
    (three.path / "mine" / "line.toml").write_text('edges = [[0, 1], [1, 2, 0.5]]\nschedule = "one-peer"\n')
    script = three.script(TEN_LINES + "with peer:\n    train(peer, model, optimizer, 30)\n")
    options = ("--topology", "mine/line.toml", "--schedule", "static", "--policy", "tau:3", "--blocking")
    run = three.run(*options, script, three.path)
    assert run.summary["lost"] == [] and min(run.summary["retrievals"]) >= 5, run.summary
    assert agree(run, 3)
    assert '/mine/line.toml"\nschedule = "static"\n' in (run.directory / "config.toml").read_text()


# --- a hub; its effect on the weights is compared in tests/papers/test_elastic.py ------------------------


OFTEN = ("--policy", "tau:10", "--batch-size", "8", "--eval-interval", "0", "--log-interval", "1")


@pytest.mark.parametrize("only", some([False, True], False))
def test_all_end_with_the_centre(three: Folder, only: bool) -> None:
    """A peer that does not wait for the centre may do many steps before it arrives, and exchanges less often."""
    hub = ("--hub", three.names[1], *(["--hub-only", "--blocking"] if only else []))
    run = three.run(*OFTEN, "--iterations", "150", *hub)
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
    process = three.start_run(*OFTEN, *options)
    process.line(rf"{three.names[0]} serve .*{three.names[1]} train .* pulls [1-9]")
    os.kill(children(process.pid)[0], signal.SIGKILL)
    ended = process.end(code=4)
    assert f"peer {three.names[0]} is lost" in ended.output
    assert "the hub, peer 0, is gone, and --hub-lost is stop" in ended.errors
