"""Journals beside checkpoints: records are complete or absent, and a checkpoint is followed by all later records."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipx.checkpoint import (
    JournalFile,
    drop_journals,
    from_bytes,
    journal_clocks,
    journal_path,
    records_of,
    to_bytes,
)

ENTRIES = [(b"first", b"12345678"), (b"second", b""), (b"", b"third"), (b"fourth", bytes(range(256)))]


def write(directory: Path, clock: int, entries: list[tuple[bytes, bytes]], goes_on: bool = False) -> Path:
    path = journal_path(directory, clock)
    writing = JournalFile(path, goes_on)
    for words, content in entries:
        writing.append(words, memoryview(content))
    writing.close()
    return path


def read(directory: Path, clock: int) -> list[tuple[bytes, bytes]]:
    return [(words, bytes(content)) for _, words, content in records_of(directory, clock)]


def test_records_are_read_in_order(tmp_path: Path) -> None:
    write(tmp_path / "new", 7, ENTRIES)
    assert read(tmp_path / "new", 7) == ENTRIES
    assert read(tmp_path / "none", 0) == []


def test_a_checkpoint_is_followed_by_its_own_journal_and_all_later_ones(tmp_path: Path) -> None:
    for clock, entry in zip((30, 5, 100), ENTRIES, strict=False):
        write(tmp_path, clock, [entry])
    assert read(tmp_path, 30) == [ENTRIES[0], ENTRIES[2]]
    assert sorted(journal_clocks(tmp_path)) == [5, 30, 100]


@given(cut=st.integers(1, 400))
def test_an_incomplete_record_is_dropped_and_hides_no_later_one(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    directory = tmp_path_factory.mktemp("cut")
    path = write(directory, 0, ENTRIES)
    content = path.read_bytes()
    path.write_bytes(content[: max(0, len(content) - cut)])
    left = read(directory, 0)
    assert left == ENTRIES[: len(left)] and len(left) < len(ENTRIES)
    write(directory, 0, ENTRIES[:1], goes_on=True)
    assert read(directory, 0) == [*left, ENTRIES[0]]


@given(place=st.integers(0, 340), bit=st.integers(0, 7))
def test_reading_stops_at_an_altered_record(tmp_path_factory: pytest.TempPathFactory, place: int, bit: int) -> None:
    directory = tmp_path_factory.mktemp("altered")
    path = write(directory, 0, ENTRIES)
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << bit
    path.write_bytes(content)
    left = read(directory, 0)
    assert left == ENTRIES[: len(left)] and len(left) < len(ENTRIES)


def test_a_new_journal_drops_old_records(tmp_path: Path) -> None:
    write(tmp_path, 0, ENTRIES)
    write(tmp_path, 0, ENTRIES[:1])
    assert read(tmp_path, 0) == ENTRIES[:1]


def test_journals_that_no_checkpoint_needs_are_removed(tmp_path: Path) -> None:
    for clock in (1, 2, 3, 4):
        write(tmp_path, clock, ENTRIES)
    drop_journals(tmp_path, before=2)
    drop_journals(tmp_path, after=3)
    assert sorted(journal_clocks(tmp_path)) == [2, 3]


def test_truncated_packed_state_is_refused() -> None:
    packed = to_bytes({"a": [1.5, "x"]})
    assert from_bytes(memoryview(packed)) == {"a": [1.5, "x"]}
    with pytest.raises(ValueError, match=r"read|Expecting|Unterminated"):
        from_bytes(memoryview(packed)[: len(packed) - 20])
