"""The examples of the fuzz targets, and the inputs that ``bin/fuzz`` has found."""

from __future__ import annotations

import json

import pytest
from fuzzed import TARGETS


def summary_with(**fields: object) -> bytes:
    """Return the example of a summary with other fields."""
    return json.dumps(json.loads(next(TARGETS["summary"]().examples())) | fields).encode()


FINDS: dict[str, list[bytes]] = {
    "json": [b'{"graph": 5, "nodes": [{"id": 0}, {"id": 1}], "links": [{"source": 0, "target": 1}]}'],
    "summary": [summary_with(wall_seconds=10**400), summary_with(skipped=[10**400, 1])],
}
"""Inputs that broke the reader of a target, shortened."""


@pytest.mark.fault(81)
@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_takes_the_examples_and_refuses_what_was_found_in_one_line(name: str) -> None:
    target = TARGETS[name]()
    examples = list(target.examples())
    assert examples
    for data in [*examples, *FINDS.get(name, []), b""]:
        target.take(data)
