"""``gossipx.attach``, which makes a Caffe-style solver a peer, and ``gossipx.get_solver``, which loads a solver file.

A solver needs ``net.params``: layer names with lists of blobs, whose ``data`` and ``diff`` are numpy arrays. pycaffe's
solvers have it, and a handwritten loop may. Models are exchanged between two iterations: in ``on_start`` if the solver
has ``add_callback``, else in :meth:`AttachedPeer.step`. With a parameter server, gradients are sent in
``on_gradients_ready``, and the tables are received before the next pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gossipx.errors import UsageError
from gossipx.launch.environment import start_reporting
from gossipx.launch.loops.initialize import OptimizerOf
from gossipx.launch.loops.join import join, settings_of
from gossipx.policies import Observation, Policy
from gossipx.runtime.figures.scores import Score
from gossipx.runtime.training.peer import Peer
from gossipx.settings.modes import Server
from gossipx.solver import prototxt
from gossipx.solver.net import Objective
from gossipx.solver.solver import Solver


class CaffeBlob(Protocol):
    """Values and their gradients, as numpy arrays."""

    @property
    def data(self) -> NDArray[Any]:
        """The values; written in place when another model has been mixed in."""

    @property
    def diff(self) -> NDArray[Any]:
        """The gradients, in the same shape."""


class CaffeNet(Protocol):
    """A network with trainable blobs."""

    @property
    def params(self) -> Mapping[str, Sequence[CaffeBlob]]:
        """Blobs by layer name."""


class HasNet(Protocol):
    """A solver with a training net."""

    @property
    def net(self) -> CaffeNet:
        """The training net."""


class Blobs(nn.Module):
    """A net's blobs as the parameters of a module. Parameters have their own memory; values are copied on demand.

    Args:
        net: the net.

    Raises:
        UsageError: a blob is read-only, or its values are not floating-point numbers.
    """

    def __init__(self, net: CaffeNet):
        super().__init__()
        self._net = net
        self._pairs: list[tuple[str, int, nn.Parameter]] = []
        places: set[tuple[int, tuple[int, ...]]] = set()  # layers may share a blob
        for layer, number, blob in self._blobs():
            values = _checked(blob.data, f"{layer}[{number}]")
            place = values.__array_interface__["data"][0], values.shape
            if place not in places:
                places.add(place)
                parameter = nn.Parameter(torch.from_numpy(np.array(values, order="C")))
                self.register_parameter(_name(layer, number), parameter)
                self._pairs.append((layer, number, parameter))
        if not self._pairs:
            raise UsageError("the solver's net.params holds no blobs: nothing to exchange")

    def _blobs(self) -> Iterator[tuple[str, int, CaffeBlob]]:
        for layer, blobs in self._net.params.items():
            for number, blob in enumerate(blobs):
                yield layer, number, blob

    def to_arena(self) -> None:
        """Copy the solver's values to the arena.

        Raises:
            UsageError: the shape of a blob has changed; the same in the other methods.
        """
        for layer, number, parameter in self._pairs:
            np.copyto(parameter.detach().numpy(), self._part("data", layer, number, parameter))

    def to_solver(self) -> None:
        """Copy the arena's values to the solver."""
        for layer, number, parameter in self._pairs:
            np.copyto(self._part("data", layer, number, parameter), parameter.detach().numpy())

    def gradients(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the ``diff`` of each blob, with the number of its table."""
        for table, (layer, number, parameter) in enumerate(self._pairs):
            diff = self._part("diff", layer, number, parameter)
            yield table, torch.from_numpy(np.ascontiguousarray(diff))

    def _part(self, part: str, layer: str, number: int, parameter: nn.Parameter) -> NDArray[Any]:
        """Return a blob's ``data`` or ``diff``. The solver may have replaced it; numpy would broadcast
        a smaller array."""
        array: Any = getattr(self._net.params[layer][number], part)
        if not isinstance(array, np.ndarray) or array.shape != parameter.shape:
            given = f"of shape {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise UsageError(
                f"blob {layer}[{number}]: its {part} is {given}, but its data had shape {list(parameter.shape)}"
                " when it was attached: write into the existing array"
            )
        return array


def _name(layer: str, number: int) -> str:
    """Return a unique parameter name for a blob; names of parameters contain no dots."""
    return f"{layer}[{number}]".replace("%", "%25").replace(".", "%2E")


def _checked(values: object, called: str) -> NDArray[Any]:
    if not isinstance(values, np.ndarray) or values.dtype not in (np.float16, np.float32, np.float64):
        given = str(values.dtype) if isinstance(values, np.ndarray) else type(values).__name__
        raise UsageError(f"blob {called}: its data is {given}, but must be a numpy array of floating-point numbers")
    if not values.flags.writeable:
        raise UsageError(f"blob {called}: its data is read-only, but received models must be written there")
    return values


class AttachedPeer:
    """A solver as a peer; created by :func:`gossipx.attach`. Use it as a context manager, like :class:`gossipx.Peer`.

    Args:
        peer: the peer.
        exchange: reports an update to the peer and copies the resulting model to the solver.
        settle: copies the peer's final model to the solver's net.

    Attributes:
        peer: the peer, with its rank, size, iteration, curves and part of the data.
    """

    def __init__(self, peer: Peer, exchange: Callable[[], None], settle: Callable[[], None]):
        self.peer = peer
        self._exchange = exchange
        self._settle = settle
        self._updates = False  # whether the current iteration updates the values

    def step(self) -> None:
        """Report an update of the solver, which ends an iteration. A solver with ``add_callback`` calls this itself.

        Raises:
            GossipxError: training cannot continue (too few peers are left, or models differ).
        """
        self._exchange()
        self._updates = False  # not if that fails: the next iteration would begin as if nothing had

    def on_start(self) -> None:
        """Handle the start of an iteration. The previous update is complete; solvers have no callback for that."""
        if self._updates:
            self.step()

    def on_gradients_ready(self) -> None:
        """Note that an update follows."""
        self._updates = True

    def finish(self) -> None:
        """End the training: agree on the final model and copy it to the solver's net."""
        self.on_start()
        self.peer.finish()
        self._settle()

    def __enter__(self) -> AttachedPeer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
        else:
            self.peer.__exit__(kind, error, trace)


def get_solver(path: str | Path, *, net: nn.Module, loss: Objective, train: Iterable[Any], **options: Any) -> Solver:
    """Return a solver from its ``solver.prototxt``.

    Args:
        path: text file with Caffe's SolverParameter. A warning lists fields that have no effect here, such as the net.
        net, loss, train, options: as for :class:`gossipx.Solver`.

    Raises:
        UsageError: as :class:`gossipx.Solver`; or the file cannot be read (names line and column).
    """
    start_reporting()  # errors from here on are reported in one line
    return Solver(prototxt.read_solver(Path(path)), net=net, loss=loss, train=train, **options)


def attach(
    solver: HasNet,
    *,
    peers: str | Path | None = None,
    policy: str | Policy | Callable[[Observation], bool] | None = None,
    rank: int | None = None,
    optimizer: OptimizerOf | None = None,
    evaluate: Callable[[Any], Score] | None = None,
    config_file: str | Path | None = None,
    **settings: Any,
) -> AttachedPeer:
    """Make this process a peer whose model is a solver's net: each update of the solver is an iteration of the run.

    The net takes the initial values of the run. A solver with ``add_callback`` (pycaffe's, :class:`gossipx.Solver`)
    needs no other change; your own loop calls :meth:`gossipx.launch.loops.attach.AttachedPeer.step` after each update.

    With a parameter server (``--servers``) the servers make the updates and the solver's own update has no effect. A
    :class:`gossipx.Solver` passes its update rule to the servers. Of other solvers the ``diff`` is sent unchanged,
    before the solver's clipping, scaling and weight decay.

    Args:
        solver: a solver with ``net.params``: layer names, each with blobs that have ``data`` and ``diff``.
        peers, policy, rank, config_file, settings: as for :func:`gossipx.join`.
        optimizer: with a parameter server and a solver that is not gossipx's: makes the servers' optimizer from the
            tables, such as ``functools.partial(torch.optim.SGD, lr=0.01)``.
        evaluate: as for :func:`gossipx.join`, but of the net of the given solver.

    Raises:
        UsageError: as :func:`gossipx.join`; there is no net, its blobs cannot be exchanged, or add_callback is not
            pycaffe's.
        GossipxError: as :func:`gossipx.join`.
    """
    start_reporting()  # errors from here on are reported in one line
    run = settings_of(config_file, settings)
    served = isinstance(run.mode, Server)
    options = {"peers": peers, "policy": policy, "rank": rank, "config_file": config_file, **settings}
    if isinstance(solver, Solver):
        if optimizer is not None:
            raise UsageError(
                "optimizer= is for solvers that are not gossipx's: the solver file defines the update of this one"
            )
        return _attach_own(solver, served, evaluate, options)
    if not isinstance(getattr(getattr(solver, "net", None), "params", None), Mapping):
        raise UsageError(f"{type(solver).__name__} is not a solver: attach needs its net.params, blobs by layer")
    if served != (optimizer is not None):
        raise UsageError(
            "with a parameter server, give optimizer=, with which the servers make the updates"
            if served
            else "optimizer= is for a run with a parameter server: leave it out"
        )
    return _attach_blobs(solver, optimizer, evaluate, options)


def _attach_own(
    solver: Solver, served: bool, evaluate: Callable[[Any], Score] | None, options: dict[str, Any]
) -> AttachedPeer:
    """Attach a gossipx solver: its module is joined directly, so no values need to be copied."""
    judge = None if evaluate is None else lambda module: evaluate(solver)
    peer = join(solver.net.module, solver.optimizer if served else None, evaluate=judge, **options)
    if peer.size > 1:
        solver.snapshot_prefix = solver.snapshot_prefix.with_name(f"{solver.snapshot_prefix.name}_peer-{peer.rank:02d}")
    peer.checkpoint_part("solver", state_dict=solver.state_dict, load_state_dict=solver.load_state_dict)
    solver.iter = max(solver.iter, peer.iteration)  # a late peer starts at the others' iteration

    def stop() -> None:
        solver.iter = peer.iteration  # with servers the optimizer's step ends the iteration before the solver counts it
        solver.settle = _nothing  # the peer waits for no more tables
        solver.stop_early(solver.param.snapshot_after_train)

    peer.before_leaving(stop)
    if served:  # the optimizer's hooks report updates
        solver.settle = peer.sync
        return AttachedPeer(peer, _nothing, _nothing)
    attached = AttachedPeer(peer, peer.step, _nothing)
    solver.add_callback(attached.on_start, attached.on_gradients_ready)
    return attached


def _attach_blobs(
    solver: HasNet, optimizer: OptimizerOf | None, evaluate: Callable[[Any], Score] | None, options: dict[str, Any]
) -> AttachedPeer:
    add_callback = _add_callback(solver)
    blobs = Blobs(solver.net)
    made = None if optimizer is None else optimizer(list(blobs.parameters()))

    def judge(module: nn.Module) -> Score:
        assert evaluate is not None
        blobs.to_solver()
        return evaluate(solver)

    def exchange() -> None:
        mixes = peer.mixes
        blobs.to_arena()
        peer.step()
        if peer.mixes != mixes:
            blobs.to_solver()

    def push() -> None:
        assert made is not None
        for table, gradient in blobs.gradients():
            peer.update(table, gradient)
        made.step()  # there are no gradients; its hooks end the iteration

    def pull() -> None:
        peer.sync()
        blobs.to_solver()

    def push_and_pull() -> None:
        push()
        pull()

    peer = join(blobs, made, evaluate=None if evaluate is None else judge, **options)
    blobs.to_solver()
    attached = AttachedPeer(peer, exchange if made is None else push_and_pull, blobs.to_solver)
    if add_callback is not None and made is None:
        add_callback(attached.on_start, attached.on_gradients_ready)
    elif add_callback is not None:
        add_callback(pull, push)
    return attached


def _add_callback(solver: HasNet) -> Callable[[Callable[[], None], Callable[[], None]], object] | None:
    """Return the solver's ``add_callback``, or None if it has none. Its signature is checked here, before joining."""
    found: Any = getattr(solver, "add_callback", None)
    if found is None:
        return None
    try:
        inspect.signature(found).bind(_nothing, _nothing)
    except ValueError:  # pycaffe's is compiled and has no signature
        pass
    except TypeError:
        raise UsageError(
            f"{type(solver).__name__}.add_callback is not pycaffe's add_callback(on_start, on_gradients_ready):"
            " let it accept both, or rename it and call step() after each update"
        ) from None
    return cast("Callable[[Callable[[], None], Callable[[], None]], object]", found)


def _nothing() -> None:
    """Do nothing."""
