"""Files of a solver: the weights, ``{prefix}_iter_{N}.safetensors``, and beside them ``{prefix}_iter_{N}.solverstate``.

Both are safetensors files. The state holds the optimizer's histories, ``PARAMETER/HISTORY``, and in its metadata the
iteration, the solver's type and the name of the file with the weights, which lies in the same directory.
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
    """Where snapshots lie, and how their names begin, as Caffe has it.

    A directory is augmented by the solver file's name without its suffix; none given is the file's without its suffix.

    Args:
        given: the solver file's ``snapshot_prefix``; empty: none.
        file: the solver file; None: there is none.
    """
    stem = "solver" if file is None else file.stem
    if not given:
        return Path(stem) if file is None else file.with_suffix("")
    return Path(given) / stem if Path(given).is_dir() or given.endswith("/") else Path(given)


def probe(prefix: Path) -> None:
    """See that snapshots can be written, before hours of training.

    Raises:
        OSError: they cannot.
    """
    # Other peers of the script may try the same prefix at the same moment: each has a file of its own.
    with tempfile.NamedTemporaryFile(dir=prefix.parent, prefix=f"{prefix.name}_", suffix=".tempfile"):
        pass


def save(prefix: Path, iteration: int, module: nn.Module, optimizer: CaffeOptimizer) -> tuple[Path, Path]:
    """Write a snapshot: the weights first, so that a state never names what is not there.

    Returns:
        The files of the weights and of the state.

    Raises:
        GossipxError: it cannot be written; no half of a file is left.
    """
    stem = f"{prefix.name}_iter_{iteration}"
    weights, state = prefix.with_name(stem + WEIGHTS), prefix.with_name(stem + STATE)
    safetensors_file.write(weights, safetensors_file.tensors_of(module), KNOB)
    histories = {
        f"{name}/{kind}": history
        for name, parameter in _parameters(module).items()
        for kind, history in optimizer.state.get(parameter, {}).items()
    }
    told = {"iteration": str(iteration), "type": type(optimizer).__name__, "learned_net": weights.name}
    safetensors_file.write(state, histories, KNOB, told)
    return weights, state


def load_weights(file: Path, module: nn.Module) -> None:
    """Take the weights of a file, by name, as Caffe does: what the file or the module has alone is left as it is.

    Raises:
        UsageError: it cannot be read, no name is the module's, or a shape is not; nothing was changed then.
    """
    found, _ = _read(file)
    own = safetensors_file.tensors_of(module)
    shared = own.keys() & found.keys()
    if not shared:
        raise UsageError(f"none of its tensors is of this net, which has {next(iter(own))} and others", file)
    for name in sorted(shared):
        if found[name].shape != own[name].shape:
            raise UsageError(f"'{name}' is {list(found[name].shape)} there, and {list(own[name].shape)} here", file)
    with torch.no_grad():
        for name in shared:
            own[name].copy_(found[name])


@dataclass(frozen=True)
class State:
    """What a solver goes on from: iterations done, the histories by parameter and kind, and the file of the weights."""

    iteration: int
    histories: dict[nn.Parameter, dict[str, Tensor]]
    weights: Path


def load_state(file: Path, module: nn.Module, optimizer: CaffeOptimizer) -> State:
    """Read the state of a snapshot; nothing is changed.

    Raises:
        UsageError: it cannot be read, or is of another net or another type of solver.
    """
    tensors, told = _read(file)
    if not {"iteration", "type", "learned_net"} <= told.keys() or not told["iteration"].isdigit():
        raise UsageError(f"this is no solver's state, the {STATE} file of a snapshot", file)
    mine = type(optimizer).__name__
    if told["type"] != mine:
        raise UsageError(f"it is of a solver of type {told['type']}, and this one is {mine}: set type in it", file)
    parameters = _parameters(module)
    histories: dict[nn.Parameter, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or parameter.shape != tensor.shape:
            here = "not" if parameter is None else str(list(parameter.shape))
            raise UsageError(f"it has '{name}' of {list(tensor.shape)}, and this net has it {here}", file)
        histories.setdefault(parameter, {})[kind] = tensor.to(parameter.device)
    return State(int(told["iteration"]), histories, file.with_name(Path(told["learned_net"]).name))


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except OSError as error:
        raise UsageError(f"it cannot be read ({error.strerror or error})", file) from None
    except SafetensorError as error:
        told = "Caffe's own binary files are not read" if file.suffix in (".caffemodel", STATE, ".h5") else "damaged?"
        raise UsageError(f"this is no safetensors file ({error}): {told}", file) from None


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): one for name, one in module.named_parameters() if one.requires_grad}
