"""A model's tensors as a safetensors file, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from gossipx.errors import GossipxError
from gossipx.model.layout import plain_name

TORCH: Mapping[str, str] = {"format": "pt"}
"""Metadata that Hugging Face's tools require to recognise a torch model."""


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's tensors by names that are equal for plain and compiled modules."""
    state = module.state_dict().items()
    return {plain_name(name): tensor for name, tensor in state if isinstance(tensor, Tensor)}


def write(target: Path, tensors: Mapping[str, Tensor], knob: str, metadata: Mapping[str, str] = TORCH) -> None:
    """Write tensors to a file; if that fails, an existing file stays.

    Args:
        target: the file, in an existing directory.
        tensors: tensors by name.
        knob: what the user can change if writing fails, for the message.
        metadata: metadata of the file.

    Raises:
        GossipxError: the file cannot be written.
    """
    # The format requires contiguous tensors that share no memory.
    copies = {name: part.detach().cpu().clone(memory_format=torch.contiguous_format) for name, part in tensors.items()}
    unfinished = target.with_name(f".{target.name}.tmp")
    try:
        unfinished.touch()
        mode = unfinished.stat().st_mode
        save_file(copies, unfinished, dict(metadata))
        # safetensors makes files readable by their owner only; restore the mode of the user's umask.
        unfinished.chmod(mode)
        with unfinished.open("r+b") as file:
            _sort_metadata(file)
            os.fsync(file.fileno())
        unfinished.replace(target)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise GossipxError(f"{target}: it cannot be written ({error}); make room, or {knob}") from error


def _sort_metadata(file: BinaryIO) -> None:
    """Sort the metadata of a file, so that equal models are equal bytes: safetensors writes it in a random order."""
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    file.seek(8)
    file.write(json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size))
