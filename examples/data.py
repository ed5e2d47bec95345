"""The data of the examples: files of yours, or those that gossipx includes."""

from __future__ import annotations

import importlib.resources
import tarfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from gossipx.tasks.data import load


def images(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Return training and test images (N, C, H, W) with their labels (N,).

    Args:
        data_dir: the unpacked folder of CIFAR-10's binary version, cifar-10-batches-bin; None: 12,000 training and
            10,000 test images of Fashion-MNIST.
    """
    if data_dir is None:
        train, test = load("fashion-mnist")
        return TensorDataset(train.images, train.labels), TensorDataset(test.images, test.labels)
    batches, test = sorted(data_dir.glob("data_batch_*.bin")), data_dir / "test_batch.bin"
    if not batches or not test.is_file():
        raise SystemExit(f"{data_dir}: no data_batch_*.bin and test_batch.bin: give cifar-10-batches-bin")
    return _cifar10(batches), _cifar10([test])


def _cifar10(files: list[Path]) -> TensorDataset:
    """Read records of a label and 32×32 red, green and blue bytes."""
    records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
    pixels = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32)).float() / 255
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    return TensorDataset(
        (pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1), torch.from_numpy(records[:, 0].astype(np.int64))
    )


def text(file: Path | None) -> str:
    """Return a text. None: most of the King James Bible."""
    if file is not None:
        return file.read_text(encoding="utf-8")
    embedded = importlib.resources.files("gossipx.tasks") / "embedded" / "king-james-bible.tar.gz"
    with embedded.open("rb") as raw, tarfile.open(fileobj=raw) as books:
        return "".join(content.read().decode() for book in books if (content := books.extractfile(book)))
