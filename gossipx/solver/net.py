"""A torch module with pycaffe's interface of a net: parameters as blobs of numpy arrays, and passes over a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossipx.errors import UsageError
from gossipx.model.layout import plain_name

Objective = Callable[[Any, Any], Tensor]
"""The loss of a module's output and the batch's y."""
Score = Callable[[Any, Any], Any]
"""A metric of a module's output and the batch's y, such as an accuracy; its value must be accepted by float()."""
_NO_PAIRS = (Mapping, Set, Tensor, np.ndarray, str, bytes)
"""Types that are not a pair (x, y), although two of their elements, such as keys or rows, can be unpacked."""


class Batches:
    """An endless sequence of batches (x, y), which restarts its source at the end.

    Args:
        source: an iterable of pairs that can be iterated again, such as a list or a DataLoader, but not a generator.
        name: name of the source in messages.

    Raises:
        UsageError: the source is not iterable.
    """

    def __init__(self, source: Iterable[Any], name: str):
        given: Any = source
        if not isinstance(given, Iterable) and not hasattr(given, "__getitem__"):  # a torch Dataset has only this
            kind = type(given).__name__
            raise UsageError(f"{name} is of type {kind}, and must be batches (x, y): give a list or a DataLoader")
        self._source = source
        self._name = name
        self._open: Iterator[Any] | None = None

    def warnings(self) -> list[str]:
        """Return a warning if the source is an iterator, which cannot restart. An endless iterator does not need to."""
        if not isinstance(self._source, Iterator):
            return []
        return [f"{self._name} can be iterated only once, and then training fails: give a list or a DataLoader"]

    def next(self) -> tuple[Any, Any]:
        """Return the next batch.

        Raises:
            UsageError: the source has no batch, or the batch is not a pair.
        """
        batch = None if self._open is None else next(self._open, None)
        if batch is None:
            self._open = iter(self._source)
            batch = next(self._open, None)
        if batch is None:
            raise UsageError(f"{self._name} has no batch, or cannot be iterated again: give a list or a DataLoader")
        try:
            if isinstance(batch, _NO_PAIRS):
                raise TypeError
            x, y = batch
        except (TypeError, ValueError):
            raise UsageError(f"{self._name} gives {type(batch).__name__}, and a batch is a pair (x, y)") from None
        return x, y


class Blob:
    """A parameter of a net and its gradient, as numpy arrays.

    The arrays share the tensor's memory where numpy can access it. Elsewhere (on a GPU, in bfloat16) they are copies,
    like the host memory of Caffe's blobs. A read updates the copy if the tensor has changed since; writes to a copy
    reach the tensor before the net is used next.
    """

    def __init__(self, parameter: nn.Parameter):
        self._parameter = parameter
        self._copies: dict[str, tuple[NDArray[Any], int]] = {}  # each with the tensor's version when it was made

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values and of the gradient."""
        return tuple(self._parameter.shape)

    @property
    def data(self) -> NDArray[Any]:
        """The values."""
        return self._array("data", self._parameter.detach())

    @property
    def diff(self) -> NDArray[Any]:
        """The gradient; zeros before the first backward pass."""
        if self._parameter.grad is None:
            self._parameter.grad = torch.zeros_like(self._parameter)
        return self._array("diff", self._parameter.grad)

    def _array(self, name: str, tensor: Tensor) -> NDArray[Any]:
        if tensor.device.type == "cpu" and tensor.dtype is not torch.bfloat16:
            return tensor.numpy()
        copy = self._copies.get(name)
        if copy is not None and copy[1] == tensor._version:
            return copy[0]
        array: NDArray[Any] = tensor.to(
            "cpu", torch.float32 if tensor.dtype is torch.bfloat16 else tensor.dtype
        ).numpy()
        self._copies[name] = array, tensor._version
        return array

    @torch.no_grad()
    def flush(self) -> None:
        """Write the copies back to the tensors, except to tensors that have changed since."""
        for name, (array, version) in self._copies.items():
            tensor = self._parameter if name == "data" else self._parameter.grad
            if tensor is not None and tensor._version == version:
                tensor.copy_(torch.from_numpy(array))
        self._copies.clear()


