"""Built-in solver files: the training settings of Table I (Adaptive Communication, section VI) in Caffe's format.

The table does not say at which iterations the learning rate drops (``stepsize``, ``stepvalue``). The files follow
Caffe's examples: the rate drops after the same fractions of the run; see :mod:`gossipx.tasks.presets`. The field
``net`` names a built-in model instead of a file.
"""

from __future__ import annotations

from pathlib import Path

from gossipx.errors import UsageError
from gossipx.specs import suggest, texts

HERE = Path(__file__).parent


def solver_names() -> list[str]:
    """Return the names of the built-in solver files."""
    return sorted(file.stem for file in HERE.glob("*.prototxt"))


def solver_file(given: str) -> Path:
    """Return the path of a solver file.

    Args:
        given: a path, or the name of a built-in file, which takes precedence.

    Raises:
        UsageError: the file does not exist.
    """
    if given in solver_names():
        return HERE / f"{given}.prototxt"
    if texts.found(Path(given)) != "file":
        known = solver_names()
        suggestion = suggest(given, dict.fromkeys(known))
        raise UsageError(f"solver file not found{suggestion}; the built-in ones are {', '.join(known)}", given)
    return Path(given)


def resolved_solver(given: str) -> str:
    """Return ``given`` in a form that is valid in any working directory: a built-in name or an absolute path."""
    return given if given in solver_names() else str(Path(given).absolute())
