"""Checkpoints, journals and models on disk: what was saved is restored, and damaged files are detected."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor

from gossipx import checkpoint
from gossipx.checkpoint import (
    HASH,
    MANIFEST,
    CheckpointError,
    CheckpointPart,
    Store,
    pack,
    plain_json,
    records_of,
    unpack,
)
from gossipx.errors import GossipxError, UsageError
from gossipx.model import safetensors_file
from gossipx.settings.interval import CheckpointInterval


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


def parts(value: float) -> dict[str, CheckpointPart]:
    """Return two parts that identify a checkpoint."""
    return {
        "model": CheckpointPart(
            {"weight": torch.full((64,), value), "count": torch.tensor(3)}, {"manifest": ["weight"]}
        ),
        "hub": pack({"centre": torch.full((2, 3), -value), "rounds": 5}),
    }


def loaded(store: Store) -> tuple[int, float] | None:
    """Return the iteration of the loaded checkpoint, and the value that it was made with."""
    found = store.load()
    return None if found is None else (found.iteration, float(found.parts["model"].tensors["weight"][0]))


def is_restored(store: Store, tree: Any) -> bool:
    store.save(7, {"x": pack(tree)})
    found = store.load()
    return found is not None and same(unpack(found.parts["x"]), tree)


def same(one: Any, other: Any) -> bool:
    """Return whether two trees have the same types and the same bits."""
    if isinstance(one, torch.Tensor):
        bits = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
        return (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()) and torch.equal(*bits)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


# --- restoring ----------------------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3) | st.integers() | st.just("$"), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(tree=PLAIN)
def test_plain_data_is_restored_exactly(tree: Any) -> None:
    """Floats to the bit, NaN and infinities, tuples, keys other than text, and the reserved key."""
    part = pack(tree)
    assert not part.tensors
    assert same(unpack(CheckpointPart({}, json.loads(plain_json(part.state)))), tree)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", checkpoint.DTYPES, ids=str)
def test_tensors_are_restored_exactly(store: Store, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Every dtype, scalars and empty tensors, beside tensors of other sizes, with all bit patterns."""
    count = math.prod(shape)
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    tensor = (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)
    tree = {"a": torch.ones(3, dtype=torch.bool), "b": [tensor, tensor], "z": torch.zeros(1, dtype=torch.float64)}
    assert is_restored(store, tree)


def test_strides_are_restored(store: Store) -> None:
    """With other strides, results computed from a momentum may differ in the last bit."""
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tree = {"channels last": image, "transposed": torch.arange(6.0).view(2, 3).t()}
    assert is_restored(store, tree)
    by_name = load_file(store.directory / "00000007" / "x.safetensors")
    assert torch.equal(by_name["channels last"], image), "for other readers it is the tensor as it reads"


def test_names_that_would_collide_are_kept_apart(store: Store) -> None:
    tree = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), "__metadata__": torch.tensor(3), 0: torch.tensor(4)}
    tree["0"] = torch.tensor(5)
    assert is_restored(store, tree)


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"a": [1, {2}]}, "state.a.1 is of type set"),
        ({"f": print}, "state.f is of type builtin_function_or_method"),
        ({"g": torch.Generator()}, "state.g is of type torch"),
        ({(1, 2): 3}, "state has a key of type tuple"),
        ({"w": TwoTensor(torch.ones(2), torch.ones(2))}, "state.w is a TwoTensor"),
        ({"s": torch.eye(3).to_sparse()}, "state.s is a tensor of layout torch.sparse_coo"),
        ({"c": torch.zeros(1, dtype=torch.complex128)}, "dtype torch.complex128"),
    ],
)
def test_state_that_cannot_be_packed_is_named(tree: Any, told: str) -> None:
    with pytest.raises(UsageError, match=r"a checkpoint keeps|keys are text or numbers") as caught:
        pack(tree)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_part_names_cannot_leave_the_directory(store: Store) -> None:
    with pytest.raises(CheckpointError, match="is not a valid part name"):
        store.save(1, {"../x": CheckpointPart()})


# --- which checkpoints are kept -----------------------------------------------------------------------


def names(store: Store) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_checkpoints_are_kept(tmp_path: Path, keep: int) -> None:
    store = Store(tmp_path, keep)
    for iteration in range(0, 60, 10):
        store.save(iteration, parts(iteration))
        assert loaded(store) == (iteration, iteration) and store.find() == iteration
    assert names(store) == [f"{iteration:08d}" for iteration in range(60 - 10 * keep, 60, 10)]


def test_saving_an_earlier_iteration_removes_later_checkpoints(store: Store) -> None:
    """Training that was resumed from an earlier checkpoint replaces the later ones."""
    for iteration in (10, 20):
        store.save(iteration, parts(1))
    store.save(10, parts(2))
    assert loaded(store) == (10, 2) and names(store) == ["00000010"]


def test_an_empty_store_loads_nothing_and_foreign_files_are_not_removed(store: Store) -> None:
    assert store.load() is None and store.find() is None
    store.clean()
    store.directory.mkdir()
    (store.directory / "notes.txt").touch()
    store.save(1, parts(1))
    store.clean()
    assert names(store) == ["00000001", "notes.txt"] and loaded(store) == (1, 1)


