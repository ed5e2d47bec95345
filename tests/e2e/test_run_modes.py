"""``gossipx run --mode``: pushes and pairs over real sockets. The scenarios test their effect on the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import differences, folder

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
