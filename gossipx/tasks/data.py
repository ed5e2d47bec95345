"""Data sets: read from the published files, held in memory and served in shuffled batches.

Images are normalised. Text is split into a training and a test set, and cut into windows of characters.

Shapes: N images or windows, C channels, H×W pixels, T characters of context, B samples per batch.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.resources
import itertools
import math
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossipx.errors import UsageError
from gossipx.specs import suggest, toml
from gossipx.tasks.partition import seeded

Bytes = npt.NDArray[np.uint8]
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
class Dataset:
    """Labelled images in memory.

    Attributes:
        images: (N, C, H, W) float32, normalised by the task's mean and standard deviation per channel.
        labels: (N,) int64, each below ``classes``.
        classes: number of classes of the task.
    """

    images: Tensor
    labels: Tensor
    classes: int

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(f"images {tuple(self.images.shape)} and labels {tuple(self.labels.shape)} do not match")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: npt.NDArray[np.int64] | Tensor) -> Dataset:
        """Return a copy of the samples at ``indices``, for example a peer's part of a partition."""
        index = torch.as_tensor(indices)
        return Dataset(self.images.index_select(0, index), self.labels.index_select(0, index), self.classes)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images (B, C, H, W) and labels (B,) at ``index``."""
        return self.images.index_select(0, index), self.labels.index_select(0, index)


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


Samples = Dataset | Windows
"""The data of a task; both kinds have ``labels``, ``classes``, ``take`` and ``batch``."""


class Batches:
    """An endless iterator over shuffled batches of exactly ``batch_size`` samples, with what a model shall predict.

    Each epoch is a new shuffle of the whole set. The epochs form one stream, which is cut every ``batch_size`` samples.
    So a batch may span two epochs, no sample is left out, and a batch larger than the set spans several epochs.

    Args:
        dataset: a data set with at least one sample.
        batch_size: B, from 1.
        generator_seed: determines the order of all batches.

    Raises:
        UsageError: the data set is empty, or the batch size is below 1.
    """

    def __init__(self, dataset: Samples, batch_size: int, generator_seed: int):
        if not len(dataset):
            raise UsageError("no training data for this peer: use fewer peers or more data")
        if batch_size < 1:
            raise UsageError(f"a batch needs at least one sample, not {batch_size}")
        self._dataset, self._size, self._seed = dataset, batch_size, generator_seed
        self.seek(0)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        pieces, missing = [], self._size
        while missing:
            if self._at == len(self._order):
                self._open(self._epoch + 1)
            piece = self._order[self._at : self._at + missing]
            self._at += len(piece)
            missing -= len(piece)
            pieces.append(piece)
        index = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return self._dataset.batch(index)

    def seek(self, batch: int) -> None:
        """Continue with batch number ``batch``, from 0, so that a resumed run sees the same batches."""
        epoch, at = divmod(batch * self._size, len(self._dataset))
        self._open(epoch)
        self._at = at

    def _open(self, epoch: int) -> None:
        self._epoch, self._at = epoch, 0
        self._order = torch.from_numpy(seeded(self._seed, epoch).permutation(len(self._dataset)))


@dataclass(frozen=True)
class Task:
    """A built-in task: the source of its data and the dimensions that a model must fit.

    Attributes:
        classes: number of classes; of text, the size of the embedded text's vocabulary.
        channels: C; 0: text.
        pixels: H = W; of text, the context T.
        model: the default model.
        source: the files to download and their location, for messages.
        mean: mean of each channel over the full training set, for pixels from 0 to 1; none: text.
        std: standard deviation of each channel, for the same pixels; none: text.
        files: accepted md5 sums by the name of a file in ``--data-dir``; none: any text files.
    """

    classes: int
    channels: int
    pixels: int
    model: str
    source: str
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)


IDX_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


@dataclass(frozen=True)
class CifarRecords:
    """The files of CIFAR's binary version: records of label bytes, then 32×32 red, green and blue bytes.

    Attributes:
        archive: name of the published archive.
        folder: of its files, in the archive and unpacked.
        files: number of records by file; the last one is the test set.
        labels: label bytes of a record, of which the last is the fine one.
    """

    archive: str
    folder: str
    files: Mapping[str, int]
    labels: int


_TABLES = importlib.resources.files("gossipx.tasks").joinpath("datasets.toml").read_text("utf-8")
_CONTENT = toml.loads(_TABLES, Path("datasets.toml"))
TASKS = msgspec.convert(_CONTENT["tasks"], dict[str, Task])
CIFAR = msgspec.convert(_CONTENT["cifar"], dict[str, CifarRecords])


def load(task_name: str, data_dir: Path | None = None) -> tuple[Samples, Samples]:
    """Return the training set and the test set of a built-in task.

    Args:
        task_name: a key of ``TASKS``.
        data_dir: the directory of the published files: the four ``.gz`` files of ``fashion-mnist`` or ``mnist``; for
            ``cifar10`` or ``cifar100`` the archive of the binary version, or its unpacked folder. The md5 sums are
            checked, or the sizes of unpacked files. For ``text`` all files below it. None: the embedded text, or the
            embedded subset of ``fashion-mnist``, with 12,000 training images and all test images.

    Raises:
        UsageError: the task is unknown, ``data_dir`` is a file, or a file is missing, damaged or not the published one.
    """
    if task_name not in TASKS:
        raise UsageError(f"unknown task '{task_name}'{suggest(task_name, TASKS)}: one of {', '.join(sorted(TASKS))}")
    if data_dir is not None:
        with _data_errors(data_dir):
            if data_dir.is_file():
                raise UsageError("is a file: give the directory of the files as --data-dir", file=data_dir)
    if task_name == "text":
        return text_data(data_dir)
    task = TASKS[task_name]
    if data_dir is not None:
        records = CIFAR.get(task_name)
        return _load_idx(task, data_dir) if records is None else _load_cifar(task, records, data_dir)
    if task_name != "fashion-mnist":
        raise UsageError(
            f"task '{task_name}' is not included in gossipx: get {task.source}, and give their directory as --data-dir"
        )
    with importlib.resources.as_file(importlib.resources.files("gossipx.tasks") / "embedded") as folder:
        return _read_idx_sets(task, folder)


# --- images ----------------------------------------------------------------------------------------


def read_idx(path: Path) -> Bytes:
    """Return the bytes of an IDX file, plain or gzipped, in the shape of its header (at most four dimensions).

    The format is described at http://yann.lecun.com/exdb/mnist. A header that states more than the file can contain is
    refused before memory is allocated.

    Raises:
        UsageError: the file cannot be read, is not IDX of unsigned bytes, or its length does not match its header.
    """
    with _data_errors(path), path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream = gzip.GzipFile(fileobj=raw) if packed else raw
        head = stream.read(4)
        if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 4:
            raise UsageError("not an IDX file of unsigned bytes: get it again", file=path)
        sizes = stream.read(4 * head[3])
        shape = tuple(int.from_bytes(sizes[at : at + 4], "big") for at in range(0, len(sizes), 4))
        expected = math.prod(shape)
        # Deflate compresses 1032:1 at most.
        largest = os.fstat(raw.fileno()).st_size * (1032 if packed else 1)
        if len(sizes) < 4 * head[3] or not 0 < expected <= largest:
            raise UsageError(f"states {'×'.join(map(str, shape))} bytes but is too small: get it again", file=path)
        content = stream.read(expected + 1)  # the extra byte makes gzip verify its checksum
        if len(content) != expected:
            how = "ends early" if len(content) < expected else "continues after its last item"
            raise UsageError(f"states {'×'.join(map(str, shape))} bytes but {how}: get it again", file=path)
    return np.frombuffer(content, np.uint8).reshape(shape)


@contextmanager
def _data_errors(path: Path, source: str = "it again") -> Iterator[None]:
    """Convert errors of the libraries that read ``path`` to a UsageError that says what to download."""
    try:
        yield
    except FileNotFoundError as error:
        raise UsageError(f"no such file: get {source}", file=path) from error
    except PermissionError as error:
        raise UsageError("permission denied: check its permissions", file=path) from error
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise UsageError(f"cannot be read ({error}): get {source}", file=path) from error


def _load_idx(task: Task, folder: Path) -> tuple[Dataset, Dataset]:
    for name, sums in task.files.items():
        _check_md5(folder / name, sums, task.source)
    return _read_idx_sets(task, folder)


def _read_idx_sets(task: Task, folder: Path) -> tuple[Dataset, Dataset]:
    train_images, train_labels, test_images, test_labels = (folder / name for name in IDX_FILES)
    return _read_idx_set(task, train_images, train_labels), _read_idx_set(task, test_images, test_labels)


def _read_idx_set(task: Task, images_path: Path, labels_path: Path) -> Dataset:
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.shape[1:] != (task.pixels, task.pixels):
        raise UsageError(f"has no images of {task.pixels}×{task.pixels} pixels: get it again", file=images_path)
    if labels.shape != images.shape[:1] or labels.max() >= task.classes:
        raise UsageError(
            f"must have {len(images)} labels from 0 to {task.classes - 1}: get it and {images_path.name} again",
            file=labels_path,
        )
    values = torch.from_numpy(images[:, np.newaxis].astype(np.float32))
    return Dataset(_normalise(values, task), torch.from_numpy(labels.astype(np.int64)), task.classes)


def _load_cifar(task: Task, records: CifarRecords, folder: Path) -> tuple[Dataset, Dataset]:
    values = torch.empty(sum(records.files.values()), task.channels, task.pixels, task.pixels)
    labels = torch.empty(len(values), dtype=torch.int64)
    ends = dict(zip(records.files, itertools.accumulate(records.files.values()), strict=True))
    for path, content in _cifar_files(task, records, folder):
        rows = np.frombuffer(content, np.uint8).reshape(records.files[path.name], -1)
        fine = rows[:, records.labels - 1]
        if fine.max() >= task.classes:
            raise UsageError(f"has a label above {task.classes - 1}: get {task.source} again", file=path)
        place = slice(ends[path.name] - len(rows), ends[path.name])
        values[place].numpy()[:] = rows[:, records.labels :].reshape(-1, *values.shape[1:])
        labels[place].numpy()[:] = fine
    _normalise(values, task)
    cut = len(values) - [*records.files.values()][-1]
    return Dataset(values[:cut], labels[:cut], task.classes), Dataset(values[cut:], labels[cut:], task.classes)


def _cifar_files(task: Task, records: CifarRecords, folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield each file with its content, after a check of its size."""
    record = records.labels + task.channels * task.pixels**2
    archive, unpacked = folder / records.archive, folder / records.folder
    if not archive.exists() and not unpacked.exists():
        raise UsageError(f"neither {records.archive} nor {records.folder} found: get {task.source}", file=folder)
    if not archive.exists():
        for path, count in ((unpacked / name, count) for name, count in records.files.items()):
            with _data_errors(path, task.source):
                if path.stat().st_size != count * record:
                    raise UsageError(f"does not have {count * record} bytes: get {task.source} again", file=path)
                yield path, path.read_bytes()
        return
    _check_md5(archive, task.files[records.archive], task.source)
    with _data_errors(archive, task.source), tarfile.open(archive, "r:gz") as tar:
        # Read in the archive's order, because a step back would decompress from the start.
        for member in tar:
            name = Path(member.name).name
            content = tar.extractfile(member) if name in records.files else None
            if content is not None:
                yield archive / member.name, content.read(records.files[name] * record)


