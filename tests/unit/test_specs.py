"""Spec strings: parsing, and the messages for wrong ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from gossipx import mixing, specs
from gossipx.errors import UsageError
from gossipx.mixing import Aged, Average


@dataclass(frozen=True)
class Shape:
    sides: int
    length: float = 1.0
    name: str = "none"
    filled: bool = False
    late: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if self.sides < 3:
            raise ValueError("sides are 3 or more")


def circle(radius: float, name: str = "round") -> tuple[float, str]:
    return radius, name


TABLE = {"shape": Shape, "circle": circle, "dot": lambda: "dot"}


def build(spec: str) -> object:
    return specs.build(spec, TABLE, "figure")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("shape:3", Shape(3)),
        (" shape : 3 ", Shape(3)),
        ("shape:sides=4,length=2.5", Shape(4, 2.5)),
        ("shape:4, length = 2e-1, filled=TRUE", Shape(4, 0.2, filled=True)),
        ("shape:4,name=a b,late=7", Shape(4, name="a b", late=7)),
        ("circle:2.5", (2.5, "round")),
        ("circle:radius=2,name=x", (2.0, "x")),
        ("dot", "dot"),
    ],
)
def test_what_a_spec_means(spec: str, expected: object):
    assert build(spec) == expected


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("shap:3", "unknown figure 'shap' (did you mean 'shape'?): one of circle, dot, shape"),
        ("", "unknown figure '': one of"),
        ("shape:side=3", "unknown key 'side' (did you mean 'sides'?); 'shape' takes sides=INTEGER, length=NUMBER"),
        ("shape:3,4", "'4' is not key=value; 'shape' takes"),
        ("shape:3,sides=4", "key 'sides' is given twice"),
        ("shape", "a value is missing; 'shape' takes sides=INTEGER"),
        ("shape:", "a value is missing"),
        ("shape:3.5", "sides='3.5' is not INTEGER"),
        ("shape:3,length=long", "length='long' is not NUMBER"),
        ("shape:3,filled=yes", "filled='yes' is not true|false"),
        ("shape:2", "sides are 3 or more; 'shape' takes"),
        ("circle", "a value is missing; 'circle' takes radius=NUMBER, name=TEXT"),
        ("dot:1", "'1' is not key=value; 'dot' takes no keys"),
        ("dot:a=1", "unknown key 'a'; 'dot' takes no keys"),
    ],
)
def test_what_a_wrong_spec_is_told(spec: str, told: str):
    with pytest.raises(UsageError) as raised:
        build(spec)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_error_inside_of_what_is_built_is_not_taken_for_a_missing_value():
    def broken(size: int) -> int:
        return size + "x"  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand"):
        specs.build("broken:3", {"broken": broken}, "figure")


def test_text_is_the_spec_again():
    value, expected = Shape(4, 2.5, filled=True, late=2), "shape:sides=4,length=2.5,filled=true,late=2"
    assert specs.text(value, "shape") == expected
    assert build(expected) == value


def test_mixings():
    assert mixing.mixing_from("average") == Average(0.5)
    assert mixing.mixing_from("average:0.25").share(3, 100) == 0.25
    aged = mixing.mixing_from("aged:beta=0.5,half_life=10")
    assert aged == Aged(0.5, 10.0)
    assert [aged.share(30, step) for step in (40, 30, 20, 10)] == [0.5, 0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    "spec",
    [
        "average:1.5",
        "average:-0.1",
        "average:nan",
        "aged:half_life=0",
        "aged:0.5,half_life=nan",
        "aged:half_life=1e999",
        *(f"choco:gamma={gamma}" for gamma in ("0", "-0.1", "1.5", "nan")),
    ],
)
def test_shares_that_make_no_sense_are_refused(spec: str):
    with pytest.raises(UsageError, match=r"share|half_life"):
        mixing.mixing_from(spec)


@pytest.mark.parametrize(("given", "rank"), [("node-b", 1), ("0", 0), ("2", 2), ("7", 3)])
def test_peers_are_given_by_name_or_number(given: str, rank: int):
    assert specs.rank_of(given, "--hub", ["node-a", "node-b", "node-c", "7"]) == rank


@pytest.mark.parametrize("given", ["2", "-1", "1.0", "", "nodea"])
def test_what_is_no_peer_is_refused(given: str):
    meant = r" \(did you mean 'node-a'\?\)" if given == "nodea" else ""
    with pytest.raises(UsageError, match=f"^--hub '{given}' is not a peer: give a rank from 0 to 1, or a name{meant}$"):
        specs.rank_of(given, "--hub", ["node-a", "node-b"])
