"""The parser of solver.prototxt: values of Caffe's files, and messages and positions of errors."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from gossipx.errors import UsageError
from gossipx.solver import prototxt
from gossipx.solver.prototxt import WITHOUT_MEANING, NetState, SolverParameter, read_solver, solver_from_text

PATH = Path("lenet_solver.prototxt")
GOLDEN = Path(__file__).parents[1] / "golden"
OURS = {"given", "places", "path"}
FIELDS = prototxt.MESSAGES["SolverParameter"]


def refusal(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        solver_from_text(text, PATH)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_defaults_are_those_of_caffe() -> None:
    """Fields without a default in caffe.proto have protobuf's, 0 or empty."""
    told = {
        "test_initialization": True,
        "average_loss": 1,
        "iter_size": 1,
        "regularization_type": "L2",
        "clip_gradients": -1.0,
        "snapshot_format": "BINARYPROTO",
        "solver_mode": "GPU",
        "random_seed": -1,
        "type": "SGD",
        "delta": 1e-8,
        "momentum2": 0.999,
        "rms_decay": 0.99,
        "snapshot_after_train": True,
        "layer_wise_reduce": True,
        "train_state": NetState("TEST", 0, ()),
    }
    empty = solver_from_text("# nothing\n", PATH)
    assert empty == SolverParameter()
    assert empty.given == frozenset()
    values = {one.name: getattr(empty, one.name) for one in dataclasses.fields(empty) if one.name not in OURS}
    assert values.keys() == FIELDS.keys() - {"solver_type"}
    assert {name: value for name, value in values.items() if value} == told


def test_an_inline_net_of_any_age_is_read() -> None:
    parameter = read_solver(GOLDEN / "old_net.prototxt")
    assert re.findall(r"(?m)^  (?:  )?name: (.*)$", parameter.net_param) == [
        '"mnist"', '"conv"', '"pool"', '"older"', '"new"', '"loss"'
    ]  # fmt: skip
    assert solver_from_text(f"net_param {{ {parameter.net_param} }}", PATH).net_param == parameter.net_param


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("base_lr: 1.f", "base_lr", 1.0),
        ("base_lr: -inf", "base_lr", -math.inf),
        ("max_iter: 0x1F", "max_iter", 31),
        *((f"test_initialization: {word}", "test_initialization", False) for word in ("false", "False", "f", "0")),
        ("solver_mode: 0", "solver_mode", "CPU"),
        ("stepvalue: [1, 2] stepvalue: 3", "stepvalue", (1, 2, 3)),
        ("display: 1; max_iter: 2, stepsize: 3;", "stepsize", 3),
        ("lr_policy: 'a\"' \"'b\"  # more\n 'c # d'", "lr_policy", "a\"'bc # d"),
        (r'lr_policy: "\x41\102\n\"é"', "lr_policy", 'AB\n"é'),
        ("test_state [{stage: 'a'}, < level: 2 >]", "test_state", (NetState(stage=("a",)), NetState(level=2))),
        ("net_param: <>", "net_param", ""),
        ("base_lr: 1\r\nlr_policy: 'fixed' # so\r\n", "lr_policy", "fixed"),
    ],
)
def test_each_form_of_the_text_is_taken(text: str, name: str, value: object) -> None:
    parameter = solver_from_text(text, PATH)
    assert getattr(parameter, name) == value
    assert name in parameter.given


@pytest.mark.parametrize(("old", "new"), [("NESTEROV", "Nesterov"), ("3", "RMSProp"), ("ADADELTA", "AdaDelta")])
def test_the_old_solver_type_becomes_a_type(old: str, new: str) -> None:
    parameter = solver_from_text(f"base_lr: 1\n  solver_type: {old}", PATH)
    assert (parameter.type, parameter.given, parameter.places["type"]) == (new, {"base_lr", "type"}, (2, 3))