# --- damaged files ------------------------------------------------------------------------------------


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def pickled(file: Path) -> None:
    import pickle

    file.write_bytes(pickle.dumps({"a": 1}))


DAMAGES = [truncate, flip, lengthen, pickled, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "hub.json", "hub.safetensors", MANIFEST])
@pytest.mark.fault(30)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    store: Store, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
) -> None:
    """In one log line per damaged checkpoint."""
    store.save(10, parts(1))
    store.save(20, parts(2))
    damage(store.directory / "00000020" / name)
    assert store.find() == 10 and loaded(store) == (10, 1)
    (line,) = caplog.messages
    assert line.startswith(str(store.directory / "00000020" / name)) and "the checkpoint before it" in line
    assert "\n" not in line and "Traceback" not in caplog.text

    caplog.clear()
    damage(store.directory / "00000010" / name)
    assert store.find() is None and loaded(store) is None
    assert [str(store.directory / f"{i:08d}" / name) in line for i, line in zip((20, 10), caplog.messages, strict=True)]
    assert caplog.messages[-1].endswith("no older checkpoint exists")


@given(data=st.data())
@pytest.mark.fault(30)
def test_no_altered_bit_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    store = Store(tmp_path_factory.mktemp("one"))
    store.save(1, parts(1))
    file = data.draw(st.sampled_from(sorted((store.directory / "00000001").iterdir())))
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    before = json.loads((store.directory / "00000001" / MANIFEST).read_bytes())
    file.write_bytes(content)
    try:
        unchanged = json.loads((store.directory / "00000001" / MANIFEST).read_bytes()) == before
    except ValueError:
        unchanged = False
    harmless = file.name == MANIFEST and unchanged  # white space between two JSON tokens
    assert (store.find() is not None) == harmless


def rehashed(manifest: dict[str, Any]) -> bytes:
    """Return a manifest with the hash that belongs to it."""
    manifest.pop(HASH, None)
    return json.dumps({**manifest, HASH: checkpoint._digest(manifest)}).encode()


@pytest.mark.parametrize("told", ["format", "iteration"])
def test_a_manifest_of_another_kind_is_refused(store: Store, caplog: pytest.LogCaptureFixture, told: str) -> None:
    store.save(1, parts(1))
    if told == "iteration":
        (store.directory / "00000001").rename(store.directory / "00000002")
    else:
        file = store.directory / "00000001" / MANIFEST
        file.write_bytes(rehashed({**json.loads(file.read_bytes()), "format": 1}))
    assert loaded(store) is None
    told = "format 1, but this gossipx reads format 2: resume with the" if told == "format" else "iteration 1"
    assert told in caplog.text and told in store.fault()


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


# --- interrupted saves --------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: no cleanup runs after it."""


def steps_of_a_save(tmp_path: Path) -> int:
    """Return the number of system calls of a save, as :func:`counted` counts them."""
    with pytest.MonkeyPatch.context() as patched:
        calls = counted(patched, None, 0)
        store = Store(tmp_path / "counted")
        for iteration in (10, 20, 30):
            calls.clear()
            store.save(iteration, parts(iteration))
    return len(calls)


def counted(patched: pytest.MonkeyPatch, error: BaseException | None, at: int) -> list[str]:
    """Record calls that change the disk or wait for it; call number ``at`` raises ``error``."""
    calls: list[str] = []

    def wrap(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            calls.append(name)
            if error is not None and len(calls) - 1 == at:
                raise error
            return real(*given, **named)

        patched.setattr(owner, name, call)

    writes = (checkpoint, "write_durably")
    for owner, name in ((os, "fsync"), (Path, "mkdir"), (Path, "rename"), (Path, "unlink"), writes):
        wrap(owner, name)
    return calls


@pytest.mark.fault(29)
def test_an_interrupted_save_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    """Killed at any call: the loaded checkpoint is the previous or the new one, never a mixture."""
    steps = steps_of_a_save(tmp_path)
    assert steps > 12
    for at in range(steps):
        store = Store(tmp_path / f"cut-{at}")
        for iteration in (10, 20):
            store.save(iteration, parts(iteration))
        with pytest.MonkeyPatch.context() as patched, pytest.raises(Killed):
            counted(patched, Killed(), at)
            store.save(30, parts(30))
        again = Store(store.directory)
        found = loaded(again)
        assert found in ((20, 20), (30, 30)), at
        again.clean()
        assert all((path / MANIFEST).exists() for path in store.directory.iterdir())
        again.save(40, parts(40))
        assert loaded(again) == (40, 40) and len(names(again)) == 2


@pytest.mark.fault(28)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_leaves_the_old_one_and_nothing_of_the_new(tmp_path: Path, number: int) -> None:
    """At any call; the error names the place and what to change."""
    steps = steps_of_a_save(tmp_path)
    refused = 0
    for at in range(steps):
        store = Store(tmp_path / f"full-{at}")
        store.save(10, parts(10))
        with pytest.MonkeyPatch.context() as patched:
            counted(patched, OSError(number, os.strerror(number)), at)
            try:
                store.save(20, parts(20))
            except CheckpointError as error:
                refused += 1
                told = str(error)
                assert os.strerror(number) in told and "\n" not in told
                if "cannot be written" in told:
                    assert "00000020" in told and "--keep-checkpoints" in told
                    assert names(store) == ["00000010"], at
        assert loaded(store) in ((10, 10), (20, 20))
        store.save(30, parts(30))
        assert loaded(store) == (30, 30)
    assert refused > steps / 2


# --- how often ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "iterations", "seconds"),
    [("500", 500, 0.0), ("60s", 0, 60.0), ("0.5s", 0, 0.5), (" 10 s ", 0, 10.0), ("0", 0, 0.0), ("0s", 0, 0.0)],
)
def test_intervals(text: str, iterations: int, seconds: float) -> None:
    every = CheckpointInterval.parse(text)
    assert every == CheckpointInterval(iterations, seconds) and bool(every) == bool(iterations or seconds)


