"""Solver files that come with gossipx: the settings of Table I (Adaptive Communication, section VI) for Caffe's solver.

The step sizes, which the table leaves out, are those of Caffe's examples as shares of their iterations; see
:mod:`gossipx.tasks.presets`. ``net`` names the built-in model.
"""

from __future__ import annotations

from pathlib import Path

from gossipx.errors import UsageError
from gossipx.specs import suggest

HERE = Path(__file__).parent


def names() -> list[str]:
    """Of the files that are here."""
    return sorted(file.stem for file in HERE.glob("*.prototxt"))


def find(given: str) -> Path:
    """A solver file, by its path or by the name of one that is here.

    Raises:
        UsageError: there is none.
    """
    if given in names():
        return HERE / f"{given}.prototxt"
    if not Path(given).is_file():
        known = names()
        raise UsageError(f"no solver file, and none of {', '.join(known)}{suggest(given, dict.fromkeys(known))}", given)
    return Path(given)


def told(given: str) -> str:
    """The same for processes in other directories: a name as it is, a path from the root."""
    return given if given in names() else str(Path(given).absolute())
