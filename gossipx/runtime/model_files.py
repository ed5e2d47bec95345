"""Final models on disk: one file per peer, and the average of several files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gossipx.errors import GossipxError, UsageError
from gossipx.model import safetensors_file
from gossipx.model.layout import plain_name

MODEL_FILE = "model.safetensors"
ITERATION = "gossipx.iteration"
"""Metadata key of a model file: the number of iterations that the model was trained."""
BUFFERS = "gossipx.buffers"
"""Metadata key of a model file: a line with the name of each buffer, whose values are not trained."""


def directory_of(directory: Path, rank: int) -> Path:
    """Return a peer's directory within the run's directory."""
    return directory / f"peer-{rank:02d}"


def file_of(directory: Path, rank: int) -> Path:
    """Return the path of a peer's model file."""
    return directory_of(directory, rank) / MODEL_FILE


def save(module: nn.Module, iteration: int, target: Path) -> GossipxError | None:
    """Write a model file atomically.

    Returns:
        The error if the file cannot be written, so that the caller can report its figures before it raises.
    """
    buffers = "\n".join(plain_name(name) for name, _ in module.named_buffers())
    metadata = {**safetensors_file.TORCH, ITERATION: str(iteration), BUFFERS: buffers}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        safetensors_file.write(target, safetensors_file.tensors_of(module), "give --no-save-model", metadata)
    except OSError as error:
        return GossipxError(f"{target}: it cannot be written ({error}); make room, or give --no-save-model")
    except GossipxError as error:
        return error
    return None


@contextlib.contextmanager
def averaged(module: nn.Module, models: Sequence[Path]) -> Iterator[bool]:
    """Return a context in which ``module`` holds the average of the models in these files.

    Models with NaN or Inf are omitted: their peers diverged, and the others agreed without them. The context yields
    whether any model remained; if none did, the module is unchanged.
    """
    weights = {plain_name(name) for name, _ in module.named_parameters()}
    sound = [model for model in models if all(bool(tensor.isfinite().all()) for tensor in _read(model, weights))]
    if not sound:
        yield False
        return
    tensors = safetensors_file.tensors_of(module)
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    try:
        for name, mean in average(sound):
            tensors[name].copy_(mean)
        yield True
    finally:
        for name, tensor in tensors.items():
            tensor.copy_(own[name])


def average(models: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield the average of models, one named tensor at a time.

    A tensor that is not floating-point is taken from the first model.

    Raises:
        UsageError: a file cannot be read, or its tensors are not those of the first.
    """
    with _alike(models) as (files, names):
        for name in names:
            first = files[0].get_tensor(name)
            if not first.is_floating_point():
                yield name, first
                continue
            total = first.double()
            for file in files[1:]:
                total += file.get_tensor(name)
            yield name, (total / len(files)).to(first.dtype)


def iteration_of(model: Path) -> int:
    """Return the number of iterations that a model file says it was trained; 0 if it does not say."""
    with _opened(model) as file:
        return int((file.metadata() or {}).get(ITERATION, 0))


def sound_among(models: Sequence[Path]) -> list[Path]:
    """Return the files of those models that have not diverged: none of their trained values is NaN.

    A buffer may have NaN where all of these models have it: such a value is a constant. A checkpoint does not name its
    buffers, but none is taken of a model whose trained values are not finite.

    Raises:
        UsageError: as :func:`average`.
    """
    with _alike(models) as (files, names):
        buffers = (files[0].metadata() or {}).get(BUFFERS)
        flawed: set[Path] = set()
        for name in names:
            nans = torch.stack([file.get_tensor(name).isnan() for file in files])
            if buffers is None or name in buffers.split("\n"):
                nans &= ~nans.all(0)
            flawed.update(model for model, nan in zip(models, nans, strict=True) if nan.any())
    return [model for model in models if model not in flawed]


@contextlib.contextmanager
def _alike(models: Sequence[Path]) -> Iterator[tuple[list[Any], list[str]]]:
    """Open model files. Return them with the names of their tensors, which must be the same."""
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(_opened(model)) for model in models]
        names = sorted(files[0].keys())
        for model, file in zip(models, files, strict=True):
            if sorted(file.keys()) != names:
                raise UsageError(f"it is of another model than {models[0]}", model)
        yield files, names


def _read(model: Path, names: Iterable[str]) -> Iterator[Tensor]:
    with _opened(model) as file:
        for name in names:
            yield file.get_tensor(name)


def _opened(model: Path) -> Any:
    try:
        return safe_open(model, "pt")
    except (OSError, SafetensorError) as error:
        raise UsageError(f"the model cannot be read ({error})", model) from error
