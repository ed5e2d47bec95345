"""The results that a script's ``evaluate`` may return, and those that are left out with a warning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossipx.runtime.figures.scores import scores


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (0.5, {"accuracy": 0.5}),
        (torch.tensor(0.25, requires_grad=True), {"accuracy": 0.25}),
        ({"loss": 1.5}, {"loss": 1.5}),
        ({"accuracy": 1, "loss": torch.tensor([0.5])}, {"accuracy": 1.0, "loss": 0.5}),
        ({"loss": 1.0, "bits_per_character": 1.5}, {"loss": 1.0, "bits_per_character": 1.5}),
        ({}, {}),
        (float("nan"), {}),
        ({"accuracy": 0.5, "loss": float("inf")}, {"accuracy": 0.5}),
    ],
    ids=str,
)
def test_an_accuracy_or_figures_by_name(result: Any, found: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
    assert scores(result) == found
    assert not caplog.records


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (None, "evaluate returned a NoneType as accuracy: it must return an accuracy from 0 to 1, or numbers by name"),
        ({"loss": "high", "accuracy": 0.5}, "evaluate returned a str as loss: it must return"),
        ({"loss": torch.zeros(2), "accuracy": 0.5}, "evaluate returned a Tensor as loss: it must return"),
        (
            {"test/loss": 1.0, "accuracy": 0.5},
            "evaluate returned a figure named 'test/loss': use letters, digits and _",
        ),
        ({3: 1.0, "accuracy": 0.5}, "evaluate returned a figure named 3: use letters"),
    ],
    ids=str,
)
def test_other_figures_are_left_out_and_named(result: Any, told: str, caplog: pytest.LogCaptureFixture) -> None:
    """An error would lose a completed training."""
    assert scores(result) == ({} if result is None else {"accuracy": 0.5})
    (record,) = caplog.records
    assert record.getMessage().startswith(told)
