"""``gossipx.get_solver``: Caffe's solver by its file; ``gossipx.attach``: makes a solver a peer, whoever wrote it.

What is asked of a solver is ``net.params``, layers' names with lists of blobs, whose ``data`` and ``diff`` are arrays
of numpy's: pycaffe's solvers have it, and so may a loop that is written by hand. Models are exchanged between two
iterations, in ``on_start`` where there is ``add_callback``, else in :meth:`AttachedPeer.step`; with a parameter server
gradients leave in ``on_gradients_ready``, and its tables come in before the next pass.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gossipx.errors import UsageError
from gossipx.launch.environment import progress
from gossipx.launch.loops.initialize import OptimizerOf
from gossipx.launch.loops.join import join, settings_of
from gossipx.policies import Observation, Policy
from gossipx.runtime.peer import Peer
from gossipx.solver import prototxt
from gossipx.solver.net import Objective
from gossipx.solver.solver import Solver


class Blob(Protocol):
    """Values and their gradients."""

    @property
    def data(self) -> NDArray[Any]:
        """Written in place when another model has come in."""

    @property
    def diff(self) -> NDArray[Any]:
        """In the same shape."""


class Net(Protocol):
    """What is trained."""

    @property
    def params(self) -> Mapping[str, Sequence[Blob]]:
        """Blobs by layer."""


class HasNet(Protocol):
    """A solver."""

    @property
    def net(self) -> Net:
        """The training net."""


class Head(enum.Enum):
    """Which side has the newer values; Caffe's SyncedMemory keeps the same of its two."""

    AT_SOLVER = enum.auto()
    AT_ARENA = enum.auto()
    SYNCED = enum.auto()


class Blobs(nn.Module):
    """A net's blobs as a module's parameters, which have memory of their own: values move when the other side is newer.

    Args:
        net: whose blobs.

    Attributes:
        head: which side is newer.

    Raises:
        UsageError: a blob that cannot be written, or holds no floating-point numbers.
    """

    def __init__(self, net: Net):
        super().__init__()
        self.head = Head.SYNCED
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

    def _blobs(self) -> Iterator[tuple[str, int, Blob]]:
        for layer, blobs in self._net.params.items():
            for number, blob in enumerate(blobs):
                yield layer, number, blob

    def to_arena(self) -> None:
        """Have the arena hold the solver's values, if these are newer.

        Raises:
            UsageError: a blob that has another shape by now; so do the others here.
        """
        if self.head is Head.AT_SOLVER:
            for layer, number, parameter in self._pairs:
                np.copyto(parameter.detach().numpy(), self._part("data", layer, number, parameter))
            self.head = Head.SYNCED

    def to_solver(self) -> None:
        """Have the solver hold the arena's values, if these are newer."""
        if self.head is Head.AT_ARENA:
            for layer, number, parameter in self._pairs:
                np.copyto(self._part("data", layer, number, parameter), parameter.detach().numpy())
            self.head = Head.SYNCED

    def gradients(self) -> Iterator[tuple[int, torch.Tensor]]:
        """What the blobs have as ``diff``, by the number of the table."""
        for table, (layer, number, parameter) in enumerate(self._pairs):
            diff = self._part("diff", layer, number, parameter)
            yield table, torch.from_numpy(np.ascontiguousarray(diff))

    def _part(self, part: str, layer: str, number: int, parameter: nn.Parameter) -> NDArray[Any]:
        """A blob's ``data`` or ``diff``, which the solver may have put anew; numpy would stretch a smaller one."""
        array: Any = getattr(self._net.params[layer][number], part)
        if not isinstance(array, np.ndarray) or array.shape != parameter.shape:
            given = f"of shape {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise UsageError(
                f"blob {layer}[{number}]: its {part} is {given}, and its data was of shape {list(parameter.shape)}"
                " when it was attached: write into the array that is there"
            )
        return array


def _name(layer: str, number: int) -> str:
    """A blob's among a module's parameters, whose names hold no dots: each blob has one of its own."""
    return f"{layer}[{number}]".replace("%", "%25").replace(".", "%2E")


