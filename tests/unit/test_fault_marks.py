"""Every row of the table of faults (docs/faults.md) has a test, and every mark names a row."""

from __future__ import annotations

import re

from fault_marks import TESTS, marked


def test_every_fault_has_a_test() -> None:
    page = (TESTS.parent / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert set(marked()) == rows