@pytest.mark.fault(41)
@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("momentum: 1\n  base_rl: 0.1", "2:3", "SolverParameter has no field 'base_rl' (did you mean 'base_lr'?)"),
        (
            'net_param {\n  layer { name: "{" convolution_param { kernal_size: 3 } }\n}',
            "2:41",
            "ConvolutionParameter has no field 'kernal_size' (did you mean 'kernel_size'?)",
        ),
        ("base-lr: 1", "1:1", "SolverParameter has no field 'base-lr' (did you mean 'base_lr'?)"),
        ("base_lr: 0.1 \x1b[31m", "1:14", "got ?."),
        ("base_lr: fast", "1:10", "Couldn't parse float: fast"),
        ("base_lr: \nmomentum: 1", "2:1", "Couldn't parse float: momentum"),
        ("max_iter: 2147483648", "1:11", "Value out of range: 2147483648"),
        ("max_iter: " + "9" * 5000, "1:11", ": 999"),
        ("lr_policy: step", "1:12", "Expected string but found: 'step'"),
        ("solver_mode: gpu", "1:14", "SolverMode has no value 'gpu': one of CPU, GPU"),
        ("solver_mode: 2", "1:14", "SolverMode has no value '2': one of CPU, GPU"),
        ("base_lr: 1\nbase_lr: 2", "2:10", 'should not have multiple "base_lr" fields'),
        ("base_lr 0.1", "1:9", 'Expected ":"'),
        ("base_lr", "1:8", 'Expected ":"'),
        ("net_param {\n  state { level: 1 } # }\n", "2:20", 'Expected "}"'),
        ("\nnet_param { layer { clip_param { min: 1 } } }", "2:1", "net_param.layer[0].clip_param.max is missing"),
        ("type: 'SGD'\nsolver_type: ADAM", "2:1", "solver_type: 'type' is given as well"),
    ],
)
def test_an_error_has_line_and_column(text: str, place: str, said: str) -> None:
    message = refusal(text)
    assert message.startswith(f"{PATH}:{place}: ")
    assert said in message
    assert "\n" not in message and len(message) < 1100


def test_places_are_those_of_fields_alone() -> None:
    """Text that looks like a field in a comment, a string or an inline net is ignored."""
    text = (
        "# base_lr: 1 {\n"
        "net_param { name: 'momentum: 1 }' state { level: 1 } debug_info: true } gamma: 2\n"
        "lr_policy: \"} power: 1\"\n'base_lr: 1'\t base_lr: 0.5\n"
        "test_state: [{ stage: 'a' }, { }]; test_iter: [ 1 # ]\n, 2 ] snapshot: 1 test_iter: 3\n"
    )
    assert solver_from_text(text, PATH).places == {
        "net_param": (2, 1),
        "gamma": (2, 73),
        "lr_policy": (3, 1),
        "base_lr": (4, 15),
        "test_state": (5, 1),
        "test_iter": (5, 36),
        "snapshot": (6, 7),
    }


def test_fields_without_effect_give_warnings_in_order() -> None:
    parameter = solver_from_text("base_lr: 1\nsnapshot_diff: false solver_mode: GPU\nnet: 'a'\n", PATH)
    assert parameter.warnings() == [
        f"{PATH}:2:1: snapshot_diff: has no effect: {WITHOUT_MEANING['snapshot_diff']}",
        f"{PATH}:3:1: net: has no effect: {WITHOUT_MEANING['net']}",
    ]
    assert {
        line.split(": ")[1] for line in read_solver(GOLDEN / "every_field.prototxt").warnings()
    } == WITHOUT_MEANING.keys()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, ": no such solver file"),
        (b"base_lr: 1 # \xe9", ": cannot read the solver: not UTF-8 text"),
        (b"base_lr: 1\n# \0", ":2: not a text file: it has zero bytes"),
    ],
)
def test_a_file_that_is_no_text_is_one_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "solver.prototxt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_solver(path)
    assert str(caught.value) == f"{path}{said}"
    with pytest.raises(UsageError, match="cannot read the solver: Is a directory"):
        read_solver(tmp_path)


def test_a_byte_order_mark_moves_no_column(tmp_path: Path) -> None:
    path = tmp_path / "solver.prototxt"
    path.write_bytes("\ufeffbase_lr: 0.1".encode())
    assert (read_solver(path).base_lr, read_solver(path).places) == (0.1, {"base_lr": (1, 1)})


_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "double": st.floats(allow_nan=False),
    "float": st.floats(allow_nan=False),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "string": st.text(max_size=8),
    "uint32": st.integers(0, 2**32 - 1),
}


