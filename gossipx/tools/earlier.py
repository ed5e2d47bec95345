"""Runs of one setting, which differ in their seeds or policies alone and are compared with each other."""

from __future__ import annotations

import json
from pathlib import Path

from gossipx.errors import UsageError
from gossipx.launch.directory import SCRIPT_FILE, settings_in
from gossipx.settings import files

OF_ONE_RUN = {"run": ("peers", "name", "logdir", "overwrite", "seed"), "sync": ("policy",)}
"""Settings, by table, in which runs of one :func:`setting_of` may differ."""


def setting_of(run: Path) -> str | None:
    """Return the settings and the script of a run as text, without its seed, its policy and where it was written.

    Args:
        run: its directory, or a file in it.

    Returns:
        Equal texts for runs of the same setting; None: the directory does not have the settings.
    """
    directory = run if run.is_dir() else run.parent
    try:
        tables = files.resolve(settings_in(directory)).tables
    except UsageError:  # for example, only the summary was kept
        return None
    for table, names in OF_ONE_RUN.items():
        for name in names:
            del tables[table][name]
    script = directory / SCRIPT_FILE
    return json.dumps([tables, script.read_text(encoding="utf-8") if script.is_file() else None], sort_keys=True)
