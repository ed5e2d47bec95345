"""Final models on disk: one file a peer, and the average of several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gossipx.errors import GossipxError
from gossipx.layout import plain_name

MODEL_FILE = "model.safetensors"


def directory_of(directory: Path, rank: int) -> Path:
    """A peer's own directory in the run's."""
    return directory / f"peer-{rank:02d}"


def file_of(directory: Path, rank: int) -> Path:
    """Where a peer's model lies in the run's directory."""
    return directory_of(directory, rank) / MODEL_FILE


def save(module: nn.Module, target: Path) -> GossipxError | None:
    """Write a model whole, or leave what was there.

    Returns:
        An error to end with, if it cannot be written: a peer's figures are worth telling first.
    """
    # The format takes tensors that share no memory, in the usual order of dimensions.
    contiguous = torch.contiguous_format
    state = {name: tensor.cpu().clone(memory_format=contiguous) for name, tensor in _tensors(module).items()}
    unfinished = target.with_suffix(".tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(state, unfinished)
        unfinished.replace(target)
    except (OSError, SafetensorError) as error:
        return GossipxError(f"{target}: the model cannot be written ({error}); make room, or give --no-save-model")
    return None


@contextlib.contextmanager
def holding_average(module: nn.Module, files: Sequence[Path]) -> Iterator[bool]:
    """For the moment, ``module`` holds the average of the models in ``files``.

    A model that holds NaN or Inf is left out: a peer that diverged, without which the others have agreed. Gives whether
    any was left; if not, the module is as it was.
    """
    weights = {plain_name(name) for name, _ in module.named_parameters()}
    mean: dict[str, Tensor] = {}
    sound = 0
    for model in map(load_file, files):
        if all(bool(model[name].isfinite().all()) for name in weights):
            sound += 1
            for name, tensor in model.items():
                mean[name] = mean[name] + tensor if sound > 1 else tensor
    if not sound:
        yield False
        return
    tensors = _tensors(module)
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    try:
        for name, tensor in tensors.items():
            tensor.copy_(mean[name] / sound)
        yield True
    finally:
        for name, tensor in tensors.items():
            tensor.copy_(own[name])


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's tensors, by names that are the same for plain and for compiled peers."""
    state = module.state_dict().items()
    return {plain_name(name): tensor for name, tensor in state if isinstance(tensor, Tensor)}