@st.composite
def messages(draw: st.DrawFn, name: str = "SolverParameter", deepest: int = 4) -> Any:
    """Draw a message with some of its fields set."""
    fields = prototxt.MESSAGES[name]
    usable = [one for one, what in fields.items() if deepest or what.kind not in prototxt.MESSAGES]
    chosen = set(draw(st.lists(st.sampled_from(usable), max_size=5))) if usable else set()
    chosen |= {one for one, what in fields.items() if what.label == "!"}
    values: dict[str, Any] = {}
    for one in sorted(chosen):
        kind = fields[one].kind
        if kind in prototxt.MESSAGES:
            value = messages(kind, deepest - 1)
        elif kind in prototxt.ENUMS:
            value = st.sampled_from(sorted(prototxt.ENUMS[kind].values()))
        else:
            value = _VALUES[kind]
        values[one] = draw(st.lists(value, min_size=1, max_size=3) if fields[one].label == "*" else value)
    return prototxt.message_class(name)(**values)


def solvers() -> st.SearchStrategy[Any]:
    return messages().filter(lambda message: not (message.HasField("type") and message.HasField("solver_type")))


@examples(150)
@given(solvers(), st.booleans())
def test_what_protobuf_writes_is_read_back(message: Any, one_line: bool) -> None:
    text = text_format.MessageToString(message, as_one_line=one_line)
    parameter = solver_from_text(text, PATH)
    set_fields = {field.name for field, _ in message.ListFields()}
    assert parameter.given == {"type" if name == "solver_type" else name for name in set_fields}
    for name in set_fields - {"solver_type"}:
        field, value, got = FIELDS[name], getattr(message, name), getattr(parameter, name)
        for wanted, each in zip(value, got, strict=True) if field.label == "*" else [(value, got)]:
            if field.kind == "NetParameter":
                assert text_format.Parse(each, prototxt.message_class(field.kind)()) == wanted
            elif field.kind == "NetState":
                phase = "TRAIN" if wanted.HasField("phase") and not wanted.phase else "TEST"
                assert each == NetState(phase, wanted.level, tuple(wanted.stage))
            else:
                assert (prototxt.ENUMS[field.kind][each] if field.kind in prototxt.ENUMS else each) == wanted
    lines = text.split("\n")
    for name, (line, column) in parameter.places.items():
        assert lines[line - 1][column - 1 :].startswith(("solver_type", "type") if name == "type" else name)


@examples(100)
@given(solvers().filter(lambda message: message.ListFields()), st.data())
def test_a_typo_anywhere_is_found_where_it_is(message: Any, data: st.DataObject) -> None:
    lines = text_format.MessageToString(message).split("\n")
    named = [index for index, line in enumerate(lines) if line.strip() and line.strip() != "}"]
    index = data.draw(st.sampled_from(named))
    indent, name = re.match(r"( *)(\w+)", lines[index]).groups()  # type: ignore[union-attr]
    lines[index] = lines[index].replace(name, name + "_x", 1)
    assert refusal("\n".join(lines)).startswith(f"{PATH}:{index + 1}:{len(indent) + 1}: ")


_NAMES = ("base_lr", "max_iter", "test_iter", "lr_policy", "solver_mode", "net_param", "test_state", "layer", "name")
_WORDS = (*_NAMES, "clip_param", "min", "stage", "x", "true", "GPU", "nan", "-", ".", "1", "0x1F", "1e-3", "1.f")
_PIECES = (*_WORDS, *"{}<>[]:,;#\n\x85é", '"a"', "'b'", '"\\xff"', '"\\q', "'c")


@examples(400)
@given(
    st.lists(st.sampled_from(_PIECES)).map(" ".join) | st.text() | st.binary().map(lambda raw: raw.decode("latin-1"))
)
def test_garbage_is_refused_in_one_line_with_its_place(text: str) -> None:
    try:
        solver_from_text(text, PATH)
    except UsageError as error:
        place = re.match(rf"{PATH}:(\d+)(?::(\d+))?: .", str(error))
        assert place
        assert "\n" not in str(error)
        line = text.split("\n")[int(place[1]) - 1]
        assert 1 <= int(place[2] or 1) <= len(line) + 1


# --- files for forks of Caffe ----------------------------------------------------------------------


@pytest.mark.fault(62)
@pytest.mark.parametrize("field", ["min_lr", "eval_type", "stepearly", "plateau_factor"])
def test_a_field_of_a_fork_is_not_taken_for_another(field: str) -> None:
    """stepvalue, a list of iterations where the rate falls, is not what was meant by stepearly."""
    told = f"{PATH}:2:1: SolverParameter has no field '{field}': if it is of a fork of Caffe, remove it"
    assert refusal(f"base_lr: 1\n{field}: 5") == told
