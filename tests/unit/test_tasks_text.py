"""Text as a task: files, the held-out ends, the vocabulary, windows, and input that is refused in one line."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from gossipx.errors import UsageError
from gossipx.tasks.data import CONTEXT, HELD_OUT, TEST_WINDOWS, Batches, Windows, load
from gossipx.tasks.partition import partition_from


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


# --- the embedded text --------------------------------------------------------------------------------


def test_the_embedded_text_is_54_books_of_three_megabytes(embedded: tuple[Windows, Windows]) -> None:
    train, test = embedded
    assert train.classes == test.classes == 64 and len(test) == TEST_WINDOWS
    assert train.labels.unique().numel() == 54
    assert (1 - HELD_OUT) * 3_000_000 < len(train) * CONTEXT < (1 - HELD_OUT) * 3_100_000
    vocabulary = "\n !'(),-.:;?ABCDEFGHIJKLMNOPQRSTUVWYZabcdefghijklmnopqrstuvwxyz"
    first = characters(train.take(torch.arange(1)), vocabulary)[0]
    assert first == "In the beginning God created the heaven and the earth.\nAnd the ea"


def test_all_characters_of_the_embedded_test_set_are_known(embedded: tuple[Windows, Windows]) -> None:
    assert int(embedded[1].characters.max()) < embedded[0].classes - 1


# --- a user's files ----------------------------------------------------------------------------------


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


# --- refused ------------------------------------------------------------------------------------------


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


def test_a_missing_directory_and_an_unreadable_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere: no such directory: give a directory of UTF-8 text files"):
        load("text", tmp_path / "nowhere")


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
def test_a_file_in_place_of_the_directory_is_told_as_such(tmp_path: Path, task: str) -> None:
    path = write(tmp_path, a="x" * 1000) / "a"
    with pytest.raises(UsageError, match=f"^{path}: is a file: give the directory of the files as --data-dir$"):
        load(task, path)


def test_the_least_text_is_enough(tmp_path: Path) -> None:
    train, test = load("text", write(tmp_path, a="x" * 650))
    assert len(train) == 9 and len(test) == 1
