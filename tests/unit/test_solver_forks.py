"""Solver files written for a fork of Caffe."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossipx.errors import UsageError
from gossipx.solver import prototxt
from gossipx.solver.prototxt import solver_from_text

PATH = Path("lenet_solver.prototxt")
SSD, NVIDIA, INTEL = "SSD's fork of Caffe", "NVIDIA's fork of Caffe", "Intel's fork of Caffe"


@pytest.mark.fault(62)
@pytest.mark.parametrize(
    ("text", "place", "field", "fork"),
    [
        ('base_lr: 1\neval_type: "detection"', "2:1", "'eval_type'", SSD),
        ("show_per_class_result: true", "1:1", "'show_per_class_result'", SSD),
        (
            "net_param {\n  layer { prior_box_param { min_size: 30 } } }",
            "2:11",
            "'prior_box_param' in net_param.layer",
            SSD,
        ),
        ("min_lr: 0.1", "1:1", "'min_lr'", NVIDIA),
        ("store_blobs_in_old_format: true", "1:1", "'store_blobs_in_old_format'", NVIDIA),
        ("larc: true", "1:1", "'larc'", NVIDIA),
        ("momentum_power: 1", "1:1", "'momentum_power'", NVIDIA),
        ("net_param { global_grad_scale: 100 }", "1:13", "'global_grad_scale' in net_param", NVIDIA),
        ("warmup_iter: 100", "1:1", "'warmup_iter'", INTEL),
    ],
)
def test_a_field_of_a_fork_is_named_as_that(text: str, place: str, field: str, fork: str) -> None:
    """They were taken for errors in typing, such as min_lr for base_lr."""
    with pytest.raises(UsageError) as caught:
        solver_from_text(text, PATH)
    assert caught.value.exit_code == 2
    assert (
        str(caught.value) == f"{PATH}:{place}: field {field} is of {fork}: gossipx has BVLC's fields only, so remove it"
    )


@pytest.mark.fault(62)
@pytest.mark.parametrize("field", ["stepearly", "plateau_factor"])
def test_a_field_of_an_unknown_fork_is_not_taken_for_another(field: str) -> None:
    """stepvalue, a list of iterations where the rate falls, is not what was meant."""
    with pytest.raises(UsageError) as caught:
        solver_from_text(f"base_lr: 1\n{field}: 5", PATH)
    told = f"{PATH}:2:1: unknown field '{field}': BVLC's Caffe has none of that name; if it is a fork's, remove it"
    assert str(caught.value) == told


def test_no_field_of_a_fork_is_in_the_schema() -> None:
    for added in prototxt.FORKS.values():
        for message, names in added.items():
            assert not prototxt.MESSAGES[message].keys() & set(names.split())
