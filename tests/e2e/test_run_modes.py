"""``gossipx run --mode``: pushes and pairs over real sockets. The scenarios test their effect on the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runs import PRELUDE, Folder, Run, differences, folder

EVERY, ITERATIONS = 20, 240
MODES = {
    "push": ("--mode", "push"),
    "push-sum": ("--mode", "push", "--weights", "push-sum"),
    "pushpull": ("--mode", "pushpull"),
}
BRIEF = ("--policy", f"tau:{EVERY}", "--iterations", str(ITERATIONS), "--batch-size", "8", "--eval-interval", "0")


@pytest.mark.parametrize(
    ("mode", "blocking"),
    [
        pytest.param("push", False, marks=pytest.mark.slow),
        ("push-sum", True),
        pytest.param("pushpull", True, marks=pytest.mark.slow),
    ],
)
def test_four_peers_exchange_and_agree(tmp_path: Path, mode: str, blocking: bool) -> None:
    with folder(tmp_path, 4) as here:
        run = here.run(*BRIEF, *MODES[mode], *(["--blocking"] if blocking else []))
    summary = run.summary
    model = sum(tensor.nbytes for tensor in run.model(0).values())
    decisions = 4 * ITERATIONS // EVERY
    mixed = sum(summary["retrievals"])
    # Peers at different iterations pair before the period of one of them is over.
    assert decisions / 3 < mixed <= decisions * (1.5 if mode == "pushpull" else 1), summary
    for received, retrievals, finish in zip(
        summary["bytes_received"], summary["retrievals"], summary["finish_bytes"], strict=True
    ):
        # Some are abandoned at the end.
        assert retrievals * model <= received <= (retrievals + 4) * model + 60_000, "models, and small messages"
        assert finish > 2 * model * 0.99
    assert (sum(summary["failed"]), sum(summary["poisoned"]), summary["lost"]) == (0, 0, [])
    assert all(max(differences(run.model(0), run.model(rank)).values()) <= 1e-5 for rank in (1, 2, 3))


def test_an_exchange_of_fragments_moves_a_part_of_the_model(tmp_path: Path) -> None:
    """A quarter of the bytes each time, and all peers hold one model in the end."""
    with folder(tmp_path, 3) as here:
        often = (*BRIEF, "--policy", "tau:5", "--transport", "tcp")
        run = here.run(*often, "--fragments", "4", "--mode", "pushpull", "--outer", "momentum:0.3")
    summary = run.summary
    quarter = sum(tensor.nbytes for tensor in run.model(0).values()) / 4
    for received, retrievals, finish in zip(
        summary["bytes_received"], summary["retrievals"], summary["finish_bytes"], strict=True
    ):
        assert retrievals >= 8, "each fragment twice"
        assert retrievals * quarter * 0.99 <= received <= (retrievals + 4) * quarter + 60_000
        assert finish > 4 * quarter * 0.99, "the finish is of the whole model"
    assert (sum(summary["failed"]), sum(summary["poisoned"]), summary["lost"]) == (0, 0, [])
    assert all(max(differences(run.model(0), run.model(rank)).values()) <= 1e-5 for rank in (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "codec", "fewer"),
    [
        ("pull", ("--codec", "3lc:residual=0.3"), 3),
        ("push", ("--codec", "int8", "--references", "0"), 3),
        ("pushpull", ("--codec", "int8+zlib", "--references", "2"), 3),
        ("pull", ("--codec", "3lc:small=100", "--mixing", "choco:gamma=0.2"), 10),
    ],
)
def test_codecs_of_models_cut_the_bytes(tmp_path: Path, mode: str, codec: tuple[str, ...], fewer: int) -> None:
    with folder(tmp_path, 3) as here:
        plain = here.run(*BRIEF, "--mode", mode, name="plain").summary
        run = here.run(*BRIEF, "--mode", mode, *codec, name="coded")
    summary = run.summary
    assert summary["codec"] == codec[1]
    each = [sum(one["bytes_received"]) / sum(one["retrievals"]) for one in (plain, summary)]
    assert each[1] < each[0] / fewer
    faults = (sum(summary["failed"]), sum(summary["poisoned"]), summary["lost"])
    assert faults == (0, 0, []), run.ended.shown
    assert summary["consensus_accuracy"] > plain["consensus_accuracy"] - 0.05
    assert all(max(differences(run.model(0), run.model(rank)).values()) <= 1e-5 for rank in (1, 2))


# --- models trained in 16 bits, and sampled deltas, in real processes -----------------------------


HALF = (
    PRELUDE
    + """
