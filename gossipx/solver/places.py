"""Where the fields of a text stand, and what is wrong with one that protobuf refuses.

protobuf's reader keeps no places and speaks of its own types; this goes over the same tokens beside it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from google.protobuf import text_format

from gossipx.errors import UsageError
from gossipx.solver.schema import ENUMS, MESSAGES, Field
from gossipx.specs import suggest

_QUOTES = ("'", '"')
_LONGEST = 60
"""Characters of a wrong value that a message shows."""
_TAKEN = {
    "bool": "true or false",
    "double": "a number",
    "float": "a number",
    "int32": f"a whole number from {-(2**31)} to {2**31 - 1}",
    "int64": f"a whole number from {-(2**63)} to {2**63 - 1}",
    "string": 'text in quotes ("...", on one line)',
    "uint32": f"a whole number from 0 to {2**32 - 1}",
}


class Place(NamedTuple):
    """Where a field is named.

    Attributes:
        line: from 1.
        column: of its first character, from 1.
        name: of the field, as written.
        message: of the schema, in which it was looked for.
        outer: the field whose braces it stands in; None: none.
    """

    line: int
    column: int
    name: str
    message: str
    outer: Place | None

    @property
    def known(self) -> Field | None:
        """What the schema says of it; None: there is no such field."""
        return MESSAGES[self.message].get(self.name)

    @property
    def path(self) -> str:
        """Its name, with those of the fields around it: ``net_param.layer.name``."""
        return f"{self.outer.path}.{self.name}" if self.outer else self.name


class Walk:
    """One pass over a text, as far as it is right; what comes after a mistake may be off, but ends.

    Args:
        text: in protobuf's text format.
        message: of the schema, that it is one of.

    Attributes:
        found: the fields, in order.
        open: those whose braces the text does not close, outermost first.
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
            at = tokens.ParseErrorPreviousToken("")  # the one public way to a token's place
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
        while was_text and tokens.token.startswith(_QUOTES):  # adjacent strings are one
            tokens.NextToken()
        return None


def fault(error: text_format.ParseError, text: str, message: str, path: Path | None) -> UsageError:
    """What protobuf's error means for whoever wrote the text.

    Args:
        error: what ``text_format.Parse`` raised.
        text: what it was given.
        message: of the schema, that the text is one of.
        path: where the text comes from; None: from no file.
    """
    line, column = error.GetLine(), error.GetColumn()
    content = text.split("\n")[line - 1]
    token = text_format.Tokenizer([content[column - 1 :]]).token
    said = str(error).removeprefix(f"{line}:{column} : ").removeprefix(f"'{content if token else ''}': ")
    walk = Walk(text, message)
    reached = [place for place in walk.found if (place.line, place.column) <= (line, column)]
    wanted = re.fullmatch(r'Expected "(.)"\.', said)
    unknown = next((place for place in reached if place.known is None), None)
    if unknown and not wanted:  # it stops at the first name that it does not know
        return UsageError(_unknown(unknown), path, unknown.line, unknown.column)
    last = next(place for place in reversed(reached) if (place.line, place.column) < (line, column))
    if wanted and wanted[1] in "}>":
        last = walk.open[-1]
        return UsageError(f"{last.path}: what it opens is not closed with '{wanted[1]}'", path, last.line, last.column)
    if wanted and wanted[1] == ",":
        return UsageError(f"',' or ']' is missing before {_shown(token)}", path, line, column)
    if wanted:
        return UsageError(f"{last.path}: '{wanted[1]}' is missing before {_shown(token)}", path, line, column)
    if said.startswith("Message type "):
        first = next(place for place in reached if (place.outer, place.name) == (last.outer, last.name))
        return UsageError(f"{last.path} is given twice, first on line {first.line}", path, last.line, last.column)
    if said.startswith("Couldn't parse string"):  # told at the token after it
        return UsageError(f"{last.path}: its escapes make no UTF-8", path, last.line, last.column)
    if not token:
        return UsageError(f"{last.path}: its value is missing", path, last.line, last.column)
    return UsageError(f"{last.path}: {_refused(last, token)}", path, line, column)


def _unknown(place: Place) -> str:
    where = f" in {place.outer.path}" if place.outer else ""
    if not place.name[0].isalpha():
        return f"the name of a field is expected{where}, not {_shown(place.name)}"
    return f"unknown field {_shown(place.name)}{where}{suggest(place.name, MESSAGES[place.message])}"


def _refused(place: Place, token: str) -> str:
    kind = MESSAGES[place.message][place.name].kind
    if kind in ENUMS:
        return f"{_shown(token)} is not one of {', '.join(ENUMS[kind])}{suggest(token.upper(), ENUMS[kind])}"
    if kind == "string" and token.startswith(_QUOTES) and token[0] == token[-1:] and len(token) > 1:
        return f"{_shown(token)} has a wrong escape: a backslash itself is written \\\\"
    return f"{_shown(token)} is not {_TAKEN[kind]}"


def _shown(token: str) -> str:
    """A token in a message of one line."""
    if not token:
        return "the end of the file"
    return repr(token if len(token) <= _LONGEST else token[:_LONGEST] + "...")
