"""A TOML parser whose errors name the file and the line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from gossipx.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


MOST = 2**19
"""Characters of a file, which Python's parser reads in half a second."""
DEEPEST = 16
"""Parts of a key. For one with 20,000 the parser takes 1.5 GB; the settings of gossipx have two."""
_DEEP_KEY = re.compile(
    rf"""(?:^|[\[{{,])[ \t]*(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{DEEPEST}}}""", re.MULTILINE
)


def loads(text: str, path: Path) -> dict[str, Any]:
    """Parse ``text``, the content of ``path``.

    Raises:
        UsageError: it is not TOML; the message names the file and the line.
    """
    if len(text) > MOST:
        raise UsageError(f"more than {MOST >> 10} KiB of TOML", path)
    if deep := _DEEP_KEY.search(text):
        line = text.count("\n", 0, deep.end()) + 1
        raise UsageError(f"a key has more than {DEEPEST} parts between dots", path, line)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError("it is nested too deeply", path) from None
    except ValueError as error:
        if not isinstance(error, tomllib.TOMLDecodeError):  # Python's int refuses numbers of more than 4300 digits
            number = re.search(r"[=\[,]\s*[+-]?[\d_]{4000}", text)
            line = text.count("\n", 0, number.end()) + 1 if number else 1
            raise UsageError("a number has too many digits", path, line) from None
        at = re.search(r"line (\d+)", str(error))
        last = max(1, len(text.splitlines()))  # "at end of document" has no number
        raise UsageError(f"not TOML: {error}", path, int(at.group(1)) if at else last) from error
