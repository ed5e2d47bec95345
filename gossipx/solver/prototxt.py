"""Parser of solver.prototxt, the settings of a Caffe solver in protobuf's text format.

protobuf parses the text against Caffe's messages, which are built at run time from the tables of ``caffe.toml``,
without generated files or protoc. It also finds typos in an inline net. Its parser keeps no positions, so a pass over
the same tokens finds those of the fields.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from gossipx.errors import UsageError, printable
from gossipx.specs import suggest, texts, toml

# --- Caffe's messages ------------------------------------------------------------------------------


class Field(NamedTuple):
    """A field of a message.

    Attributes:
        number: the field's number in the binary format.
        kind: a scalar type such as ``float``, or the name of a message or an enum.
        label: ``*`` if repeated, ``!`` if required, else empty.
    """

    number: int
    kind: str
    label: str


def _field(number: str, kind: str) -> Field:
    """Return a field from two words of the table; ``kind`` may end in a label."""
    bare = kind.rstrip("*!")
    return Field(int(number), bare, kind[len(bare) :])


_CAFFE = "caffe.toml"
_TABLES = toml.loads(importlib.resources.files("gossipx.solver").joinpath(_CAFFE).read_text("utf-8"), Path(_CAFFE))
MESSAGES: Mapping[str, Mapping[str, Field]] = {
    message: {name: _field(number, kind) for name, number, kind in map(str.split, listed.split(","))}
    for message, listed in _TABLES["messages"].items()
}
"""The fields of each message, by name."""
ENUMS: Mapping[str, Mapping[str, int]] = {
    enum: {name: int(number) for name, number in map(str.split, listed.split(","))}
    for enum, listed in _TABLES["enums"].items()
}
"""The number of each value of each enum, by name."""
WITHOUT_MEANING: Mapping[str, str] = _TABLES["without_meaning"]
"""Fields of Caffe's files that have no effect here, with the reason."""
LEAST: Mapping[str, int] = _TABLES["least"]
"""The least value of each field."""

_PROTO = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _PROTO.TYPE_BOOL,
    "double": _PROTO.TYPE_DOUBLE,
    # Caffe uses 32 bits, but then the text 0.1 would be read as 0.10000000149.
    "float": _PROTO.TYPE_DOUBLE,
    "int32": _PROTO.TYPE_INT32,
    "int64": _PROTO.TYPE_INT64,
    "string": _PROTO.TYPE_STRING,
    "uint32": _PROTO.TYPE_UINT32,
}
_LABELS = {"": _PROTO.LABEL_OPTIONAL, "*": _PROTO.LABEL_REPEATED, "!": _PROTO.LABEL_REQUIRED}


@cache
def message_class(name: str) -> Any:
    """Return protobuf's class for the message ``name`` of :data:`MESSAGES`."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(name))


@cache
def _pool() -> Any:
    """Return a descriptor pool with all messages.

    It is not protobuf's default pool: if pycaffe is imported, too, that already has messages of the same names.
    """
    file = descriptor_pb2.FileDescriptorProto(name="gossipx/solver.proto")
    for enum, values in ENUMS.items():
        # protobuf requires unique value names within the scope of an enum, and several enums have SUM and MAX.
        declared = file.message_type.add(name=enum).enum_type.add(name="Value")
        for name, number in values.items():
            declared.value.add(name=name, number=number)
    for message, fields in MESSAGES.items():
        target = file.message_type.add(name=message)
        for name, (number, kind, label) in fields.items():
            entry = target.field.add(name=name, number=number, label=_LABELS[label])
            if kind in _SCALARS:
                entry.type = _SCALARS[kind]
            elif kind in ENUMS:
                entry.type, entry.type_name = _PROTO.TYPE_ENUM, f".{kind}.Value"
            else:
                entry.type, entry.type_name = _PROTO.TYPE_MESSAGE, f".{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


# --- the settings ----------------------------------------------------------------------------------


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

    def warnings(self) -> list[str]:
        """Return a line for each given field that has no effect, in the order of the text."""
        given = sorted((place, name) for name, place in self.places.items() if name in WITHOUT_MEANING)
        return [str(self.error(name, f"has no effect: {WITHOUT_MEANING[name]}")) for _, name in given]


_UNKNOWN_FIELD = re.compile(r'Message type "(\w+)" has no field named "(.*)"\.')
_UNKNOWN_VALUE = re.compile(r'Enum type "(\w+)\.Value" has no value (?:named|with number) (.*)\.')
_LONGEST = 1000
"""Maximum number of characters of a message about a mistake, which quotes a wrong value."""
MOST = 2**16
"""Bytes of a file: ten times the longest solver of Caffe's examples, and protobuf reads 150,000 in a second."""


