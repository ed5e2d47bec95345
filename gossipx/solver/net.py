"""A torch module with pycaffe's interface of a net: parameters as numpy arrays, passes over a batch, snapshots.

A snapshot is two safetensors files in the same directory: the weights ``{prefix}_iter_{N}.safetensors`` and the state
``{prefix}_iter_{N}.solverstate``. The state has the optimizer's histories, ``PARAMETER/HISTORY``, and its metadata
has the iteration, the solver's type and the name of the weights' file.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gossipx.errors import UsageError
from gossipx.model import safetensors_file
from gossipx.model.layout import plain_name
from gossipx.solver.optimizers import CaffeOptimizer, type_of

Objective = Callable[[Any, Any], Tensor]
"""The loss of a module's output and the batch's y."""
Score = Callable[[Any, Any], Any]
"""A metric of a module's output and the batch's y, such as an accuracy; its value must be accepted by float()."""
_NO_PAIRS = (Mapping, Set, Tensor, np.ndarray, str, bytes)
"""Types that are not a pair (x, y), although two of their elements, such as keys or rows, can be unpacked."""
_WEIGHTS, _STATE = ".safetensors", ".solverstate"
_KNOB = "see the solver file's snapshot_prefix"


class SourceBatches:
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

    def __init__(
        self, module: nn.Module, loss: Objective, batches: SourceBatches, scores: Mapping[str, Score], trains: bool
    ):
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
        with torch.set_grad_enabled(self._trains), _in_mode(self.module, self._trains):
            output = self.module(x)
            loss = self._loss(output, y)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"the loss is {given}, and must be a tensor of one number: loss(module(x), y)")
        with torch.no_grad():
            figures = {name: _as_number(name, score(output, y)) for name, score in self._scores.items()}
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
def _in_mode(module: nn.Module, trains: bool) -> Iterator[None]:
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


def _as_number(name: str, value: Any) -> float:
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


# --- snapshots ------------------------------------------------------------------------------------


def snapshot_prefix(given: str, file: Path | None) -> Path:
    """Return the absolute path prefix of snapshots, by Caffe's rules.

    If ``given`` is a directory, the prefix is the solver file's name within it. If it is empty, the prefix is the path
    of the solver file. Both are without the file's suffix.

    Args:
        given: the solver file's ``snapshot_prefix``; may be empty.
        file: the solver file; None: no file.
    """
    stem = "solver" if file is None else file.stem
    if not given:
        return (Path(stem) if file is None else file.with_suffix("")).absolute()
    return (Path(given) / stem if Path(given).is_dir() or given.endswith("/") else Path(given)).absolute()


def probe_snapshots(prefix: Path) -> None:
    """Check that snapshots can be written, to fail before hours of training.

    Raises:
        OSError: they cannot be written.
    """
    # The file name is unique, because other peers of the script may probe the same prefix at the same time.
    with tempfile.NamedTemporaryFile(dir=prefix.parent, prefix=f"{prefix.name}_", suffix=".tempfile"):
        pass


def save_snapshot(prefix: Path, iteration: int, module: nn.Module, optimizer: CaffeOptimizer) -> tuple[Path, Path]:
    """Write a snapshot: the weights first, so that a state never names a missing file.

    Returns:
        The files of the weights and of the state.

    Raises:
        GossipxError: a file cannot be written; no partial file is left.
    """
    stem = f"{prefix.name}_iter_{iteration}"
    weights, state = prefix.with_name(stem + _WEIGHTS), prefix.with_name(stem + _STATE)
    safetensors_file.write(weights, safetensors_file.tensors_of(module), _KNOB)
    histories = {
        f"{name}/{kind}": history
        for name, parameter in _parameters(module).items()
        for kind, history in optimizer.state.get(parameter, {}).items()
    }
    metadata = {"iteration": str(iteration), "type": type_of(optimizer), "learned_net": weights.name}
    safetensors_file.write(state, histories, _KNOB, metadata)
    return weights, state


def load_weights(file: Path, module: nn.Module) -> None:
    """Load weights by name, as Caffe does. Tensors that only the file or only the module has are ignored.

    Raises:
        UsageError: the file cannot be read, no name matches, or a shape differs. The module is unchanged then.
    """
    found, _ = _content_of(file)
    own = safetensors_file.tensors_of(module)
    shared = own.keys() & found.keys()
    if not shared:
        raise UsageError(f"none of its tensors belongs to this net, which has {next(iter(own))} and others", file)
    for name in sorted(shared):
        if found[name].shape != own[name].shape:
            raise UsageError(f"'{name}' is {list(found[name].shape)} there, and {list(own[name].shape)} here", file)
    with torch.no_grad():
        for name in shared:
            own[name].copy_(found[name])


@dataclass(frozen=True)
class SolverState:
    """The state to resume a solver from: iterations done, histories by parameter and kind, and the weights' file."""

    iteration: int
    histories: dict[nn.Parameter, dict[str, Tensor]]
    weights: Path


def load_solver_state(file: Path, module: nn.Module, optimizer: CaffeOptimizer) -> SolverState:
    """Read the state of a snapshot without changing the module or the optimizer.

    Raises:
        UsageError: the file cannot be read, or belongs to another net or another type of solver.
    """
    tensors, metadata = _content_of(file)
    if not {"iteration", "type", "learned_net"} <= metadata.keys() or not metadata["iteration"].isdigit():
        raise UsageError(f"not the state of a solver: give the {_STATE} file of a snapshot", file)
    mine, theirs = type_of(optimizer), metadata["type"]
    if theirs != mine:
        raise UsageError(f"it belongs to a solver of type {theirs}, and this one is {mine}: set its type", file)
    parameters = _parameters(module)
    histories: dict[nn.Parameter, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or parameter.shape != tensor.shape:
            here = "no such parameter" if parameter is None else f"one of {list(parameter.shape)}"
            raise UsageError(f"it has '{name}' of {list(tensor.shape)}, and this net has {here}", file)
        histories.setdefault(parameter, {})[kind] = tensor.to(parameter.device)
    return SolverState(int(metadata["iteration"]), histories, file.with_name(Path(metadata["learned_net"]).name))


def _content_of(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except OSError as error:
        raise UsageError(f"it cannot be read ({error.strerror or error})", file) from None
    except SafetensorError as error:
        why = "Caffe's binary files are not supported" if file.suffix in (".caffemodel", _STATE, ".h5") else "damaged?"
        raise UsageError(f"not a safetensors file ({error}): {why}", file) from None


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): one for name, one in module.named_parameters() if one.requires_grad}