model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with gossipx.join(model, optimizer) as peer:
    while not all_have(peer, "mixed", peer._role.sync.retrievals > 0, range(3)):
        optimizer.zero_grad()
        (model(batch(peer).bfloat16()).float() - 1).square().mean().backward()
        optimizer.step()
tell(peer, dtype=str(model[0].weight.dtype))
"""
)


@pytest.mark.parametrize(
    "options",
    [
        ("--delta", "sampled", "--policy", "tau:5"),
        pytest.param(("--delta", "exact", "--policy", "tau:20", "--exchange", "waves"), marks=pytest.mark.slow),
        pytest.param(("--delta", "sampled", "--policy", "tau:5", "--mode", "pushpull"), marks=pytest.mark.slow),
    ],
    ids=["pulls", "waves", "pairs"],
)
def test_peers_in_bfloat16_agree(tmp_path: Path, options: tuple[str, ...]) -> None:
    """This includes requests that arrive within a step, at a peer that keeps no copy of the last boundary."""
    with folder(tmp_path, 3) as here:
        run = here.run(*options, "--peer-timeout", "20", here.script(HALF), here.path)
        assert [here.told(rank)["dtype"] for rank in range(3)] == ["torch.bfloat16"] * 3
    summary = run.summary
    assert min(summary["retrievals"]) > 0, summary
    assert (sum(summary["poisoned"]), summary["lost"]) == (0, [])
    assert {tensor.dtype for tensor in run.model(0).values()} == {torch.bfloat16}
    assert all(max(differences(run.model(0), run.model(rank)).values()) == 0 for rank in (1, 2))


def test_the_built_in_task_with_a_sampled_delta(tmp_path: Path) -> None:
    with folder(tmp_path, 3) as here:
        run = here.run("--delta", "sampled", "--policy", "adaptive:threshold=0.005", "--iterations", "60")
    assert sum(run.summary["retrievals"]) > 0 and run.summary["lost"] == []
    assert all(max(differences(run.model(0), run.model(rank)).values()) <= 1e-6 for rank in (1, 2))


# --- topologies and schedules ---------------------------------------------------------------------


SCRIPT = """
torch.manual_seed(int(os.environ["GOSSIPX_RANK"]))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 30)
"""


def agreed(here: Folder, size: int, *options: str | Path) -> Run:
    """Every peer of the run pulls, and the finish leaves all models equal."""
    run = here.run(*options, "--policy", "tau:3", "--blocking", here.script(SCRIPT), here.path)
    summary = run.summary
    assert summary["lost"] == [] and min(summary["retrievals"]) >= 5, summary
    for rank in range(1, size):
        assert max(differences(run.model(0), run.model(rank)).values()) < 1e-5
    return run


def test_a_run_over_a_file_of_ones_own_by_its_path(tmp_path: Path) -> None:
    """And by another schedule than the file's."""
    with folder(tmp_path, 3) as here:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "line.toml").write_text('edges = [[0, 1], [1, 2, 0.5]]\nschedule = "one-peer"\n')
        agreed(here, 3, "--topology", "mine/line.toml", "--schedule", "static")


def test_schedules_and_names_from_the_command_line(tmp_path: Path) -> None:
    with folder(tmp_path, 4) as here:
        run = agreed(here, 4, "--topology", "exponential", "--schedule", "one-peer")
        config = (run.directory / "config.toml").read_text()
        assert 'topology = "exponential"\nschedule = "one-peer"\nweights = "uniform"\n' in config
