"""Snapshots of a solver: the weights ``{prefix}_iter_{N}.safetensors`` and the state ``{prefix}_iter_{N}.solverstate``.

Both are safetensors files in the same directory. The state has the optimizer's histories, ``PARAMETER/HISTORY``, and
its metadata has the iteration, the solver's type and the name of the weights' file.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gossipx.errors import UsageError
from gossipx.model import safetensors_file
from gossipx.model.layout import plain_name
from gossipx.solver.optimizers import CaffeOptimizer

WEIGHTS, STATE = ".safetensors", ".solverstate"
KNOB = "see the solver file's snapshot_prefix"


def prefix_of(given: str, file: Path | None) -> Path:
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


def probe(prefix: Path) -> None:
    """Check that snapshots can be written, to fail before hours of training.

    Raises:
        OSError: they cannot be written.
    """
    # The file name is unique, because other peers of the script may probe the same prefix at the same time.
    with tempfile.NamedTemporaryFile(dir=prefix.parent, prefix=f"{prefix.name}_", suffix=".tempfile"):
        pass


def save(prefix: Path, iteration: int, module: nn.Module, optimizer: CaffeOptimizer) -> tuple[Path, Path]:
    """Write a snapshot: the weights first, so that a state never names a missing file.

    Returns:
        The files of the weights and of the state.

    Raises:
        GossipxError: a file cannot be written; no partial file is left.
    """
    stem = f"{prefix.name}_iter_{iteration}"
    weights, state = prefix.with_name(stem + WEIGHTS), prefix.with_name(stem + STATE)
    safetensors_file.write(weights, safetensors_file.tensors_of(module), KNOB)
    histories = {
        f"{name}/{kind}": history
        for name, parameter in _parameters(module).items()
        for kind, history in optimizer.state.get(parameter, {}).items()
    }
    metadata = {"iteration": str(iteration), "type": type(optimizer).__name__, "learned_net": weights.name}
    safetensors_file.write(state, histories, KNOB, metadata)
    return weights, state


def load_weights(file: Path, module: nn.Module) -> None:
    """Load weights by name, as Caffe does. Tensors that only the file or only the module has are ignored.

    Raises:
        UsageError: the file cannot be read, no name matches, or a shape differs. The module is unchanged then.
    """
    found, _ = _read(file)
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
class State:
    """The state to resume a solver from: iterations done, histories by parameter and kind, and the weights' file."""

    iteration: int
    histories: dict[nn.Parameter, dict[str, Tensor]]
    weights: Path


def load_state(file: Path, module: nn.Module, optimizer: CaffeOptimizer) -> State:
    """Read the state of a snapshot without changing the module or the optimizer.

    Raises:
        UsageError: the file cannot be read, or belongs to another net or another type of solver.
    """
    tensors, metadata = _read(file)
    if not {"iteration", "type", "learned_net"} <= metadata.keys() or not metadata["iteration"].isdigit():
        raise UsageError(f"not the state of a solver: give the {STATE} file of a snapshot", file)
    mine, theirs = type(optimizer).__name__, metadata["type"]
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
    return State(int(metadata["iteration"]), histories, file.with_name(Path(metadata["learned_net"]).name))


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except OSError as error:
        raise UsageError(f"it cannot be read ({error.strerror or error})", file) from None
    except SafetensorError as error:
        why = "Caffe's binary files are not supported" if file.suffix in (".caffemodel", STATE, ".h5") else "damaged?"
        raise UsageError(f"not a safetensors file ({error}): {why}", file) from None


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): one for name, one in module.named_parameters() if one.requires_grad}
