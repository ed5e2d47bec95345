"""Data sets: the embedded ones, the readers' errors, batches, text, and how peers divide a set."""

from __future__ import annotations

import gzip
import hashlib
import io
import subprocess
import sys
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossipx.errors import UsageError
from gossipx.tasks import data
from gossipx.tasks.data import CONTEXT, HELD_OUT, TASKS, TEST_WINDOWS, Batches, Dataset, Windows, load, read_idx
from gossipx.tasks.partition import IID, Contiguous, DataPartition, Dirichlet, partition_from

EMBEDDED = Path(data.__file__).parent / "embedded"


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def numbered(count: int) -> Dataset:
    """Return images whose single pixel is their number, which identifies the samples of a batch."""
    numbers = torch.arange(count)
    return Dataset(numbers.float().view(-1, 1, 1, 1), numbers % 10, 10)


# The embedded set


def test_embedded_set_is_stratified_shuffled_normalised_and_of_the_stated_sizes() -> None:
    train, test = load("fashion-mnist")
    assert train.images.shape == (12_000, 1, 28, 28)
    assert test.images.shape == (10_000, 1, 28, 28)
    assert train.labels.bincount().tolist() == [1_200] * 10
    assert test.labels.bincount().tolist() == [1_000] * 10
    assert (train.images.dtype, train.labels.dtype, train.classes) == (torch.float32, torch.int64, 10)
    changes = (train.labels[1:] != train.labels[:-1]).float().mean()
    assert 0.85 < float(changes) < 0.95, "sorted labels change 9 times, random ones in nine places of ten"
    # The constants are the full training set's; a fifth of it and the test set come within a hundredth.
    for part in (train, test):
        assert abs(float(part.images.mean())) < 0.01
        assert abs(float(part.images.std()) - 1) < 0.01


def test_embedded_pixels_undo_to_the_bytes_in_the_file() -> None:
    task, raw = TASKS["fashion-mnist"], read_idx(EMBEDDED / "t10k-images-idx3-ubyte.gz")
    pixels = (load("fashion-mnist")[1].images * task.std[0] + task.mean[0]) * 255
    assert torch.equal(pixels.round().to(torch.uint8)[:, 0], torch.from_numpy(raw.copy()))


def test_embedded_set_is_about_ten_megabytes_and_carries_its_notice() -> None:
    assert sum(path.stat().st_size for path in EMBEDDED.glob("*.gz")) < 11_000_000
    notice = (EMBEDDED / "NOTICE").read_text()
    assert "Copyright (c) 2017 Zalando SE" in notice
    assert "Permission is hereby granted, free of charge" in notice


# Files that are not what they should be


def test_an_unknown_task_gives_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"unknown task 'fashion_mnist' .did you mean 'fashion-mnist'"):
        load("fashion_mnist")


@pytest.mark.parametrize("name", ["fashion-mnist", "mnist", "cifar10", "cifar100"])
def test_missing_files_are_named_with_their_source_and_the_option(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"^{tmp_path}.*https?://"):
        load(name, tmp_path)
    if name != "fashion-mnist":  # which is shipped
        with pytest.raises(UsageError, match=r"https?://.*--data-dir"):
            load(name)


def write_mnist(folder: Path, monkeypatch: pytest.MonkeyPatch, arrays: list[np.ndarray]) -> None:
    contents = [gzip.compress(idx(array)) for array in arrays]
    sums = [(hashlib.md5(content).hexdigest(),) for content in contents]
    monkeypatch.setitem(TASKS, "mnist", replace(TASKS["mnist"], files=dict(zip(data.IDX_FILES, sums, strict=True))))
    for name, content in zip(data.IDX_FILES, contents, strict=True):
        (folder / name).write_bytes(content)


def test_wrong_md5_names_the_file_and_both_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path, monkeypatch, [np.zeros((1, 28, 28)), np.zeros(1)] * 2)
    broken = tmp_path / data.IDX_FILES[2]
    broken.write_bytes(broken.read_bytes() + b"!")
    found, stated = hashlib.md5(broken.read_bytes()).hexdigest(), TASKS["mnist"].files[broken.name][0]
    with pytest.raises(UsageError, match=f"^{broken}: its md5 is {found}, not {stated}: get ") as caught:
        load("mnist", tmp_path)
    assert caught.value.exit_code == 2