def _checked(values: object, called: str) -> NDArray[Any]:
    if not isinstance(values, np.ndarray) or values.dtype not in (np.float16, np.float32, np.float64):
        given = str(values.dtype) if isinstance(values, np.ndarray) else type(values).__name__
        raise UsageError(f"blob {called}: its data is {given}, and is to be a numpy array of floating-point numbers")
    if not values.flags.writeable:
        raise UsageError(f"blob {called}: its data cannot be written, and other models are to come in there")
    return values


class AttachedPeer:
    """A solver as a peer; made by :func:`gossipx.attach`. Use it as a context manager, as :class:`gossipx.Peer`.

    Args:
        peer: the peer.
        exchange: tells the peer of an update, and brings what has come of it to the solver.
        settle: has the solver's net hold what the peer ends with.

    Attributes:
        peer: its rank, size and iteration, its curves, its part of the data.
    """

    def __init__(self, peer: Peer, exchange: Callable[[], None], settle: Callable[[], None]):
        self.peer = peer
        self._exchange = exchange
        self._settle = settle
        self._updates = False  # of the iteration that goes on, or has just ended

    def step(self) -> None:
        """The solver has made an update: one iteration is done. A solver with ``add_callback`` has this called.

        Raises:
            GossipxError: training cannot go on (too few peers left, models that differ).
        """
        self._updates = False
        self._exchange()

    def on_start(self) -> None:
        """An iteration begins: the update of the one before is done, which a solver has no callback for."""
        if self._updates:
            self.step()

    def on_gradients_ready(self) -> None:
        """The update comes next."""
        self._updates = True

    def finish(self) -> None:
        """Training is over: agree with the others, and have the solver's net hold that."""
        self.on_start()
        self.peer.finish()
        self._settle()

    def __enter__(self) -> AttachedPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.peer.__exit__(kind, error, trace)


def get_solver(path: str | Path, *, net: nn.Module, loss: Objective, train: Iterable[Any], **options: Any) -> Solver:
    """A solver by its ``solver.prototxt``.

    Args:
        path: a text file of Caffe's SolverParameter. What has no meaning here, such as its net, is warned about.
        net, loss, train, options: as for :class:`gossipx.Solver`.

    Raises:
        UsageError: as :class:`gossipx.Solver`; or a file that cannot be read, by line and column.
    """
    progress()  # from here on, under a run, an error is one line
    return Solver(prototxt.read(Path(path)), net=net, loss=loss, train=train, **options)


def attach(
    solver: HasNet,
    *,
    peers: str | Path | None = None,
    policy: str | Policy | Callable[[Observation], bool] | None = None,
    rank: int | None = None,
    optimizer: OptimizerOf | None = None,
    evaluate: Callable[[Any], float] | None = None,
    config_file: str | Path | None = None,
    **settings: Any,
) -> AttachedPeer:
    """Make this process a peer whose model is a solver's net: each update of the solver is an iteration of the run.

    The net takes the values of the peer that began. A solver with ``add_callback`` (pycaffe's, :class:`gossipx.Solver`)
    goes on as ever; a loop of one's own calls :meth:`gossipx.launch.loops.attach.AttachedPeer.step` after each update.

    With a parameter server (``--servers``) the servers make the updates, and the solver's own has no effect: a
    :class:`gossipx.Solver` brings its formulas along; of others gradients leave as they are in ``diff``, before any
    clipping, scaling and decay of the solver's.

    Args:
        solver: with ``net.params``: layers' names, each with blobs that have ``data`` and ``diff``.
        peers, policy, rank, config_file, settings: as for :func:`gossipx.join`.
        optimizer: with a parameter server, of solvers that are not gossipx's: makes the servers' optimizer of the
            tables, ``functools.partial(torch.optim.SGD, lr=0.01)``, say.
        evaluate: gives the accuracy of the net of the solver that it is given, from 0 to 1.

    Raises:
        UsageError: as :func:`gossipx.join`; no net, blobs that cannot be exchanged, or an add_callback that is not
            pycaffe's.
        GossipxError: as :func:`gossipx.join`.
    """
    progress()  # from here on, under a run, an error is one line
    run = settings_of(config_file, settings)
    served = run.sync.mode == "server" or run.server.servers is not None
    options = {"peers": peers, "policy": policy, "rank": rank, "config_file": config_file, **settings}
    if isinstance(solver, Solver):
        if optimizer is not None:
            raise UsageError(
                "optimizer= is for solvers that are not gossipx's: the solver file says how this one updates"
            )
        return _attach_own(solver, served, evaluate, options)
    if not isinstance(getattr(getattr(solver, "net", None), "params", None), Mapping):
        raise UsageError(f"{type(solver).__name__} is no solver: attach looks for its net.params, blobs by layer")
    if served != (optimizer is not None):
        told = "needs optimizer=, which makes them" if served else "has none: leave optimizer= out"
        raise UsageError(f"a run whose servers make the updates {told}" if served else f"a run without servers {told}")
    return _attach_blobs(solver, optimizer, evaluate, options)


