"""Parser of solver.prototxt, the settings of a Caffe solver in protobuf's text format.

protobuf parses the text against the messages of :mod:`gossipx.solver.schema`. It also finds typos in an inline net.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from gossipx.errors import UsageError
from gossipx.solver import schema
from gossipx.solver.places import Walk, fault
from gossipx.specs import texts

_MODULES = "gossipx trains a PyTorch module"
_FORMAT = "weights and state are written as safetensors"
WITHOUT_MEANING: Mapping[str, str] = {
    "net": _MODULES,
    "net_param": _MODULES,
    "train_net": _MODULES,
    "train_net_param": _MODULES,
    "test_net": _MODULES,
    "test_net_param": _MODULES,
    "train_state": f"{_MODULES}, which has no phases, levels or stages that select layers",
    "test_state": f"{_MODULES}, which has no phases, levels or stages that select layers",
    "snapshot_format": _FORMAT,
    "snapshot_diff": f"{_FORMAT}, without the gradients",
    "debug_info": "sizes of activations and gradients are not printed",
    "layer_wise_reduce": "it belongs to Caffe's own data parallelism; peers exchange whole models",
}
"""Fields of Caffe's files that have no effect here, with the reason."""
_TYPE_OF = {
    "SGD": "SGD",
    "NESTEROV": "Nesterov",
    "ADAGRAD": "AdaGrad",
    "RMSPROP": "RMSProp",
    "ADADELTA": "AdaDelta",
    "ADAM": "Adam",
}
"""The ``type`` for each value of the older field ``solver_type``."""


@dataclass(frozen=True)
class NetState:
    """The selection of layers of a net (Caffe's NetState)."""

    phase: str = "TEST"
    level: int = 0
    stage: tuple[str, ...] = ()


@dataclass(frozen=True)
class SolverParameter:
    """Caffe's SolverParameter: its fields, names and defaults.

    A field without a default in Caffe has protobuf's default, 0 or empty. An enum is the name of its value. An inline
    net is its text. The older ``solver_type`` is read into ``type``. Values are well-formed, but not otherwise checked.

    Attributes:
        given: names of the fields that the text sets, even if to their default.
        places: line and column, both from 1, of the first occurrence of each given field.
        path: the text's file; None: no file.
    """

    net: str = ""
    net_param: str = ""
    train_net: str = ""
    test_net: tuple[str, ...] = ()
    train_net_param: str = ""
    test_net_param: tuple[str, ...] = ()
    train_state: NetState = NetState()
    test_state: tuple[NetState, ...] = ()
    test_iter: tuple[int, ...] = ()
    test_interval: int = 0
    test_compute_loss: bool = False
    test_initialization: bool = True
    base_lr: float = 0.0
    display: int = 0
    average_loss: int = 1
    max_iter: int = 0
    iter_size: int = 1
    lr_policy: str = ""
    gamma: float = 0.0
    power: float = 0.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    regularization_type: str = "L2"
    stepsize: int = 0
    stepvalue: tuple[int, ...] = ()
    clip_gradients: float = -1.0
    snapshot: int = 0
    snapshot_prefix: str = ""
    snapshot_diff: bool = False
    snapshot_format: str = "BINARYPROTO"
    solver_mode: str = "GPU"
    device_id: int = 0
    random_seed: int = -1
    type: str = "SGD"
    delta: float = 1e-8
    momentum2: float = 0.999
    rms_decay: float = 0.99
    debug_info: bool = False
    snapshot_after_train: bool = True
    layer_wise_reduce: bool = True
    weights: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)
    path: Path | None = field(default=None, compare=False, repr=False)

    @property
    def weight_files(self) -> tuple[str, ...]:
        """The files in ``weights``, whose values may be lists separated by commas."""
        return tuple(name.strip() for listed in self.weights for name in listed.split(","))

    def error(self, name: str, message: str) -> UsageError:
        """Return an error about a field, with its line and column if the text sets it."""
        line, column = self.places.get(name, (None, None))
        return UsageError(f"{name}: {message}", self.path, line, column)

    def warnings(self, ignored: Mapping[str, str] = WITHOUT_MEANING) -> list[str]:
        """Return a line for each given field that is in ``ignored`` (reason by name), in the order of the text."""
        given = sorted((place, name) for name, place in self.places.items() if name in ignored)
        return [str(self.error(name, f"has no effect: {ignored[name]}")) for _, name in given]


MOST = 2**16
"""Bytes of a file: ten times the longest solver of Caffe's examples, and protobuf reads 150,000 in a second."""


def read(path: Path) -> SolverParameter:
    """Read a solver.prototxt.

    Raises:
        UsageError: it cannot be read, or is invalid, with line and column.
    """
    return parse(texts.read(path, "solver", MOST, "no such solver file"), path)


def parse(text: str, path: Path | None = None) -> SolverParameter:
    """Parse the text of a solver.prototxt; ``path`` is its file, for messages.

    Raises:
        UsageError: the text is invalid, with line and column.
    """
    if "\0" in text:  # protobuf does not see it in a comment
        raise UsageError("not a text file: it has zero bytes", path, text.count("\n", 0, text.index("\0")) + 1)
    message = schema.message_class("SolverParameter")()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        raise fault(error, text, "SolverParameter", path) from None  # protobuf's message adds nothing
    where = _positions(text)
    for missing in message.FindInitializationErrors():
        raise UsageError(f"{missing} is missing", path, *where[missing.split(".")[0].split("[")[0]])
    values = {name: _value(getattr(message, name), schema.MESSAGES["SolverParameter"][name]) for name in where}
    if "solver_type" in where:
        if "type" in where:
            raise UsageError("solver_type: 'type' is given as well, and replaces it", path, *where["solver_type"])
        values["type"] = _TYPE_OF[values.pop("solver_type")]
        where["type"] = where.pop("solver_type")
    return SolverParameter(**values, given=frozenset(where), places=where, path=path)


def _positions(text: str) -> dict[str, tuple[int, int]]:
    """Return line and column of the first occurrence of each top-level field."""
    found: dict[str, tuple[int, int]] = {}
    for place in Walk(text, "SolverParameter").found:
        if place.outer is None:
            found.setdefault(place.name, (place.line, place.column))
    return found


def _value(value: Any, field: schema.Field) -> Any:
    """Convert protobuf's value of a field."""
    if field.label == "*":
        return tuple(_one(each, field.kind) for each in value)
    return _one(value, field.kind)


def _one(value: Any, kind: str) -> Any:
    if kind == "NetParameter":
        return text_format.MessageToString(value, as_utf8=True)
    if kind == "NetState":
        phase = _one(value.phase, "Phase") if value.HasField("phase") else NetState.phase
        return NetState(phase, value.level, tuple(value.stage))
    if kind in schema.ENUMS:
        return next(name for name, number in schema.ENUMS[kind].items() if number == value)
    return value
