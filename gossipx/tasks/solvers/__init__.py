"""Built-in solver files: the settings of Table I (Adaptive Communication, section VI) for Caffe's solver.

The table omits the step sizes, which are those of Caffe's examples as fractions of their length; see
:mod:`gossipx.tasks.presets`. ``net`` names the built-in model.
"""

from __future__ import annotations

from pathlib import Path

from gossipx.errors import UsageError
from gossipx.specs import suggest

HERE = Path(__file__).parent


def names() -> list[str]:
    """Return the names of the built-in solver files."""
    return sorted(file.stem for file in HERE.glob("*.prototxt"))


def find(given: str) -> Path:
    """Return the path of a solver file, given as a path or as the name of a built-in one.

    Raises:
        UsageError: no such file.
    """
    if given in names():
        return HERE / f"{given}.prototxt"
    if not Path(given).is_file():
        known = names()
        raise UsageError(f"no solver file, and none of {', '.join(known)}{suggest(given, dict.fromkeys(known))}", given)
    return Path(given)


def told(given: str) -> str:
    """Return the name of a built-in file, or the absolute path, for processes in other directories."""
    return given if given in names() else str(Path(given).absolute())
