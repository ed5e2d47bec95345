"""Checks of a solver's parameters before training starts. Caffe makes many of them only when it uses a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from gossipx.errors import UsageError
from gossipx.solver.optimizers import TYPES
from gossipx.solver.prototxt import LEAST, SolverParameter
from gossipx.solver.rates import NEEDS
from gossipx.specs import known_word, texts


def check_trainable(param: SolverParameter, tests: int) -> None:
    """Check that training can start.

    Args:
        param: the parameters.
        tests: number of sets of test batches.

    Raises:
        UsageError: the first invalid field, with file, line and column.
    """
    for field, mistake in _mistakes(param, tests):
        raise param.error(field, mistake)


def _mistakes(param: SolverParameter, tests: int) -> Iterator[tuple[str, str]]:
    yield from _known_names(param)
    for field, least in LEAST.items():
        if not getattr(param, field) >= least:  # also true for NaN
            yield field, f"{getattr(param, field):g} is less than {least:g}"
    yield from _rate(param)
    yield from _of_type(param)
    yield from _check_test_nets(param, tests)
    for name in param.weight_files:
        if texts.found(Path(name)) != "file":
            yield "weights", f"there is no file '{name}'"


def _known_names(param: SolverParameter) -> Iterator[tuple[str, str]]:
    known: dict[str, Mapping[str, object]] = {
        "type": TYPES,
        "lr_policy": NEEDS,
        "regularization_type": dict.fromkeys(("L1", "L2")),
    }
    for field, names in known.items():
        if field == "lr_policy" and not param.lr_policy:
            yield field, f"it is missing: one of {', '.join(NEEDS)}"
        try:
            known_word(field, getattr(param, field), names)
        except UsageError as error:
            yield field, str(error)


def _rate(param: SolverParameter) -> Iterator[tuple[str, str]]:
    if "base_lr" not in param.given:
        yield "base_lr", "it is missing"
    for field in NEEDS[param.lr_policy]:
        if field not in param.given:
            yield field, f'it is missing, and lr_policy: "{param.lr_policy}" needs it'
    if "stepsize" in NEEDS[param.lr_policy] and param.stepsize < 1:
        yield "stepsize", f"{param.stepsize} is less than 1"
    if list(param.stepvalue) != sorted(set(param.stepvalue)):
        yield "stepvalue", f"must be in ascending order: {', '.join(map(str, param.stepvalue))}"
    if param.lr_policy == "poly":
        if not param.power >= 0:
            yield "power", f'{param.power:g} is less than 0, and lr_policy: "poly" raises 0 to it at max_iter'
        if param.max_iter < 1:
            yield "max_iter", f'{param.max_iter} is less than 1, and lr_policy: "poly" divides by it'


def _of_type(param: SolverParameter) -> Iterator[tuple[str, str]]:
    if param.type in ("AdaGrad", "RMSProp") and param.momentum:
        yield "momentum", f"{param.type} does not use it: leave it out"
    if param.type in ("Adam", "AdaDelta") and not param.momentum < 1:
        yield "momentum", f"must be less than 1 with {param.type}"
    if param.type == "RMSProp" and not 0 <= param.rms_decay < 1:
        yield "rms_decay", f"{param.rms_decay:g} is not in [0, 1)"
    if param.type == "Adam" and not 0 <= param.momentum2 < 1:
        yield "momentum2", f"{param.momentum2:g} is not in [0, 1)"


def _check_test_nets(param: SolverParameter, tests: int) -> Iterator[tuple[str, str]]:
    if len(param.test_iter) != tests:
        yield "test_iter", f"it is given {len(param.test_iter)} times, once per test net, and test= has {tests} of them"
    if tests and not param.test_interval:
        yield "test_interval", "it is missing, and the test nets need it"
    if any(count < 1 for count in param.test_iter):
        yield "test_iter", f"{min(param.test_iter)} is less than 1"
