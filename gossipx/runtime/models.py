"""Final models on disk: one file a peer, and the average of several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gossipx.errors import GossipxError, UsageError
from gossipx.model import safetensors_file
from gossipx.model.layout import plain_name

MODEL_FILE = "model.safetensors"
ITERATION = "gossipx.iteration"
"""What a model's file says in its metadata of how far it was trained."""


def directory_of(directory: Path, rank: int) -> Path:
    """A peer's own directory in the run's."""
    return directory / f"peer-{rank:02d}"


def file_of(directory: Path, rank: int) -> Path:
    """Where a peer's model lies in the run's directory."""
    return directory_of(directory, rank) / MODEL_FILE


def save(module: nn.Module, iteration: int, target: Path) -> GossipxError | None:
    """Write a model that has seen so many iterations whole, or leave what was there.

    Returns:
        An error to end with, if it cannot be written: a peer's figures are worth telling first.
    """
    metadata = {**safetensors_file.TORCH, ITERATION: str(iteration)}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        safetensors_file.write(target, safetensors_file.tensors_of(module), "give --no-save-model", metadata)
    except OSError as error:
        return GossipxError(f"{target}: it cannot be written ({error}); make room, or give --no-save-model")
    except GossipxError as error:
        return error
    return None


@contextlib.contextmanager
def holding_average(module: nn.Module, models: Sequence[Path]) -> Iterator[bool]:
    """For the moment, ``module`` holds the average of the models in these files.

    A model that holds NaN or Inf is left out: a peer that diverged, without which the others have agreed. Gives whether
    any was left; if not, the module is as it was.
    """
    weights = {plain_name(name) for name, _ in module.named_parameters()}
    sound = [model for model in models if all(bool(one.isfinite().all()) for one in _read(model, weights))]
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
    """The average of models, one tensor after another; of a tensor that holds no floating-point numbers the first's.

    Raises:
        UsageError: one cannot be read, or has other tensors than the first.
    """
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(_opened(model)) for model in models]
        names = sorted(files[0].keys())
        for model, file in zip(models, files, strict=True):
            if sorted(file.keys()) != names:
                raise UsageError(f"it is of another model than {models[0]}", model)
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
    """How many iterations a model that a run has left has seen; 0 where its file does not say."""
    with _opened(model) as file:
        return int((file.metadata() or {}).get(ITERATION, 0))


def is_sound(model: Path) -> bool:
    """Whether a model holds no NaN."""
    with _opened(model) as file:
        return not any(bool(file.get_tensor(name).isnan().any()) for name in file.keys())  # noqa: SIM118


def _read(model: Path, names: Iterable[str]) -> Iterator[Tensor]:
    with _opened(model) as file:
        for name in names:
            yield file.get_tensor(name)


def _opened(model: Path) -> Any:
    try:
        return safe_open(model, "pt")
    except (OSError, SafetensorError) as error:
        raise UsageError(f"the model cannot be read ({error})", model) from error