@dataclass(frozen=True)
class Output:
    """One output of a net's last pass, as in :attr:`Net.blobs`; ``data`` is an array without dimensions."""

    data: NDArray[Any]


class Net:
    """A module with its objective and its data.

    Args:
        module: the model; nets of one solver share it.
        loss: the objective is ``loss(module(x), y)``.
        batches: the batches (x, y).
        scores: further outputs by name, each a function of ``module(x)`` and y.
        trains: True: the training net, in the module's training mode; False: a test net, in evaluation mode.

    Attributes:
        params: trained parameters by layer, where a layer is the name of the submodule that owns them.
        blobs: outputs of the last pass by name.
    """

    def __init__(self, module: nn.Module, loss: Objective, batches: Batches, scores: Mapping[str, Score], trains: bool):
        self.module = module
        self.params: dict[str, list[Blob]] = {}
        self.blobs: dict[str, Output] = {}
        self._loss = loss
        self._batches = batches
        self._scores = scores
        self._trains = trains
        self._objective: Tensor | None = None
        for name, layer in module.named_modules():
            own = [Blob(one) for one in layer.parameters(recurse=False) if one.requires_grad]
            if own:
                self.params[plain_name(f"{name}.").removesuffix(".") or self.name] = own

    @property
    def name(self) -> str:
        """The name of the module's class."""
        return type(getattr(self.module, "_orig_mod", self.module)).__name__  # torch.compile wraps it

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs, sorted."""
        return sorted([*self._scores, "loss"])

    def forward(self) -> dict[str, NDArray[Any]]:
        """Run the module on the next batch, and return the outputs by name.

        Raises:
            UsageError: there is no batch, or the loss or a score is not one number.
        """
        self.flush()
        device = next(self.module.parameters()).device
        x, y = (_on(device, part) for part in self._batches.next())
        with torch.set_grad_enabled(self._trains), _mode(self.module, self._trains):
            output = self.module(x)
            loss = self._loss(output, y)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"the loss is {given}, and must be a tensor of one number: loss(module(x), y)")
        with torch.no_grad():
            figures = {name: _figure(name, score(output, y)) for name, score in self._scores.items()}
        self._objective = loss if self._trains else None
        figures["loss"] = float(loss.detach())
        self.blobs = {name: Output(np.asarray(figures[name], np.float32)) for name in self.outputs}
        return {name: blob.data for name, blob in self.blobs.items()}

    def backward(self) -> None:
        """Add the gradients of the last forward pass's loss to the current gradients.

        Raises:
            UsageError: no forward pass since the last backward pass, or its loss does not depend on the module.
        """
        if self._objective is None:
            raise UsageError("call forward before each backward")
        if not self._objective.requires_grad:
            raise UsageError("loss= gives a tensor without a gradient: compute it from module(x), and do not detach it")
        self._objective.backward()  # type: ignore[no-untyped-call]
        self._objective = None

    def clear_param_diffs(self) -> None:
        """Set all gradients to zero in place, so that arrays of them that a caller holds stay valid."""
        self.flush()
        self.module.zero_grad(set_to_none=False)

    def flush(self) -> None:
        """Write blobs that are copies back to the module."""
        for blob in (blob for blobs in self.params.values() for blob in blobs):
            blob.flush()


@contextlib.contextmanager
def _mode(module: nn.Module, trains: bool) -> Iterator[None]:
    """Set training or evaluation mode, and restore the mode of each submodule at the end."""
    if module.training == trains:
        yield
        return
    modes = [(one, one.training) for one in module.modules()]
    module.train(trains)
    try:
        yield
    finally:
        for one, mode in modes:
            one.training = mode


def _figure(name: str, value: Any) -> float:
    """Return a score's value as a number."""
    given = type(value).__name__
    try:
        if not isinstance(value, Tensor) or value.numel() == 1:
            return float(value)
        given = f"a tensor of {list(value.shape)}"
    except (TypeError, ValueError):
        pass
    raise UsageError(f"scores['{name}'] gives {given}, and must give one number")


def _on(device: torch.device, part: Any) -> Any:
    if isinstance(part, np.ndarray):
        part = torch.from_numpy(part)
    return part.to(device, non_blocking=True) if isinstance(part, Tensor) else part
