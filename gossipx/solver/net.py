"""A torch module as pycaffe shows a net: its parameters as blobs of numpy arrays, and passes over the next batch."""

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
"""A figure of a module's output and the batch's y, such as an accuracy: what float() takes."""
_NO_PAIRS = (Mapping, Set, Tensor, np.ndarray, str, bytes)
"""Two of what these hold would be taken for x and y: names of a dict's entries, rows of a tensor."""


class Batches:
    """Batches of (x, y), begun again when they end.

    Args:
        source: any iterable of pairs that can be begun again: a list, a DataLoader, not a generator.
        called: how messages name it.

    Raises:
        UsageError: it is nothing that can be gone through.
    """

    def __init__(self, source: Iterable[Any], called: str):
        given: Any = source
        if not isinstance(given, Iterable) and not hasattr(given, "__getitem__"):  # a torch Dataset has this alone
            raise UsageError(
                f"{called} is of type {type(given).__name__}, and is to be batches (x, y): give a list or a DataLoader"
            )
        self._source = source
        self._called = called
        self._open: Iterator[Any] | None = None

    def warnings(self) -> list[str]:
        """A line for whoever gives what ends once and for all; what never ends, such as samples that are drawn, may."""
        if not isinstance(self._source, Iterator):
            return []
        return [f"{self._called} can be gone through only once, and then training fails: give a list or a DataLoader"]

    def next(self) -> tuple[Any, Any]:
        """The next batch.

        Raises:
            UsageError: there is none, or it is no pair.
        """
        batch = None if self._open is None else next(self._open, None)
        if batch is None:
            self._open = iter(self._source)
            batch = next(self._open, None)
        if batch is None:
            raise UsageError(f"{self._called} holds no batch, or cannot be begun again: give a list or a DataLoader")
        try:
            if isinstance(batch, _NO_PAIRS):
                raise TypeError
            x, y = batch
        except (TypeError, ValueError):
            raise UsageError(f"{self._called} gives {type(batch).__name__}, and a batch is a pair (x, y)") from None
        return x, y


class Blob:
    """A parameter of a net, or its gradient, as numpy sees it.

    Where numpy can look at the tensor's own memory it does. Elsewhere (on a GPU, in bfloat16) there is a copy, as
    Caffe's blobs have one in host memory: it is brought up to date as it is asked for, if the tensor has changed since,
    and what is written to it goes to the tensor before the net is next used.
    """

    def __init__(self, parameter: nn.Parameter):
        self._parameter = parameter
        self._copies: dict[str, tuple[NDArray[Any], int]] = {}  # as they were given, and of which version

    @property
    def shape(self) -> tuple[int, ...]:
        """Of both."""
        return tuple(self._parameter.shape)

    @property
    def data(self) -> NDArray[Any]:
        """The values."""
        return self._seen("data", self._parameter.detach())

    @property
    def diff(self) -> NDArray[Any]:
        """The gradient, of zeros if there is none yet."""
        if self._parameter.grad is None:
            self._parameter.grad = torch.zeros_like(self._parameter)
        return self._seen("diff", self._parameter.grad)

    def _seen(self, name: str, tensor: Tensor) -> NDArray[Any]:
        if tensor.device.type == "cpu" and tensor.dtype is not torch.bfloat16:
            return tensor.numpy()
        held = self._copies.get(name)
        if held is not None and held[1] == tensor._version:
            return held[0]
        array: NDArray[Any] = tensor.to(
            "cpu", torch.float32 if tensor.dtype is torch.bfloat16 else tensor.dtype
        ).numpy()
        self._copies[name] = array, tensor._version
        return array

    @torch.no_grad()
    def bring(self) -> None:
        """Have the tensors hold what was written to copies, unless they have changed since."""
        for name, (array, version) in self._copies.items():
            tensor = self._parameter if name == "data" else self._parameter.grad
            if tensor is not None and tensor._version == version:
                tensor.copy_(torch.from_numpy(array))
        self._copies.clear()


@dataclass(frozen=True)
class Output:
    """What a net has made of its last batch, by name in :attr:`Net.blobs`; ``data`` is an array without dimensions."""

    data: NDArray[Any]


class Net:
    """A module with its objective and its data.

    Args:
        module: the model; nets of one solver share it.
        loss: the objective is ``loss(module(x), y)``.
        batches: where x and y come from.
        scores: further outputs by name, each of ``module(x)`` and y.
        trains: whether it is the training net, in the module's training mode; else it is in evaluation mode.

    Attributes:
        params: by layer, that is by the name of the submodule that holds them, its parameters that are trained.
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
        """Of its module's class."""
        return type(getattr(self.module, "_orig_mod", self.module)).__name__  # torch.compile wraps it

    @property
    def outputs(self) -> list[str]:
        """Names of its outputs, sorted."""
        return sorted([*self._scores, "loss"])

    def forward(self) -> dict[str, NDArray[Any]]:
        """Compute on the next batch.

        Returns:
            Its outputs by name.

        Raises:
            UsageError: there is no batch, or the loss or a score is not one number.
        """
        self.bring()
        device = next(self.module.parameters()).device
        x, y = (_on(device, part) for part in self._batches.next())
        with torch.set_grad_enabled(self._trains), _mode(self.module, self._trains):
            made = self.module(x)
            loss = self._loss(made, y)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"the loss is {given}, and is to be a tensor of one number: loss(module(x), y)")
        with torch.no_grad():
            figures = {name: _figure(name, score(made, y)) for name, score in self._scores.items()}
        self._objective = loss if self._trains else None
        figures["loss"] = float(loss.detach())
        self.blobs = {name: Output(np.asarray(figures[name], np.float32)) for name in self.outputs}
        return {name: blob.data for name, blob in self.blobs.items()}

    def backward(self) -> None:
        """Add the gradients of the last forward pass's loss to those that are there.

        Raises:
            UsageError: there was none, or its loss does not come from the module.
        """
        if self._objective is None:
            raise UsageError("backward comes after forward, once each")
        if not self._objective.requires_grad:
            raise UsageError("loss= gives a tensor that has no gradient: it is made of module(x), and not detached")
        self._objective.backward()  # type: ignore[no-untyped-call]
        self._objective = None

    def clear_param_diffs(self) -> None:
        """Set all gradients to zero, where they lie: arrays of them that somebody holds stay those of the net."""
        self.bring()
        self.module.zero_grad(set_to_none=False)

    def bring(self) -> None:
        """Have the module hold what was written to blobs whose memory is not its own."""
        for blob in (blob for blobs in self.params.values() for blob in blobs):
            blob.bring()


@contextlib.contextmanager
def _mode(module: nn.Module, trains: bool) -> Iterator[None]:
    """The module trains, or does not; parts that the user has put into another mode than the whole go back to it."""
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
    """A score's value as a number."""
    given = type(value).__name__
    try:
        if not isinstance(value, Tensor) or value.numel() == 1:
            return float(value)
        given = f"a tensor of {list(value.shape)}"
    except (TypeError, ValueError):
        pass
    raise UsageError(f"scores['{name}'] gives {given}, and is to give one number")


def _on(device: torch.device, part: Any) -> Any:
    if isinstance(part, np.ndarray):
        part = torch.from_numpy(part)
    return part.to(device, non_blocking=True) if isinstance(part, Tensor) else part
