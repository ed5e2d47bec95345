"""Text: read from files, split into a training and a test set, and served as windows of characters.

Shapes: N windows, T characters of context, B windows per batch.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossipx.errors import UsageError
from gossipx.tasks.seeds import seeded

CONTEXT = 64
"""T: a model predicts each character of a window from those before it in the window, at most this many."""
HELD_OUT = 0.1
"""Fraction of each file, at its end, that is not trained on."""
TEST_WINDOWS = 500
"""Windows of the test set: enough that the mean loss has a standard error of about 0.01 nats per character."""
EMBEDDED = "king-james-bible.tar.gz"
MOST_CODES = 0x110000
"""Number of code points of Unicode."""

Codes = npt.NDArray[np.uint32]
"""A text as its code points."""


@dataclass(frozen=True)
class Windows:
    """Windows of a text.

    Attributes:
        characters: (N, T + 1) int32: each character's place in the vocabulary. The last T are what a model predicts.
        labels: (N,) int64: the number of the file in which a window begins.
        classes: size of the vocabulary.
    """

    characters: Tensor
    labels: Tensor
    classes: int

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: npt.NDArray[np.int64] | Tensor) -> Windows:
        """Return a copy of the windows at ``indices``, for example a peer's part of a partition."""
        index = torch.as_tensor(indices)
        return Windows(self.characters.index_select(0, index), self.labels.index_select(0, index), self.classes)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows at ``index`` and what follows each of their characters, both (B, T) int64."""
        chosen = self.characters.index_select(0, index).long()
        return chosen[:, :-1], chosen[:, 1:]


def load(folder: Path | None = None) -> tuple[Windows, Windows]:
    """Return the training set and the test set of a text.

    The end of each file is held out. What remains of all files, in the order of their paths, is cut into the windows of
    the training set. The test set is a fixed random choice of windows of the held-out ends. The vocabulary has the
    characters of the training text, and one entry for all others.

    Args:
        folder: all files below it are the text, but for those whose name, or a folder's, begins with a dot. None: the
            embedded text, most of the King James Bible.

    Raises:
        UsageError: there are no files, one of them cannot be read or is not UTF-8 text, or text or files are too short.
    """
    texts = _embedded() if folder is None else [_read(path) for path in _files(folder)]
    cuts = [len(text) - round(len(text) * HELD_OUT) for text in texts]
    ends = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    if (count := sum(map(len, ends))) <= CONTEXT:
        total, least = sum(map(len, texts)), round((CONTEXT + 1) / HELD_OUT)
        if total < least:
            raise UsageError(f"has {total} characters of text: give at least {least} as --data-dir", file=folder)
        raise UsageError(
            f"has {total} characters of text, but the held-out ends of its {len(texts)} files, {HELD_OUT:.0%} of each,"
            f" have {count}, and a test set needs {CONTEXT + 1}: join the files of --data-dir into longer ones",
            file=folder,
        )
    begins = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    vocabulary = np.flatnonzero(np.bincount(np.concatenate(begins)))
    train, held_out = _windows(begins, vocabulary), _windows(ends, vocabulary)
    # In random order, so that the first windows are a fair choice too.
    return train, held_out.take(seeded(0).permutation(len(held_out))[:TEST_WINDOWS])


def _windows(texts: list[Codes], vocabulary: npt.NDArray[np.int64]) -> Windows:
    """Cut texts, one after the other, into windows, each of which begins with the last character of the one before."""
    places = np.full(MOST_CODES, len(vocabulary), np.int32)
    places[vocabulary] = np.arange(len(vocabulary))
    characters = torch.from_numpy(places[np.concatenate(texts)]).unfold(0, CONTEXT + 1, CONTEXT)
    ends = np.cumsum([len(text) for text in texts])
    labels = np.searchsorted(ends, np.arange(len(characters)) * CONTEXT, side="right")
    return Windows(characters, torch.from_numpy(labels), len(vocabulary) + 1)


def _embedded() -> list[Codes]:
    path = resources.files("gossipx.tasks") / "embedded" / EMBEDDED
    with path.open("rb") as raw, tarfile.open(fileobj=raw, mode="r:gz") as archive:
        members = ((member.name, archive.extractfile(member)) for member in archive)
        return [_codes(content.read(), Path(name)) for name, content in members if content is not None]


def _files(folder: Path) -> list[Path]:
    """Return the files of a text, in an order that is the same on all machines."""
    names = sorted(path.relative_to(folder).parts for path in folder.rglob("*") if path.is_file())
    shown = [folder.joinpath(*parts) for parts in names if not any(part.startswith(".") for part in parts)]
    if not shown:
        what = "has no text files" if folder.is_dir() else "no such directory"
        raise UsageError(f"{what}: give a directory of UTF-8 text files as --data-dir", file=folder)
    return shown


def _read(path: Path) -> Codes:
    try:
        return _codes(path.read_bytes(), path)
    except OSError as error:
        raise UsageError(
            f"cannot be read ({error.strerror}): remove it, or check its permissions", file=path
        ) from error


def _codes(content: bytes, path: Path) -> Codes:
    """Return the code points of UTF-8 text, without a byte order mark."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 text (at byte {error.start}): convert or remove it", file=path) from None
    if "\0" in text:
        raise UsageError("not text, since it contains a zero byte: remove it", file=path)
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)