def test_a_directory_of_idx_files_is_read_in_order_and_normalised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = np.random.RandomState(0).randint(0, 256, (5, 28, 28))
    write_mnist(tmp_path, monkeypatch, [images[:3], np.array([3, 1, 4]), images[3:], np.array([1, 5])])
    train, test = load("mnist", tmp_path)
    assert train.labels.tolist() == [3, 1, 4]
    assert test.labels.tolist() == [1, 5]
    expected = (torch.from_numpy(images).double() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(torch.cat([train.images, test.images])[:, 0].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("images", "labels", "file"),
    [
        (np.zeros((2, 27, 28)), np.zeros(2), "train-images"),
        (np.zeros((2, 28)), np.zeros(2), "train-images"),
        (np.zeros((2, 28, 28)), np.zeros(3), "train-labels"),
        (np.zeros((2, 28, 28)), np.array([0, 10]), "train-labels"),
    ],
)
def test_images_and_labels_that_do_not_match_are_refused(
    images: np.ndarray, labels: np.ndarray, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path, monkeypatch, [images, labels, images, labels])
    with pytest.raises(UsageError, match=f"{file}.*get it"):
        load("mnist", tmp_path)


# IDX


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    seed=st.integers(0, 2**32 - 1),
    packed=st.booleans(),
)
def test_idx_round_trip(
    shape: tuple[int, ...], seed: int, packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    array = np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)
    path = tmp_path_factory.getbasetemp() / "round-trip"
    path.write_bytes(gzip.compress(idx(array), 1) if packed else idx(array))
    assert np.array_equal(read_idx(path), array)


WHOLE = idx(np.random.RandomState(1).randint(0, 256, (3, 4, 5)))