def _normalise(values: Tensor, task: Task) -> Tensor:
    """Normalise bytes given as float32 (N, C, H, W) to zero mean and unit deviation, in place."""
    mean, std = (torch.tensor(numbers).mul_(255).view(1, -1, 1, 1) for numbers in (task.mean, task.std))
    return values.sub_(mean).div_(std)


def _check_md5(path: Path, known: tuple[str, ...], source: str) -> None:
    found = hashlib.md5(usedforsecurity=False)  # the published sums are md5: they detect damage, not tampering
    with _data_errors(path, source), path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    if found.hexdigest() not in known:
        raise UsageError(f"its md5 is {found.hexdigest()}, not {known[0]}: get {source} again", file=path)


# --- text ------------------------------------------------------------------------------------------


def text_data(folder: Path | None = None) -> tuple[Windows, Windows]:
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
    texts = _embedded_text() if folder is None else [_text_of(path) for path in _text_files(folder)]
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


def _embedded_text() -> list[Codes]:
    path = importlib.resources.files("gossipx.tasks") / "embedded" / EMBEDDED
    with path.open("rb") as raw, tarfile.open(fileobj=raw, mode="r:gz") as archive:
        members = ((member.name, archive.extractfile(member)) for member in archive)
        return [_codes(content.read(), Path(name)) for name, content in members if content is not None]


def _text_files(folder: Path) -> list[Path]:
    """Return the files of a text, in an order that is the same on all machines."""
    names = sorted(path.relative_to(folder).parts for path in folder.rglob("*") if path.is_file())
    shown = [folder.joinpath(*parts) for parts in names if not any(part.startswith(".") for part in parts)]
    if not shown:
        what = "has no text files" if folder.is_dir() else "no such directory"
        raise UsageError(f"{what}: give a directory of UTF-8 text files as --data-dir", file=folder)
    return shown


def _text_of(path: Path) -> Codes:
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
