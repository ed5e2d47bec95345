"""``gossipx.attach`` with foreign solvers: their blobs as a module's parameters, and the checks of blobs."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gossipx
from gossipx.errors import UsageError
from gossipx.launch.loops.attach import Blobs


def blob(*values: float) -> SimpleNamespace:
    return SimpleNamespace(data=np.array(values, float), diff=np.zeros(len(values)))


def net(**layers: SimpleNamespace) -> Any:
    return SimpleNamespace(params={layer: [one] for layer, one in layers.items()})


def test_each_blob_has_a_unique_name_and_position() -> None:
    """Parameter names have no dots, but layer names may."""
    names = ["a.b", "a_b", "a%2Eb", "a.b[0]", "inception_3a/1x1"]
    given = net(**{name: blob(float(number)) for number, name in enumerate(names)})
    blobs = Blobs(given)
    assert [name for name, _ in blobs.named_parameters()] == [
        "a%2Eb[0]", "a_b[0]", "a%252Eb[0]", "a%2Eb[0][0]", "inception_3a/1x1[0]"
    ]  # fmt: skip
    for number, parameter in enumerate(blobs.parameters()):
        assert parameter.tolist() == [number]
        parameter.data += 10
    blobs.to_solver()
    assert [float(given.params[name][0].data[0]) for name in names] == [10, 11, 12, 13, 14]


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ("data", np.zeros(1), "blob fit[0]: its data is of shape [1], but its data had shape [2] when it was"),
        ("data", [0.0, 0.0], "blob fit[0]: its data is list, but its data had shape [2]"),
        ("diff", np.zeros((2, 1)), "blob fit[0]: its diff is of shape [2, 1], but its data had shape [2]"),
    ],
)
@pytest.mark.parametrize("copy", [Blobs.to_solver, Blobs.to_arena])
def test_a_blob_replaced_with_another_shape_is_refused(
    part: str, value: object, told: str, copy: Callable[[Blobs], None]
) -> None:
    """numpy would broadcast a single value."""
    given = net(fit=blob(1, 2))
    blobs = Blobs(given)
    setattr(given.params["fit"][0], part, value)
    with pytest.raises(UsageError, match=re.escape(told)):
        list(blobs.gradients())
        copy(blobs)


def test_a_blob_replaced_with_the_same_shape_is_accepted() -> None:
    given = net(fit=blob(1, 2))
    blobs = Blobs(given)
    given.params["fit"][0].data = np.array([3.0, 4.0])
    blobs.to_arena()
    assert next(blobs.parameters()).tolist() == [3, 4]


@pytest.mark.parametrize(
    "add_callback",
    [lambda: None, lambda one: None, lambda one, two, three: None, 5],
    ids=["none", "one", "three", "no function"],
)
def test_a_foreign_add_callback_is_refused_before_the_run_waits_for_peers(add_callback: object) -> None:
    solver = SimpleNamespace(net=net(fit=blob(1, 2)), add_callback=add_callback)
    with pytest.raises(UsageError, match=r"SimpleNamespace.add_callback is not pycaffe's add_callback\(on_start, on_"):
        gossipx.attach(solver, peers="nowhere.txt")
