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


def loads(text: str, path: Path) -> dict[str, Any]:
    """Parse ``text``, the content of ``path``.

    Raises:
        UsageError: it is not TOML; the message names the file and the line.
    """
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
