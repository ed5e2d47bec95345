"""The built-in tasks and models besides LeNet on Fashion-MNIST, by ``gossipx run`` in real processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runs import Folder, agree, folder


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Folder]:
    """Provide a folder for two peers."""
    with folder(tmp_path, 2) as made:
        yield made


def test_the_figure_of_text_is_its_loss(two: Folder) -> None:
    options = ("--task", "text", "--partition", "contiguous", "--policy", "tau:5", "--blocking")
    run = two.run(*options, "--iterations", "20", "--eval-interval", "10")
    summary = run.summary
    assert (summary["task"], summary["model"], summary["partition"]) == ("text", "transformer", "contiguous")
    assert summary["retrievals"] == [4, 4] and agree(run, 2)
    assert summary["test_accuracy"] == summary["test_accuracy_before_finish"] == [None, None]
    assert summary["consensus_accuracy"] is None
    assert len(set(summary["test_loss_before_finish"])) == 2
    for when in ("", "_before_finish"):
        in_bits = [one / math.log(2) for one in summary[f"test_loss{when}"]]
        assert summary[f"test_bits_per_character{when}"] == pytest.approx(in_bits)
    assert summary["test_loss"] == [summary["consensus_loss"]] * 2
    assert summary["consensus_loss"] < math.log(64) - 1, "equal probabilities of 64 characters lose ln 64 nats"
    for rank in (0, 1):
        board = EventAccumulator(str(run.directory / f"peer-{rank:02d}")).Reload()
        assert "test/accuracy" not in board.Tags()["scalars"]
        loss, bits = (board.Scalars(f"test/{name}") for name in ("loss", "bits_per_character"))
        assert loss[0].step == 10 and loss[-1].value == pytest.approx(summary["test_loss_before_finish"][rank])
        (after,) = board.Scalars("test/loss_after_finish")
        assert after.value == pytest.approx(summary["test_loss"][rank])
        assert [one.value for one in bits] == pytest.approx([one.value / math.log(2) for one in loss])
    assert f" test loss {summary['test_loss'][0]:.3f} " in run.ended.output


def test_images_have_an_accuracy_and_a_loss(two: Folder) -> None:
    run = two.run("--policy", "tau:5", "--blocking", "--iterations", "20", "--eval-interval", "10")
    summary = run.summary
    assert None not in (*summary["test_accuracy"], *summary["test_loss"], *summary["test_loss_before_finish"])
    assert 0 < summary["consensus_loss"] == summary["test_loss"][0] < math.log(10)
    scalars = EventAccumulator(str(run.directory / "peer-00")).Reload().Tags()["scalars"]
    assert {"test/accuracy", "test/loss"} <= set(scalars) and "test/bits_per_character" not in scalars
