"""solver.prototxt: what a Caffe solver is told, in protobuf's text format.

protobuf reads the text, against the messages of :mod:`gossipx.solver.schema`; a typo in an inline net is found, too.
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

_MODULES = "gossipx trains the PyTorch module that it is given"
_FORMAT = "weights and state are written as safetensors"
WITHOUT_MEANING: Mapping[str, str] = {
    "net": _MODULES,
    "net_param": _MODULES,
    "train_net": _MODULES,
    "train_net_param": _MODULES,
    "test_net": _MODULES,
    "test_net_param": _MODULES,
    "train_state": f"{_MODULES}, which has no phases, levels and stages to choose layers by",
    "test_state": f"{_MODULES}, which has no phases, levels and stages to choose layers by",
    "snapshot_format": _FORMAT,
    "snapshot_diff": f"{_FORMAT}, without the gradients",
    "debug_info": "sizes of activations and gradients are not printed",
    "layer_wise_reduce": "it is about Caffe's own data parallelism, and peers exchange whole models",
}
"""Fields that Caffe's files hold and that change nothing here → why."""
_TYPE_OF = {
    "SGD": "SGD",
    "NESTEROV": "Nesterov",
    "ADAGRAD": "AdaGrad",
    "RMSPROP": "RMSProp",
    "ADADELTA": "AdaDelta",
    "ADAM": "Adam",
}
"""What was a number in ``solver_type`` is a word in ``type``."""


@dataclass(frozen=True)
class NetState:
    """Which layers of a net are chosen (Caffe's NetState)."""

    phase: str = "TEST"
    level: int = 0
    stage: tuple[str, ...] = ()


@dataclass(frozen=True)
class SolverParameter:
    """Caffe's SolverParameter: its fields, names and defaults.

    A field that has no default in Caffe has protobuf's, 0 or nothing; ``given`` tells whether it was set. Enums are
    the names of their values. An inline net is its text. ``solver_type`` was replaced in Caffe and is read into
    ``type``. Only the form of values has been checked, not what they mean.

    Attributes:
        given: names of the fields that the text sets, be it to their default.
        places: line and column, both from 1, of each of these, of the first where it is repeated.
        path: where the text comes from.
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
        """What ``weights`` names, each of which may be a list with commas."""
        return tuple(name.strip() for listed in self.weights for name in listed.split(","))

    def error(self, name: str, message: str) -> UsageError:
        """An error about a field, to raise: with its line and column if the text sets it, else of the file alone."""
        line, column = self.places.get(name, (None, None))
        return UsageError(f"{name}: {message}", self.path, line, column)

    def warnings(self, ignored: Mapping[str, str] = WITHOUT_MEANING) -> list[str]:
        """A line for each field that is given and is among ``ignored`` (name → why), in their order in the text."""
        given = sorted((place, name) for name, place in self.places.items() if name in ignored)
        return [str(self.error(name, f"has no meaning here: {ignored[name]}")) for _, name in given]


def read(path: Path) -> SolverParameter:
    """The settings in a solver.prototxt.

    Raises:
        UsageError: it cannot be read, or something in it is wrong; with line and column.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows' editors put a byte order mark first
    except FileNotFoundError:
        raise UsageError("no such solver file", path) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the solver: {reason}", path) from None
    return parse(text, path)


def parse(text: str, path: Path | None = None) -> SolverParameter:
    """The settings in ``text``; ``path``, if it is a file's, is for messages.

    Raises:
        UsageError: something in it is wrong; with line and column.
    """
    if "\0" in text:  # a comment would hide it from protobuf
        raise UsageError("not a text: it has bytes of zero", path, text.count("\n", 0, text.index("\0")) + 1)
    message = schema.message_class("SolverParameter")()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        raise fault(error, text, "SolverParameter", path) from None  # protobuf's own words say no more
    where = _where(text)
    for missing in message.FindInitializationErrors():
        raise UsageError(f"{missing} is missing", path, *where[missing.split(".")[0].split("[")[0]])
    values = {name: _value(getattr(message, name), schema.MESSAGES["SolverParameter"][name]) for name in where}
    if "solver_type" in where:
        if "type" in where:
            raise UsageError("solver_type: 'type' is given as well, and replaces it", path, *where["solver_type"])
        values["type"] = _TYPE_OF[values.pop("solver_type")]
        where["type"] = where.pop("solver_type")
    return SolverParameter(**values, given=frozenset(where), places=where, path=path)


def _where(text: str) -> dict[str, tuple[int, int]]:
    """Where each field of the solver itself is first named."""
    found: dict[str, tuple[int, int]] = {}
    for place in Walk(text, "SolverParameter").found:
        if place.outer is None:
            found.setdefault(place.name, (place.line, place.column))
    return found


def _value(value: Any, what: schema.Field) -> Any:
    """protobuf's value of a field as ours."""
    if what.label == "*":
        return tuple(_one(each, what.kind) for each in value)
    return _one(value, what.kind)


def _one(value: Any, kind: str) -> Any:
    if kind == "NetParameter":
        return text_format.MessageToString(value, as_utf8=True)
    if kind == "NetState":
        phase = _one(value.phase, "Phase") if value.HasField("phase") else NetState.phase
        return NetState(phase, value.level, tuple(value.stage))
    if kind in schema.ENUMS:
        return next(name for name, number in schema.ENUMS[kind].items() if number == value)
    return value