@pytest.mark.parametrize("text", ["-1", "1.5", "s", "5m", "1e9", "nan", "infs", "9" * 5000, "٣", ""])
def test_an_invalid_interval_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="is not an interval: use iterations such as 500, seconds such as 60s"):
        CheckpointInterval.parse(text)


# --- journals beside checkpoints ----------------------------------------------------------------------


ENTRIES = [(b"first", b"12345678"), (b"second", b""), (b"", b"third"), (b"fourth", bytes(range(256)))]


def write(directory: Path, clock: int, entries: list[tuple[bytes, bytes]], append: bool = False) -> Path:
    path = checkpoint.journal_path(directory, clock)
    writing = checkpoint.JournalFile(path, append)
    for words, content in entries:
        writing.append(words, memoryview(content))
    writing.close()
    return path


def read(directory: Path, clock: int) -> list[tuple[bytes, bytes]]:
    return [(words, bytes(content)) for _, words, content in records_of(directory, clock)]


def test_records_are_read_in_order_and_dropped_by_a_new_journal(tmp_path: Path) -> None:
    write(tmp_path / "new", 7, ENTRIES)
    assert read(tmp_path / "new", 7) == ENTRIES
    write(tmp_path / "new", 7, ENTRIES[:1])
    assert read(tmp_path / "new", 7) == ENTRIES[:1]
    assert read(tmp_path / "none", 0) == []


def test_a_checkpoint_is_followed_by_its_own_journal_and_all_later_ones(tmp_path: Path) -> None:
    for clock, entry in zip((30, 5, 100), ENTRIES, strict=False):
        write(tmp_path, clock, [entry])
    assert read(tmp_path, 30) == [ENTRIES[0], ENTRIES[2]]
    assert sorted(checkpoint.journal_clocks(tmp_path)) == [5, 30, 100]


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
    write(directory, 0, ENTRIES[:1], append=True)
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


def test_journals_that_no_checkpoint_needs_are_removed(tmp_path: Path) -> None:
    for clock in (1, 2, 3, 4):
        write(tmp_path, clock, ENTRIES)
    checkpoint.drop_journals(tmp_path, before=2)
    checkpoint.drop_journals(tmp_path, after=3)
    assert sorted(checkpoint.journal_clocks(tmp_path)) == [2, 3]


def test_truncated_packed_state_is_refused() -> None:
    packed = checkpoint.to_bytes({"a": [1.5, "x"]})
    assert checkpoint.from_bytes(memoryview(packed)) == {"a": [1.5, "x"]}
    with pytest.raises(ValueError, match=r"read|Expecting|Unterminated"):
        checkpoint.from_bytes(memoryview(packed)[: len(packed) - 20])


# --- the safetensors file of a model ----------------------------------------------------------------


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_files_mode_follows_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        safetensors_file.write(tmp_path / "model.safetensors", {"weight": torch.ones(3)}, "give another place")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == mode
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    safetensors_file.write(target, {"weight": torch.ones(3)}, "give another place")
    (tmp_path / ".model.safetensors.tmp").mkdir()
    with pytest.raises(GossipxError, match=r"model\.safetensors: it cannot be written .*; make room, or give another"):
        safetensors_file.write(target, {"weight": torch.zeros(3)}, "give another place")
    assert torch.equal(load_file(target)["weight"], torch.ones(3))


def test_equal_models_are_equal_bytes(tmp_path: Path) -> None:
    """The order of metadata was random: 20 files of one model had several checksums."""
    tensors = {'wärme."0"': torch.ones(3), "bias": torch.zeros(2, dtype=torch.float64), "empty": torch.zeros(0)}
    metadata = {"format": "pt", "gossipx.iteration": "7", "note": 'tab\t "quoted" / ü \x01', "a": "b"}
    files = [tmp_path / f"{number}.safetensors" for number in range(20)]
    for file in files:
        safetensors_file.write(file, tensors, "give another place", metadata)
    assert len({file.read_bytes() for file in files}) == 1
    with safe_open(files[0], "pt") as read:
        assert read.metadata() == metadata
        assert set(read.keys()) == set(tensors) and torch.equal(read.get_tensor("bias"), tensors["bias"])
