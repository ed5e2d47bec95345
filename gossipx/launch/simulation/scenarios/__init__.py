"""The scenarios that gossipx has: a TOML file each, whose first line says what it shows."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from gossipx.errors import UsageError
from gossipx.specs import suggest


def described() -> dict[str, str]:
    """Return by name what each scenario shows."""
    files = sorted(resources.files(__name__).iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".toml"): file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        for file in files
        if file.name.endswith(".toml")
    }


def find(given: str) -> Path:
    """Return the file of a scenario: the given one, or that of a scenario of gossipx.

    Raises:
        UsageError: it is missing, and no scenario of gossipx has that name.
    """
    if Path(given).is_file():
        return Path(given)
    known = described()
    if given not in known:
        raise UsageError(
            f"no such scenario{suggest(given, known)}: give a TOML file, or one of {', '.join(known)}", Path(given)
        )
    return Path(str(resources.files(__name__) / f"{given}.toml"))
