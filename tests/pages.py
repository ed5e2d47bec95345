"""Parsing of the documentation's pages and the examples in them.

CONTRIBUTING.md, "Documentation", has the rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

HOUSE = Path(__file__).parents[1]
PAGES = [HOUSE / "README.md", HOUSE / "CONTRIBUTING.md", *sorted((HOUSE / "docs").glob("*.md"))]
LANGUAGES = ("bash", "python", "toml", "text")

_OPENS = re.compile(r"(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<language>.*)")
_COMMENT = re.compile(r" *<!-- (?P<what>not run|run first):(?P<text>.*?)(?P<closed>-->)? *")
_FILE = re.compile(r"# (?P<name>[\w-]+\.\w+)")


@dataclass(frozen=True)
class Example:
    """A fence, or the content of a ``run first`` comment.

    Attributes:
        page: the page.
        line: line of the opening fence, from 1.
        language: ``bash``, ``python``, ...
        text: content without the fence.
        reason: why it is not run; None: it is run.
    """

    page: Path
    line: int
    language: str
    text: str
    reason: str | None = None

    @property
    def place(self) -> str:
        """Page and line, for messages."""
        return f"{self.page.relative_to(HOUSE)}:{self.line}"

    @property
    def file(self) -> str | None:
        """Name of the file that the example shows; None: it is a command or code to run."""
        found = _FILE.fullmatch(self.text.split("\n", 1)[0])
        return found["name"] if found else None


def examples(page: Path) -> list[Example]:
    """Return all fences of a page, and the content of ``run first`` comments, in order.

    Raises:
        ValueError: a fence or a comment is not closed, or a reason has no fence; starts with FILE:LINE.
    """
    lines = page.read_text(encoding="utf-8").split("\n")
    found: list[Example] = []
    reason: str | None = None
    number = 0
    while number < len(lines):
        comment, opens = _COMMENT.fullmatch(lines[number]), _OPENS.fullmatch(lines[number])
        begins = number + 1
        if comment is not None:
            text, number = _comment(page, lines, number, comment)
            if comment["what"] == "not run":
                reason = text
                continue
            found.append(Example(page, begins, "bash", text))
        elif opens is not None:
            closes = range(begins, len(lines))
            number = next((n for n in closes if lines[n].strip() == opens["ticks"]), -1)
            if number < 0:
                raise ValueError(f"{page.name}:{begins}: a fence that is not closed")
            cut = len(opens["indent"])
            text = "".join(f"{line[cut:]}\n" for line in lines[begins:number])
            found.append(Example(page, begins, opens["language"].strip(), text, reason))
            number += 1
        elif reason is not None:
            raise ValueError(f"{page.name}:{number}: 'not run' stands on the line before a fence")
        else:
            number += 1
        reason = None
    return found


def _comment(page: Path, lines: list[str], number: int, opens: re.Match[str]) -> tuple[str, int]:
    """Return the text of a comment, and the number of the line after it."""
    if opens["closed"]:
        return opens["text"].strip(), number + 1
    for last in range(number + 1, len(lines)):
        if "-->" in lines[last]:
            between = [opens["text"], *lines[number + 1 : last], lines[last].partition("-->")[0]]
            return "\n".join(between).strip(), last + 1
    raise ValueError(f"{page.name}:{number + 1}: a comment that is not closed")