def read_solver(path: Path) -> SolverParameter:
    """Read a solver.prototxt.

    Raises:
        UsageError: it cannot be read, or is invalid, with line and column.
    """
    return solver_from_text(texts.read(path, "solver", MOST, "no such solver file"), path)


def solver_from_text(text: str, path: Path | None = None) -> SolverParameter:
    """Parse the text of a solver.prototxt; ``path`` is its file, for messages.

    Raises:
        UsageError: the text is invalid, with line and column.
    """
    if "\0" in text:  # protobuf does not see it in a comment
        raise UsageError("not a text file: it has zero bytes", path, text.count("\n", 0, text.index("\0")) + 1)
    message = message_class("SolverParameter")()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        raise _parse_fault(error, text, path) from None
    where = _positions(text)
    for missing in message.FindInitializationErrors():
        raise UsageError(f"{missing} is missing", path, *where[missing.split(".")[0].split("[")[0]])
    values = {name: _from_protobuf(getattr(message, name), MESSAGES["SolverParameter"][name]) for name in where}
    if "solver_type" in where:
        if "type" in where:
            raise UsageError("solver_type: 'type' is given as well, and replaces it", path, *where["solver_type"])
        values["type"] = _TABLES["solver_types"][values.pop("solver_type")]
        where["type"] = where.pop("solver_type")
    return SolverParameter(**values, given=frozenset(where), places=where, path=path)


def _parse_fault(error: text_format.ParseError, text: str, path: Path | None) -> UsageError:
    """Return an error of protobuf's parser in one line, with the names that an unknown one may stand for."""
    line, column = error.GetLine(), error.GetColumn()
    content = text.split("\n")[line - 1]
    said = str(error).removeprefix(f"{line}:{column} : ").removeprefix(f"'{content}': ").removeprefix("'': ")
    if unknown := _UNKNOWN_FIELD.fullmatch(said):
        message, name = unknown.groups()
        # Fields of forks resemble others, such as stepearly and stepvalue.
        meant = suggest(name, MESSAGES[message], least=0.75) or ": if it is of a fork of Caffe, remove it"
        said = f"{message} has no field '{name}'{meant}"
    elif unknown := _UNKNOWN_VALUE.fullmatch(said):
        enum, name = unknown.groups()
        said = f"{enum} has no value '{name}': one of {', '.join(ENUMS[enum])}"
    return UsageError(printable(said, _LONGEST), path, line, column)


def _positions(text: str) -> dict[str, tuple[int, int]]:
    """Return line and column of the first occurrence of each top-level field of a text that protobuf has parsed."""
    found: dict[str, tuple[int, int]] = {}
    tokens = text_format.Tokenizer(text.split("\n"))
    depth = 0
    while not tokens.AtEnd():
        depth += (tokens.token in "{<[") - (tokens.token in "}>]")
        if depth == 0 and tokens.token in MESSAGES["SolverParameter"]:  # no value at the top is such a word
            at = tokens.ParseError("")  # the only public access to a token's position
            found.setdefault(tokens.token, (at.GetLine(), at.GetColumn()))
        tokens.NextToken()
    return found


def _from_protobuf(value: Any, field: Field) -> Any:
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
    if kind in ENUMS:
        return next(name for name, number in ENUMS[kind].items() if number == value)
    return value