def _attach_own(
    solver: Solver, served: bool, evaluate: Callable[[Any], float] | None, options: dict[str, Any]
) -> AttachedPeer:
    """Its module is joined as it is: there is nothing to move."""
    judge = None if evaluate is None else lambda module: evaluate(solver)
    peer = join(solver.net.module, solver.optimizer if served else None, evaluate=judge, **options)
    if peer.size > 1:
        solver.snapshot_prefix = solver.snapshot_prefix.with_name(f"{solver.snapshot_prefix.name}_peer-{peer.rank:02d}")
    peer.checkpoint_part("solver", state_dict=solver.state_dict, load_state_dict=solver.load_state_dict)
    solver.iter = max(solver.iter, peer.iteration)  # one that joins a run under way begins where the others are
    if served:  # its optimizer tells of updates
        solver.settle = peer.sync
        return AttachedPeer(peer, _nothing, _nothing)
    attached = AttachedPeer(peer, peer.step, _nothing)
    solver.add_callback(attached.on_start, attached.on_gradients_ready)
    return attached


def _attach_blobs(
    solver: HasNet, optimizer: OptimizerOf | None, evaluate: Callable[[Any], float] | None, options: dict[str, Any]
) -> AttachedPeer:
    add_callback = _add_callback(solver)
    blobs = Blobs(solver.net)
    made = None if optimizer is None else optimizer(list(blobs.parameters()))

    def judge(module: nn.Module) -> float:
        assert evaluate is not None
        settle()
        return evaluate(solver)

    def settle() -> None:
        blobs.head = Head.AT_ARENA
        blobs.to_solver()

    def exchange() -> None:
        mixes = peer.mixes
        blobs.head = Head.AT_SOLVER
        blobs.to_arena()
        peer.step()
        if peer.mixes != mixes:
            settle()

    def push() -> None:
        assert made is not None
        for table, gradient in blobs.gradients():
            peer.update(table, gradient)
        made.step()  # finds no gradients; what hangs on it ends the iteration

    def pull() -> None:
        peer.sync()
        settle()

    def push_and_pull() -> None:
        push()
        pull()

    peer = join(blobs, made, evaluate=None if evaluate is None else judge, **options)
    settle()
    attached = AttachedPeer(peer, exchange if made is None else push_and_pull, settle)
    if add_callback is not None and made is None:
        add_callback(attached.on_start, attached.on_gradients_ready)
    elif add_callback is not None:
        add_callback(pull, push)
    return attached


def _add_callback(solver: HasNet) -> Callable[[Callable[[], None], Callable[[], None]], object] | None:
    """What takes callbacks, if anything does; it is called once the others are there, and looked at before that."""
    found: Any = getattr(solver, "add_callback", None)
    if found is None:
        return None
    try:
        inspect.signature(found).bind(_nothing, _nothing)
    except ValueError:  # pycaffe's is compiled, and tells nothing of its arguments
        pass
    except TypeError:
        raise UsageError(
            f"{type(solver).__name__}.add_callback is not pycaffe's add_callback(on_start, on_gradients_ready):"
            " have it take both, or rename it and call step() after each update"
        ) from None
    return cast("Callable[[Callable[[], None], Callable[[], None]], object]", found)


def _nothing() -> None:
    """There is nothing to do."""
