"""The settings with which a run resumes, from those that it has recorded and those that are given now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossipx.assembly.settings import effective_config
from gossipx.config import files
from gossipx.launch import resume


def resumed(directory: Path, given: dict[str, Any], **first: Any) -> tuple[str, str | None]:
    """Return policy and outer optimizer of a run with settings ``first`` that resumes with ``given``."""
    began = effective_config(files.resolve({"name": directory.name, **first}), 2, has_script=False)
    (directory / "config.toml").write_text(files.dump(began))
    (directory / "hosts.txt").write_text("localhost slots=2\n")
    settings, _, _ = resume.settings_of(str(directory), given, [], {})
    made = effective_config(settings, 2, has_script=False)
    return made.sync.policy, made.sync.outer


@pytest.mark.parametrize("period", ["tau:50", "tau:20"])
def test_another_period_keeps_the_momentum_that_checkpoints_contain(tmp_path: Path, period: str) -> None:
    """Also that of the default policy, although a given policy has none by default."""
    assert resumed(tmp_path, {"policy": period}) == (period, "momentum:0.6")
    assert resumed(tmp_path, {}) == ("tau:50", "momentum:0.6")


def test_a_run_without_momentum_resumes_without(tmp_path: Path) -> None:
    assert resumed(tmp_path, {}, policy="tau:10") == ("tau:10", None)
    assert resumed(tmp_path, {"policy": "tau:20"}, policy="tau:10") == ("tau:20", None)