@given(cut=st.integers(0, len(WHOLE) - 1), packed=st.booleans())
def test_idx_that_ends_early_is_refused_at_every_length(
    cut: int, packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "short"
    path.write_bytes(gzip.compress(WHOLE[:cut], 1) if packed else WHOLE[:cut])
    with pytest.raises(UsageError, match=r"short: .*get it again"):
        read_idx(path)


@given(choice=st.data())
def test_gzip_that_is_cut_or_damaged_is_refused_or_reads_the_same(
    choice: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    packed = bytearray(gzip.compress(WHOLE, mtime=0))
    if choice.draw(st.booleans(), "cut"):
        del packed[choice.draw(st.integers(2, len(packed) - 1), "length") :]
    else:
        packed[choice.draw(st.integers(0, len(packed) - 1), "place")] ^= choice.draw(st.integers(1, 255), "flip")
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(packed)
    try:  # a flip in the header's time or flags may do no harm
        assert read_idx(path).tobytes() == WHOLE[16:]
    except UsageError as error:
        assert str(error).startswith(f"{path}: ")
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PNG\x01" + bytes(12), "not an IDX file"),
        (b"\0\0\x0d\x01\0\0\0\x01" + bytes(4), "not an IDX file of unsigned bytes"),  # floats
        (b"\0\0\x08\x00" + bytes(4), "not an IDX file"),
        (b"\0\0\x08\x05" + b"\0\0\0\x01" * 5 + b"!", "not an IDX file"),
        (b"\0\0\x08\x02\0\0\0\x01", "is too small"),  # a dimension is missing
        (b"\0\0\x08\x04" + b"\xff" * 16 + bytes(100), "is too small"),  # 2^128 bytes, refused before allocation
        (WHOLE + b"!", "continues after its last item"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_malformed_idx_is_refused(content: bytes, says: str, packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "some-idx"
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(UsageError, match=f"some-idx: .*{says}.*get it again"):
        read_idx(path)


# CIFAR-10 and CIFAR-100


@pytest.fixture(params=["cifar10", "cifar100"])
def cifar(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """Write small files in the binary version's format, four images each, into its folder; each has one fine label."""
    task = request.param
    records = replace(data.CIFAR[task], files=dict.fromkeys(data.CIFAR[task].files, 4))
    monkeypatch.setitem(data.CIFAR, task, records)
    (tmp_path / records.folder).mkdir()
    generator = np.random.RandomState(3)
    for number, name in enumerate(records.files):
        rows = generator.randint(0, 256, (4, records.labels + 3072)).astype(np.uint8)
        rows[:, records.labels - 1] = number  # what precedes the fine label is the coarse one
        (tmp_path / records.folder / name).write_bytes(rows.tobytes())
    return task, tmp_path


def pack_cifar(task: str, folder: Path) -> str:
    """Create the archive of the folder with its members in the opposite order, and return its md5."""
    records = data.CIFAR[task]
    with tarfile.open(folder / records.archive, "w:gz") as tar:
        for name in reversed(records.files):
            tar.add(folder / records.folder / name, f"{records.folder}/{name}")
        readme = tarfile.TarInfo(f"{records.folder}/readme.html")
        readme.size = 5
        tar.addfile(readme, io.BytesIO(b"hello"))
    return hashlib.md5((folder / records.archive).read_bytes()).hexdigest()


def test_a_cifar_folder_is_read_in_order_as_red_green_blue_with_its_fine_labels(cifar: tuple[str, Path]) -> None:
    task, folder = cifar
    records, (train, test) = data.CIFAR[task], load(*cifar)
    count = len(records.files)
    assert (train.classes, test.classes) == ((10, 10) if task == "cifar10" else (100, 100))
    assert train.labels.tolist() == [label for label in range(count - 1) for _ in range(4)]
    assert test.labels.tolist() == [count - 1] * 4
    last = (folder / records.folder / [*records.files][-2]).read_bytes()  # of the training set
    raw = np.frombuffer(last, np.uint8)[records.labels : records.labels + 3072]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (TASKS[task].mean, TASKS[task].std))
    expected = (torch.from_numpy(raw.reshape(3, 32, 32).copy()) / 255 - mean) / std
    torch.testing.assert_close(train.images[-4], expected, atol=1e-5, rtol=1e-5)


def test_a_cifar_archive_is_checked_and_reads_the_same_as_the_folder_whatever_its_order(
    cifar: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, _ = cifar
    from_folder = load(*cifar)
    archive, found = data.CIFAR[task].archive, pack_cifar(*cifar)
    published = {"cifar10": "c32a1d4ab5d03f12", "cifar100": "03b5dce01913d631"}[task]
    with pytest.raises(UsageError, match=f"{archive}: its md5 is {found}, not {published}"):
        load(*cifar)
    monkeypatch.setitem(TASKS, task, replace(TASKS[task], files={archive: (found,)}))
    for ours, theirs in zip(load(*cifar), from_folder, strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)


def test_a_cifar_file_of_another_size_or_with_an_unknown_label_is_named(cifar: tuple[str, Path]) -> None:
    task, folder = cifar
    records = data.CIFAR[task]
    name = [*records.files][-1]
    path = folder / records.folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(UsageError, match=rf"{name}: does not have {len(whole)} bytes: get .*https"):
        load(*cifar)
    path.write_bytes(whole[: records.labels - 1] + bytes([TASKS[task].classes]) + whole[records.labels :])
    with pytest.raises(UsageError, match=rf"{name}: has a label above {TASKS[task].classes - 1}"):
        load(*cifar)
    path.unlink()
    with pytest.raises(UsageError, match=rf"{name}: no such file: get .*https"):
        load(*cifar)


# Batches


@given(count=st.integers(1, 40), size=st.integers(1, 50), seed=st.integers(0, 2**64 - 1), epochs=st.integers(1, 3))
def test_every_epoch_has_every_sample_once_however_batches_are_cut(
    count: int, size: int, seed: int, epochs: int
) -> None:
    batches = Batches(numbered(count), size, seed)
    drawn = [next(batches) for _ in range(-(-count * epochs // size))]
    assert all(images.shape == (size, 1, 1, 1) for images, _ in drawn)
    stream = torch.cat([images.flatten() for images, _ in drawn]).long()
    assert torch.equal(torch.cat([labels for _, labels in drawn]), stream % 10)
    for epoch in range(epochs):
        assert sorted(stream[epoch * count : (epoch + 1) * count].tolist()) == list(range(count))


def test_epochs_and_seeds_shuffle_differently_and_one_seed_alike() -> None:
    def order(seed: int) -> list[list[float]]:
        batches = Batches(numbered(50), 50, seed)
        return [next(batches)[0].flatten().tolist() for _ in range(3)]

    assert order(7) == order(7)
    before = torch.get_rng_state()
    orders = [tuple(epoch) for seed in (7, 8, -7) for epoch in order(seed)]
    assert len(set(orders)) == 9
    assert torch.equal(torch.get_rng_state(), before), "the global generator is the script's"


@given(count=st.integers(1, 20), size=st.integers(1, 25), batch=st.integers(0, 30))
def test_seek_continues_as_an_uninterrupted_run(count: int, size: int, batch: int) -> None:
    unbroken, resumed = Batches(numbered(count), size, 5), Batches(numbered(count), size, 5)
    for _ in range(batch):
        next(unbroken)
    resumed.seek(batch)
    for _ in range(3):
        assert torch.equal(next(resumed)[0], next(unbroken)[0])


def test_batches_of_nothing_and_labels_of_another_number_are_refused() -> None:
    with pytest.raises(UsageError, match="no training data"):
        Batches(numbered(3).take(np.empty(0, np.int64)), 4, 0)
    with pytest.raises(UsageError, match="not 0"):
        Batches(numbered(3), 0, 0)
    with pytest.raises(ValueError, match="do not match"):
        Dataset(torch.zeros(3, 1, 2, 2), torch.zeros(4, dtype=torch.int64), 10)


def test_take_copies_the_named_samples_in_order() -> None:
    whole = numbered(10)
    part = whole.take(np.array([7, 2]))
    assert part.images.flatten().tolist() == [7, 2]
    assert part.labels.tolist() == [7, 2]
    part.images.zero_()
    assert whole.images.flatten().tolist() == list(range(10))


# --- text -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> tuple[Windows, Windows]:
    train, test = load("text")
    assert isinstance(train, Windows) and isinstance(test, Windows)
    return train, test


def characters(windows: Windows, vocabulary: str) -> list[str]:
    """Return each window as text; ? for a character outside of the vocabulary."""
    return ["".join((vocabulary + "?")[place] for place in window) for window in windows.characters.tolist()]


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", newline="")
    return folder


def test_the_embedded_text_is_54_books_of_three_megabytes(embedded: tuple[Windows, Windows]) -> None:
    train, test = embedded
    assert train.classes == test.classes == 64 and len(test) == TEST_WINDOWS
    assert train.labels.unique().numel() == 54
    assert (1 - HELD_OUT) * 3_000_000 < len(train) * CONTEXT < (1 - HELD_OUT) * 3_100_000
    vocabulary = "\n !'(),-.:;?ABCDEFGHIJKLMNOPQRSTUVWYZabcdefghijklmnopqrstuvwxyz"
    first = characters(train.take(torch.arange(1)), vocabulary)[0]
    assert first == "In the beginning God created the heaven and the earth.\nAnd the ea"
    assert int(test.characters.max()) < train.classes - 1, "all characters are known"


def test_the_end_of_each_file_is_held_out_and_the_rest_is_cut_into_windows(tmp_path: Path) -> None:
    """Files are read in the order of their paths; a window begins with the last character of the one before."""
    one, two = "ab" * 500, "cd" * 500 + "é"
    write(tmp_path, **{"b.txt": two, "a/x.md": one, ".git/config": "X" * 1000, "a/.hidden": "X" * 1000, "empty": ""})
    train, test = load("text", tmp_path)
    assert train.classes == 5
    text = one[:900] + two[:901]
    assert characters(train, "abcd") == [text[at : at + CONTEXT + 1] for at in range(0, 1801 - CONTEXT, CONTEXT)]
    assert train.labels.tolist() == [0] * 15 + [1] * 13
    ends = one[900:] + two[901:-1] + "?"
    held_out = [ends[at : at + CONTEXT + 1] for at in range(0, 200 - CONTEXT, CONTEXT)]
    assert sorted(characters(test, "abcd")) == sorted(held_out)


def test_a_batch_is_windows_and_the_character_that_follows_each(embedded: tuple[Windows, Windows]) -> None:
    inputs, following = next(Batches(embedded[0], 5, 3))
    assert inputs.shape == following.shape == (5, CONTEXT) and inputs.dtype == following.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], following[:, :-1])


def test_the_vocabulary_is_that_of_the_training_text_and_an_entry_for_others(tmp_path: Path) -> None:
    train, test = load("text", write(tmp_path, a="x" * 900 + "y" * 100))
    assert train.classes == 2 and not train.characters.any()
    assert (test.characters == 1).all()


def test_peers_of_any_process_agree_on_the_text(tmp_path: Path) -> None:
    """Neither the order in which a folder lists its files nor the hash of strings may matter."""
    write(tmp_path, **{name: name * 300 for name in "zyxabc"})
    code = (
        "import sys, zlib; from pathlib import Path; from gossipx.tasks.data import load\n"
        "print([zlib.crc32(part.characters.contiguous().numpy()) for part in load('text', Path(sys.argv[1]))])"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    here = [zlib.crc32(part.characters.contiguous().numpy()) for part in load("text", tmp_path)]
    assert done.stdout.strip() == str(here)


@pytest.mark.parametrize(("spec", "alone"), [("iid", 0.0), ("dirichlet:alpha=0.01", 0.7), ("contiguous", 0.8)], ids=str)
def test_a_partition_gives_peers_shares_of_each_file(
    embedded: tuple[Windows, Windows], spec: str, alone: float
) -> None:
    """``alone`` is the least share of the text that is in files of which one peer has nearly all."""
    labels = embedded[0].labels.numpy()
    parts = partition_from(spec).split(labels, 4, 0)
    counts = np.stack([np.bincount(labels[part], minlength=54) for part in parts])
    owned = counts.max(0) > 0.9 * counts.sum(0)
    share = counts.sum(0)[owned].sum() / counts.sum()
    assert share >= alone and (alone > 0 or share < 0.02)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, r"folder: has no text files: give a directory of UTF-8 text files as --data-dir"),
        (b"", r"folder: has 0 characters of text: give at least 650 as --data-dir"),
        (b"x" * 640, r"folder: has 640 characters of text: give at least 650 as --data-dir"),
        (b"caf\xe9" * 1000, r"folder/a: not UTF-8 text \(at byte 3\): convert or remove it"),
        (b"\x7fELF\0" * 1000, r"folder/a: not text, since it contains a zero byte: remove it"),
    ],
    ids=["no files", "empty", "too short", "latin-1", "binary"],
)
def test_input_that_is_no_text_is_refused_in_one_line(tmp_path: Path, content: bytes | None, told: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if content is not None:
        (folder / "a").write_bytes(content)
    with pytest.raises(UsageError, match=told) as refused:
        load("text", folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("length", "files", "held_out"), [(5, 200, 0), (14, 64, 64)])
def test_files_too_short_for_a_test_set_are_told_as_such(
    tmp_path: Path, length: int, files: int, held_out: int
) -> None:
    """However many characters they have together; in one file these would be enough."""
    write(tmp_path, **{str(number): "x" * length for number in range(files)})
    told = (
        f"has {files * length} characters of text, but the held-out ends of its {files} files, 10% of each, have"
        f" {held_out}, and a test set needs 65: join the files of --data-dir into longer ones"
    )
    with pytest.raises(UsageError, match=f"{told}$"):
        load("text", tmp_path)


@pytest.mark.parametrize("task", ["text", "mnist", "cifar10"])
def test_a_file_in_place_of_the_directory_and_a_missing_one_are_told_as_such(tmp_path: Path, task: str) -> None:
    path = write(tmp_path, a="x" * 1000) / "a"
    with pytest.raises(UsageError, match=f"^{path}: is a file: give the directory of the files as --data-dir$"):
        load(task, path)
    with pytest.raises(UsageError, match=r"nowhere\S*: (no such|neither)"):
        load(task, tmp_path / "nowhere")


def test_the_least_text_is_enough(tmp_path: Path) -> None:
    train, test = load("text", write(tmp_path, a="x" * 650))
    assert len(train) == 9 and len(test) == 1


# --- partitions -------------------------------------------------------------------------------------


partitions = st.one_of(
    st.sampled_from([IID(), Contiguous()]),
    st.floats(1e-6, 1e6).map(Dirichlet),
    st.sampled_from([Dirichlet(1e-6), Dirichlet(1e308)]),
)
labellings = st.lists(st.integers(0, 12), max_size=120).map(lambda labels: np.array(labels, np.uint8))
seeds = st.integers(0, 2**64 - 1)
BALANCED = np.arange(12_000) % 10


def class_counts(parts: list[np.ndarray], labels: np.ndarray) -> np.ndarray:
    """(parts, classes)."""
    return np.stack([np.bincount(labels[part], minlength=10) for part in parts])


@given(partition=partitions, labels=labellings, parts=st.integers(1, 40), seed=seeds)
def test_parts_are_disjoint_and_complete_and_not_empty_if_possible(
    partition: DataPartition, labels: np.ndarray, parts: int, seed: int
) -> None:
    split = partition.split(labels, parts, seed)
    assert len(split) == parts
    assert sorted(np.concatenate(split).tolist()) == list(range(len(labels)))
    assert sum(len(part) > 0 for part in split) == min(parts, len(labels))
    for part in split:
        assert part.dtype == np.int64
        assert np.array_equal(part, np.sort(part))


@given(partition=partitions, labels=labellings, parts=st.integers(1, 9), seed=seeds)
def test_every_peer_computes_the_same_split(
    partition: DataPartition, labels: np.ndarray, parts: int, seed: int
) -> None:
    again = partition.split(labels.astype(np.int64), parts, seed)
    for ours, theirs in zip(partition.split(labels, parts, seed), again, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("partition", [IID(), Dirichlet()])
def test_another_seed_is_another_split(partition: DataPartition) -> None:
    splits = [tuple(partition.split(BALANCED, 4, seed)[0].tolist()) for seed in (0, 1, 2**32, 2**63)]
    assert len(set(splits)) == 4


def test_a_split_is_fixed_for_good() -> None:
    """Peers with different versions of numpy must agree, so that these numbers must never change."""
    labels = np.arange(12) % 3
    iid, skewed = (partition.split(labels, 3, 1) for partition in (IID(), Dirichlet(0.5)))
    assert [part.tolist() for part in iid] == [[2, 6, 9, 11], [1, 3, 7, 8], [0, 4, 5, 10]]
    assert [part.tolist() for part in skewed] == [[0, 6, 9], [2, 3, 5, 7, 8, 10, 11], [1, 4]]


@given(labels=labellings, parts=st.integers(1, 40), seed=seeds)
def test_iid_parts_differ_by_one_sample_at_most(labels: np.ndarray, parts: int, seed: int) -> None:
    sizes = [len(part) for part in IID().split(labels, parts, seed)]
    assert max(sizes) - min(sizes) <= 1


def test_iid_parts_have_all_classes_alike() -> None:
    counts = class_counts(IID().split(BALANCED, 8, 0), BALANCED)
    # 150 expected of each; a hypergeometric count has a deviation of 11, so that 5 of them bound 80 counts.
    assert np.abs(counts - 150).max() < 55


def test_dirichlet_proportions_have_the_distributions_mean_and_variance() -> None:
    """A component of Dir(α, ..., α) over n parts has mean 1/n and variance (n − 1) / (n² (nα + 1))."""
    parts, alpha = 4, 0.3
    drawn = [class_counts(Dirichlet(alpha).split(BALANCED, parts, seed), BALANCED) / 1_200 for seed in range(100)]
    shares = np.concatenate(drawn, axis=1)  # (parts, 1,000 draws)
    variance = (parts - 1) / (parts**2 * (parts * alpha + 1))
    # Four standard errors of a mean, with 1,000 independent draws of each component.
    assert np.abs(shares.mean(1) - 1 / parts).max() < 4 * np.sqrt(variance / 1_000)
    assert np.abs(shares.var(1) / variance - 1).max() < 0.15


def test_empty_parts_get_one_sample_each_from_the_largest() -> None:
    labels = np.zeros(50, np.int64)  # one class and a tiny alpha: one part draws everything
    sizes = sorted(len(part) for part in Dirichlet(1e-6).split(labels, 6, 0))
    assert sizes == [1, 1, 1, 1, 1, 45]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("dirichlet:alpha=0", "alpha must be a finite number above 0"),
        ("dirichlet:alpha=nan", "alpha must be a finite number above 0"),
        ("dirichlet:alpha=inf", "alpha must be a finite number above 0"),
        ("iid:alpha=1", "takes no keys"),
        ("dirichlett", "did you mean 'dirichlet'"),
    ],
)
def test_wrong_specs_say_what_would_be_right(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        partition_from(spec)


def test_contiguous_parts_are_the_data_set_in_order_whatever_the_seed() -> None:
    parts = Contiguous().split(BALANCED[:11], 4, seed=7)
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


@pytest.mark.parametrize("partition", [IID(), Dirichlet(), Contiguous()])
def test_no_parts_are_refused(partition: DataPartition) -> None:
    with pytest.raises(UsageError, match="at least one part, not 0"):
        partition.split(BALANCED, 0, 0)
