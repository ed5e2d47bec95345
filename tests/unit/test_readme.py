"""The README names what a run with servers or a hub can be told."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from gossipx.server.models import SYNC_MODELS
from gossipx.server.placement import BUILT_IN
from gossipx.settings import KEYS, Key

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SECTIONS = {"hub": "## Around a hub\n", "server": "## Parameter server\n"}


def section(heading: str) -> str:
    """A section of the second level, but for its figures, which come from runs."""
    text = README.split(heading)[1].split("\n## ")[0]
    return text.split("### Figures")[0]


@pytest.mark.parametrize("key", [key for key in KEYS.values() if key.table in SECTIONS], ids=lambda key: key.name)
def test_every_option_is_named_in_its_section(key: Key) -> None:
    """Or its opposite, and each word that it may be; --servers-only does not name --servers."""
    text = section(SECTIONS[key.table])
    assert re.search(rf"--(no-)?{key.option.removeprefix('--')}(?![\w-])", text)
    for word in key.choices:
        assert re.search(rf"[`( ]{word}[`)]", text), word


@pytest.mark.parametrize("name", SYNC_MODELS)
def test_every_sync_model_is_named_with_all_of_its_keys(name: str) -> None:
    text = section(SECTIONS["server"])
    assert f"`{name}" in text
    specs = "".join(re.findall(rf"`{name}(?::[^`]*)?`", text))
    for key in inspect.signature(SYNC_MODELS[name]).parameters:
        assert f"{key}=" in specs or f"`{key}=" in text, key


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_placement_is_named(name: str) -> None:
    assert f"| `{name}` |" in section(SECTIONS["server"])
