"""Parser of solver.prototxt, the settings of a Caffe solver in protobuf's text format.

protobuf parses the text against Caffe's messages, which are built at run time from the tables of ``caffe.toml``,
without generated files or protoc. It also finds typos in an inline net. Its parser keeps no positions, and its messages
name its own types, so a pass over the same tokens finds the place of a mistake and says what is wrong.
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

from gossipx.errors import UsageError
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
FORKS: Mapping[str, Mapping[str, str]] = _TABLES["forks"]
"""Names of the fields that each fork of Caffe has added, by message, separated by spaces."""

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


def _fork_of(message: str, name: str) -> str | None:
    """Return which fork has added the field ``name`` to a message of the schema; None: no known one."""
    return next((fork for fork, added in FORKS.items() if name in added.get(message, "").split()), None)


# --- the settings ----------------------------------------------------------------------------------

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
        raise _parse_fault(error, text, "SolverParameter", path) from None  # protobuf's message adds nothing
    where = _positions(text)
    for missing in message.FindInitializationErrors():
        raise UsageError(f"{missing} is missing", path, *where[missing.split(".")[0].split("[")[0]])
    values = {name: _from_protobuf(getattr(message, name), MESSAGES["SolverParameter"][name]) for name in where}
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


# --- positions and errors --------------------------------------------------------------------------

_QUOTES = ("'", '"')
_LONGEST = 60
"""Maximum number of characters of a wrong value that a message shows."""
_EXPECTED = {
    "bool": "true or false",
    "double": "a number",
    "float": "a number",
    "int32": f"a whole number from {-(2**31)} to {2**31 - 1}",
    "int64": f"a whole number from {-(2**63)} to {2**63 - 1}",
    "string": 'text in quotes ("...", on one line)',
    "uint32": f"a whole number from 0 to {2**32 - 1}",
}


class FieldPlace(NamedTuple):
    """The position of a field.

    Attributes:
        line: line, from 1.
        column: column of the first character, from 1.
        name: the field's name, as written.
        message: the schema's message that should have the field.
        outer: the field that encloses this one; None at the top level.
    """

    line: int
    column: int
    name: str
    message: str
    outer: FieldPlace | None

    @property
    def known(self) -> Field | None:
        """The field in the schema; None if the name is unknown."""
        return MESSAGES[self.message].get(self.name)

    @property
    def path(self) -> str:
        """The name with those of the enclosing fields, such as ``net_param.layer.name``."""
        return f"{self.outer.path}.{self.name}" if self.outer else self.name


class Walk:
    """One pass over a text. Positions are exact up to the first mistake; the pass ends for any text.

    Args:
        text: a text in protobuf's text format.
        message: the schema's message that the text describes.

    Attributes:
        found: the fields, in order.
        open: fields whose braces the text does not close, outermost first.
    """

    def __init__(self, text: str, message: str):
        self._tokens = text_format.Tokenizer(text.split("\n"))
        self.found: list[FieldPlace] = []
        self.open: list[FieldPlace] = []
        self._fields(message, "")

    def _fields(self, message: str, end: str) -> None:
        tokens = self._tokens
        while not tokens.AtEnd():
            if tokens.TryConsume(end):
                self.open.pop()
                return
            name = tokens.token
            tokens.NextToken()
            at = tokens.ParseErrorPreviousToken("")  # the only public access to a token's position
            place = FieldPlace(at.GetLine(), at.GetColumn(), name, message, self.open[-1] if self.open else None)
            self.found.append(place)
            tokens.TryConsume(":")
            if not tokens.TryConsume("["):
                self._value(place)
            elif not tokens.TryConsume("]"):
                self._value(place)
                while tokens.TryConsume(","):
                    self._value(place)
                tokens.TryConsume("]")
            if not tokens.TryConsume(","):
                tokens.TryConsume(";")

    def _value(self, place: FieldPlace) -> None:
        tokens = self._tokens
        for brace, end in ("{}", "<>"):
            if place.known and place.known.kind in MESSAGES and tokens.TryConsume(brace):
                self.open.append(place)
                return self._fields(place.known.kind, end)
        was_text = tokens.token.startswith(_QUOTES)
        tokens.NextToken()
        while was_text and tokens.token.startswith(_QUOTES):  # adjacent strings are concatenated
            tokens.NextToken()
        return None


def _parse_fault(error: text_format.ParseError, text: str, message: str, path: Path | None) -> UsageError:
    """Translate an error of protobuf's parser into a message for the author of the text.

    Args:
        error: the error that ``text_format.Parse`` raised.
        text: the parsed text.
        message: the schema's message that the text describes.
        path: the text's file; None: no file.
    """
    line, column = error.GetLine(), error.GetColumn()
    content = text.split("\n")[line - 1]
    token = text_format.Tokenizer([content[column - 1 :]]).token
    said = str(error).removeprefix(f"{line}:{column} : ").removeprefix(f"'{content if token else ''}': ")
    walk = Walk(text, message)
    reached = [place for place in walk.found if (place.line, place.column) <= (line, column)]
    wanted = re.fullmatch(r'Expected "(.)"\.', said)
    unknown = next((place for place in reached if place.known is None), None)
    if unknown and not wanted:  # protobuf stops at the first unknown name
        return UsageError(_unknown(unknown), path, unknown.line, unknown.column)
    last = next(place for place in reversed(reached) if (place.line, place.column) < (line, column))
    if wanted and wanted[1] in "}>":
        last = walk.open[-1]
        return UsageError(f"{last.path}: the closing '{wanted[1]}' is missing", path, last.line, last.column)
    if wanted and wanted[1] == ",":
        return UsageError(f"',' or ']' is missing before {_quoted_token(token)}", path, line, column)
    if wanted:
        return UsageError(f"{last.path}: '{wanted[1]}' is missing before {_quoted_token(token)}", path, line, column)
    if said.startswith("Message type "):
        first = next(place for place in reached if (place.outer, place.name) == (last.outer, last.name))
        return UsageError(f"{last.path} is given twice, first on line {first.line}", path, last.line, last.column)
    if said.startswith("Couldn't parse string"):  # reported at the next token
        return UsageError(f"{last.path}: its escapes are not UTF-8", path, last.line, last.column)
    if not token:
        return UsageError(f"{last.path}: its value is missing", path, last.line, last.column)
    return UsageError(f"{last.path}: {_refused_token(last, token)}", path, line, column)


def _unknown(place: FieldPlace) -> str:
    where = f" in {place.outer.path}" if place.outer else ""
    if not place.name[0].isalpha():
        return f"the name of a field is expected{where}, not {_quoted_token(place.name)}"
    if fork := _fork_of(place.message, place.name):
        return f"field {_quoted_token(place.name)}{where} is of {fork}: gossipx has BVLC's fields only, so remove it"
    # Fields of forks resemble others, such as stepearly and stepvalue.
    meant = suggest(place.name, MESSAGES[place.message], least=0.75)
    meant = meant or ": BVLC's Caffe has none of that name; if it is a fork's, remove it"
    return f"unknown field {_quoted_token(place.name)}{where}{meant}"


def _refused_token(place: FieldPlace, token: str) -> str:
    kind = MESSAGES[place.message][place.name].kind
    if kind in ENUMS:
        return f"{_quoted_token(token)} is not one of {', '.join(ENUMS[kind])}{suggest(token.upper(), ENUMS[kind])}"
    if kind == "string" and token.startswith(_QUOTES) and token[0] == token[-1:] and len(token) > 1:
        return f"{_quoted_token(token)} has a wrong escape: write a backslash as \\\\"
    return f"{_quoted_token(token)} is not {_EXPECTED[kind]}"


def _quoted_token(token: str) -> str:
    """Return a token as shown in a one-line message."""
    if not token:
        return "the end of the file"
    return repr(token if len(token) <= _LONGEST else token[:_LONGEST] + "...")
