"""Nested state, such as an optimizer's, split into named tensors and plain data that JSON represents exactly.

JSON has lists, objects with text keys, text, numbers, true, false and null. Floats are written with enough digits to
restore the same bits; NaN and the infinities as Python's json writes them, ``NaN`` and ``Infinity``. Everything else is
an object with the reserved key ``$``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gossipx.errors import UsageError

TAG = "$"
"""Key of an object that represents a tensor, a tuple, or a dict with keys other than text."""
SCALARS = (bool, int, float, str, type(None))
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Supported dtypes, with their names in the safetensors format."""


@dataclass(frozen=True)
class Part:
    """One named part of a checkpoint.

    Attributes:
        tensors: tensors by name, in host memory; they must not change until they are written.
        state: JSON data: None, booleans, numbers, text, and lists and dicts (with text keys) of these.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    state: Any = None


def pack(tree: object, called: str = "state") -> Part:
    """Copy nested state into a part; later changes by the caller do not affect it.

    Args:
        tree: dense tensors, numbers, text, None, numpy scalars, and lists, tuples and dicts of these to any depth.
        called: name of the state in messages.

    Raises:
        UsageError: it contains something else; the message says where.
    """
    tensors: dict[str, Tensor] = {}
    return Part(tensors, _packed(tree, (called,), tensors))


def unpack(part: Part) -> Any:
    """Return the state given to :func:`pack`.

    Tensors are in host memory, mappings have become dicts, and numpy scalars have become Python numbers.
    """
    return _unpacked(part.state, part.tensors)


def _packed(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in SCALARS:
        return value
    if isinstance(value, Tensor):
        return _packed_tensor(value, path, tensors)
    if isinstance(value, list):
        return [_packed(item, (*path, str(index)), tensors) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {TAG: "tuple", "of": _packed(list(value), path, tensors)}
    if isinstance(value, Mapping):
        if all(type(key) is str and key != TAG for key in value):
            return {key: _packed(item, (*path, key), tensors) for key, item in value.items()}
        for key in value:
            if type(key) not in SCALARS:
                raise UsageError(f"{'.'.join(path)} has a key of type {type(key).__name__}: keys are text or numbers")
        return {TAG: "dict", "of": [[key, _packed(item, (*path, str(key)), tensors)] for key, item in value.items()]}
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise UsageError(
        f"{'.'.join(path)} is of type {kind}: a checkpoint keeps tensors, numbers, text, None, lists, tuples and dicts"
    )


def _packed_tensor(tensor: Tensor, path: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Any]:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPES:
        found = f"a tensor of layout {tensor.layout}, dtype {tensor.dtype} on {tensor.device}"
        raise UsageError(f"{'.'.join(path)} is {found}: a checkpoint keeps dense tensors of the usual dtypes")
    whole: object = tensor
    if is_traceable_wrapper_subclass(whole):  # made of other tensors
        raise UsageError(
            f"{'.'.join(path)} is a {type(tensor).__name__}: a checkpoint keeps plain tensors; leave out"
            " --checkpoint-every, or use an optimizer with plain tensors in its state"
        )
    copied = copy_of(tensor)
    name = ".".join(path[1:]) or "tensor"
    while name in tensors or name == "__metadata__":  # a reserved name of the format
        name += "_"
    tensors[name] = copied
    # safetensors keeps no strides; unpack restores the layout in memory.
    strides = {} if copied.is_contiguous() else {"strides": list(copied.stride())}
    return {TAG: "tensor", "name": name, **strides}


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy in host memory; it has the same strides if the elements neither overlap nor leave gaps."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.preserve_format).resolve_conj()


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(TAG):
        case None:
            return {key: _unpacked(item, tensors) for key, item in value.items()}
        case "tuple":
            return tuple(_unpacked(value["of"], tensors))
        case "dict":
            return {key: _unpacked(item, tensors) for key, item in value["of"]}
        case _:
            tensor = tensors[value["name"]]
            if "strides" not in value:
                return tensor
            return torch.empty_strided(tensor.shape, value["strides"], dtype=tensor.dtype).copy_(tensor)
