"""A model's tensors as a safetensors file, which is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from gossipx.errors import GossipxError
from gossipx.model.layout import plain_name

TORCH: Mapping[str, str] = {"format": "pt"}
"""Metadata without which Hugging Face's tools do not take a file for a torch model's."""


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's tensors, by names that are the same for plain and for compiled modules."""
    state = module.state_dict().items()
    return {plain_name(name): tensor for name, tensor in state if isinstance(tensor, Tensor)}


def write(target: Path, tensors: Mapping[str, Tensor], knob: str, metadata: Mapping[str, str] = TORCH) -> None:
    """Write tensors, or leave what was there.

    Args:
        target: the file; its directory is there.
        tensors: by name.
        knob: what to turn if it cannot be written.
        metadata: beside them.

    Raises:
        GossipxError: it cannot be written.
    """
    # The format takes tensors that share no memory, in the usual order of dimensions.
    copies = {name: one.detach().cpu().clone(memory_format=torch.contiguous_format) for name, one in tensors.items()}
    unfinished = target.with_name(f".{target.name}.tmp")
    try:
        unfinished.touch()
        mode = unfinished.stat().st_mode
        save_file(copies, unfinished, dict(metadata))
        # safetensors makes files for their owner alone, whatever the umask says; others are to read models, too.
        unfinished.chmod(mode)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(target)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise GossipxError(f"{target}: it cannot be written ({error}); make room, or {knob}") from error
