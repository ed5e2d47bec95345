"""Manifests of any content: a checkpoint is complete, or it is damaged and named, and the one before it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gossipx.checkpoint import HASH, MANIFEST, CheckpointPart, Store, _digest


def rehashed(manifest: dict[str, Any]) -> bytes:
    """Return a manifest with the hash that belongs to it."""
    manifest.pop(HASH, None)
    return json.dumps({**manifest, HASH: _digest(manifest)}).encode()


@pytest.mark.fault(58)
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"format": ' + b"[" * 900 + b"]" * 900 + b"}",
        b"\xff\xfe",
        b"null",
        b'{"format": 2, "iteration": ' + b"9" * 5000 + b"}",
        b'{"format": "\\ud800"}',
        *(
            rehashed({"format": 2, "iteration": 20, "files": {}, **wrong})
            for wrong in (
                {"files": None},
                {"files": ["model.json"]},
                {"files": {"model.json": 1}},
                {"files": {"model.json": {"bytes": 1}}},
                {"files": {"../../secret": {"bytes": 1, HASH: ""}}},
                {"iteration": None},
                {"iteration": [20]},
                {"format": {}},
            )
        ),
        rehashed({"format": 2, "files": {}}),
    ],
    ids=lambda content: content[:60].decode("latin-1"),
)
def test_a_manifest_of_any_other_form_is_a_damaged_checkpoint(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    for iteration in (10, 20):
        store.save(iteration, {"model": CheckpointPart(state=iteration)})
    manifest = tmp_path / "00000020" / MANIFEST
    manifest.write_bytes(content)
    assert store.find() == 10 and store.find_complete() == {10}
    found = store.load()
    assert found is not None and (found.iteration, found.parts["model"].state) == (10, 10)
    [told] = caplog.messages
    assert told.startswith(f"{manifest}: ") and "\n" not in told and len(told) < 400
