"""Changes of gradients between backward and the optimizer's step are seen, whatever made them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gossipx.runtime.training.gradients import Change, GradientWatch, fingerprint

pytestmark = pytest.mark.fault(46)

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


def watched(gradient: Tensor) -> tuple[GradientWatch, nn.Parameter]:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    watch = GradientWatch()
    watch.take(0, gradient)
    return watch, parameter


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1001])
def test_each_change_of_one_value_is_seen(dtype: torch.dtype, count: int) -> None:
    gradient = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    watch, parameter = watched(gradient)
    for index in {0, count // 2, count - 1}:
        before = gradient[index].clone()
        gradient.data[index] = before * 1.5
        assert watch.changed([parameter]) == (Change.VALUES, 0)
        gradient.data[index] = before
        assert watch.changed([parameter]) == (Change.NONE, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [0.5, 2.0, 2.0**-10, 0.0, -1.0])
def test_scaling_of_equal_values_by_powers_of_two_is_seen(dtype: torch.dtype, factor: float) -> None:
    """Each value changes the same bits, which an exclusive or of an even number of them would not show."""
    watch, parameter = watched(gradient := torch.ones(64, dtype=dtype))
    gradient.data.mul_(factor)
    assert watch.changed([parameter]) == (Change.VALUES, 0)


def test_views_strides_and_no_values() -> None:
    whole = torch.arange(24.0)
    for view in (whole[1:8], whole.view(4, 6).T, whole.view(2, 3, 4).permute(2, 0, 1), whole[::3]):
        assert fingerprint(view) == fingerprint(view.contiguous().clone())
    assert fingerprint(torch.zeros(0)) == 0


def test_a_write_of_the_same_values_and_a_removed_gradient() -> None:
    watch, parameter = watched(torch.ones(3))
    assert parameter.grad is not None
    parameter.grad.mul_(1.0)
    assert watch.changed([parameter]) == (Change.WRITTEN, 0)
    parameter.grad = None
    assert watch.changed([parameter]) == (Change.VALUES, 0)


def test_nan_and_infinities_do_not_differ_from_themselves() -> None:
    watch, parameter = watched(torch.tensor([float("nan"), float("inf"), -float("inf")]))
    assert watch.changed([parameter]) == (Change.NONE, -1)
