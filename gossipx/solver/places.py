"""Positions of the fields in a prototxt, and clear errors for a text that protobuf rejects.

protobuf's parser keeps no positions, and its messages are about its own types. This module walks the same tokens.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from google.protobuf import text_format

from gossipx.errors import UsageError
from gossipx.solver.forks import fork_of
from gossipx.solver.schema import ENUMS, MESSAGES, Field
from gossipx.specs import suggest

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


class Place(NamedTuple):
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
    outer: Place | None

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
        self.found: list[Place] = []
        self.open: list[Place] = []
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
            place = Place(at.GetLine(), at.GetColumn(), name, message, self.open[-1] if self.open else None)
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

    def _value(self, place: Place) -> None:
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


def fault(error: text_format.ParseError, text: str, message: str, path: Path | None) -> UsageError:
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
        return UsageError(f"',' or ']' is missing before {_shown(token)}", path, line, column)
    if wanted:
        return UsageError(f"{last.path}: '{wanted[1]}' is missing before {_shown(token)}", path, line, column)
    if said.startswith("Message type "):
        first = next(place for place in reached if (place.outer, place.name) == (last.outer, last.name))
        return UsageError(f"{last.path} is given twice, first on line {first.line}", path, last.line, last.column)
    if said.startswith("Couldn't parse string"):  # reported at the next token
        return UsageError(f"{last.path}: its escapes are not UTF-8", path, last.line, last.column)
    if not token:
        return UsageError(f"{last.path}: its value is missing", path, last.line, last.column)
    return UsageError(f"{last.path}: {_refused(last, token)}", path, line, column)


def _unknown(place: Place) -> str:
    where = f" in {place.outer.path}" if place.outer else ""
    if not place.name[0].isalpha():
        return f"the name of a field is expected{where}, not {_shown(place.name)}"
    if fork := fork_of(place.message, place.name):
        return f"field {_shown(place.name)}{where} is of {fork}: gossipx has BVLC's fields only, so remove it"
    # Fields of forks resemble others, such as stepearly and stepvalue.
    meant = suggest(place.name, MESSAGES[place.message], least=0.75)
    meant = meant or ": BVLC's Caffe has none of that name; if it is a fork's, remove it"
    return f"unknown field {_shown(place.name)}{where}{meant}"


def _refused(place: Place, token: str) -> str:
    kind = MESSAGES[place.message][place.name].kind
    if kind in ENUMS:
        return f"{_shown(token)} is not one of {', '.join(ENUMS[kind])}{suggest(token.upper(), ENUMS[kind])}"
    if kind == "string" and token.startswith(_QUOTES) and token[0] == token[-1:] and len(token) > 1:
        return f"{_shown(token)} has a wrong escape: write a backslash as \\\\"
    return f"{_shown(token)} is not {_EXPECTED[kind]}"


def _shown(token: str) -> str:
    """Return a token as shown in a one-line message."""
    if not token:
        return "the end of the file"
    return repr(token if len(token) <= _LONGEST else token[:_LONGEST] + "...")
