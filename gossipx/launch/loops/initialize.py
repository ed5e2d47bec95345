"""A parameter server by the names of Modularized Parameter Server's Table 4.1, for a loop that has no torch module.

``gossipx.initialize`` is the paper's Initialize; the other five are methods of what it gives: ``create_table``,
``start``, ``update``, ``clock`` and ``sync``. It is :func:`gossipx.join` on a module that holds nothing but the tables:
the same settings, the same :class:`~gossipx.assembly.server.Parts`, the same peer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from gossipx.assembly.server import Parts
from gossipx.errors import UsageError
from gossipx.launch.environment import progress
from gossipx.launch.loops.join import join, settings_of
from gossipx.runtime.peer import Peer

OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of the tables; servers make one each of those that lie there."""
PAPERS_SGD: OptimizerOf = functools.partial(torch.optim.SGD, lr=0.1)
"""Canonical SGD with learning rate 0.1, as all of the paper's measurements (chapter 5)."""


class ParameterServer:
    """One worker's view of a parameter server; made by :func:`gossipx.initialize`.

    Use it as a context manager. Leaving the block ends the training: every table then holds what the servers have.
    """

    def __init__(self, optimizer: OptimizerOf, join_by: Callable[[nn.Module, torch.optim.Optimizer], Peer]):
        self._optimizer_of = optimizer
        self._join_by = join_by
        self._tables = nn.Module()
        self._parameters: list[nn.Parameter] = []
        self._names: list[str] = []
        self._updated: set[int] = set()
        self._peer: Peer | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._over = False

    # --- before the start -------------------------------------------------------------------------

    def create_table(self, values: Tensor | Sequence[int], name: str | None = None) -> int:
        """Create a table (Table 4.1, CreateTable). All peers create the same ones in the same order.

        Args:
            values: to begin with, copied, on the device where they are to be used; or a shape, for zeros in float32.
            name: for people, without a dot; None: ``table-`` and its number.

        Returns:
            Its number, from 0.

        Raises:
            UsageError: after the start, a name that is none or in use, or values that cannot be trained.
        """
        if self._peer is not None or self._over:
            raise UsageError("create_table comes before start, which tells all peers what tables there are")
        number = len(self._parameters)
        name = f"table-{number}" if name is None else name
        if not re.fullmatch(r"[\w/-]+", name) or name in self._names or hasattr(self._tables, name):
            raise UsageError(f"'{name}' is no name for a table, or in use: letters, digits and _ - / without a dot")
        if not isinstance(values, Tensor):
            values = torch.zeros(*values) if len(values) else torch.zeros(())
        if not values.is_floating_point():
            raise UsageError(f"table '{name}' is of {values.dtype}: a table's values are floating-point numbers")
        parameter = nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format))
        self._tables.register_parameter(name, parameter)
        self._parameters.append(parameter)
        self._names.append(name)
        return number

    def start(self) -> None:
        """Begin (Table 4.1, Start): agree on who holds what, and take the values that the servers begin with.

        A server that does not train (``servers_only``) serves the others here until their training is over, and exits.

        Raises:
            UsageError: it has begun already, there is no table, or as :func:`gossipx.join`.
            GossipxError: as :func:`gossipx.join`.
        """
        if self._peer is not None or self._over:
            raise UsageError("start begins the training once")
        if not self._parameters:
            raise UsageError("there is no table to start with: call create_table")
        self._optimizer = self._optimizer_of(self._parameters)
        self._peer = self._join_by(self._tables, self._optimizer)

    # --- while training ---------------------------------------------------------------------------

    @property
    def peer(self) -> Peer:
        """This process as a peer (its rank, the iteration, its part of the data, its curves), once it has started."""
        if self._peer is None or self._over:
            raise UsageError("this is for the time from start to the end of the with block")
        return self._peer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Whose settings the servers' steps follow, for a schedule of the learning rate, once it has started."""
        if self._optimizer is None:
            raise UsageError("the optimizer is made by start")
        return self._optimizer

    def sync(self, table: int) -> Tensor:
        """A table's values to compute with in this iteration (Table 4.1, Sync); waits as the sync model says.

        Args:
            table: its number.

        Returns:
            In the table's shape, on its device. The tensor is the same each time, and changes in the first ``sync`` or
            ``update`` of a later iteration and at the end: clone it to keep it.

        Raises:
            UsageError: no such table, or it has not started.
            GossipxError: training cannot go on.
        """
        peer, number = self.peer, self._number(table)
        peer.sync([number])
        return self._parameters[number].detach()

    def update(self, table: int, gradient: Tensor) -> None:
        """Give a table's gradient of this iteration (Table 4.1, Update); it is copied and leaves at once.

        A table that was not synced in this iteration is synced first. One without an update has a gradient of zeros.

        Args:
            table: its number.
            gradient: in the table's shape.

        Raises:
            UsageError: no such table, another shape, a second one in an iteration, or it has not started.
            GossipxError: training cannot go on.
        """
        peer, number = self.peer, self._number(table)
        name, parameter = self._names[number], self._parameters[number]
        if not isinstance(gradient, Tensor) or gradient.shape != parameter.shape:
            given = list(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            raise UsageError(f"the gradient of table '{name}' is {given}, and the table {list(parameter.shape)}")
        if number in self._updated:
            raise UsageError(f"table '{name}' has two updates in one iteration: add them up, or call clock between")
        self._updated.add(number)
        peer.update(number, gradient)

    def clock(self) -> None:
        """This iteration is over (Table 4.1, Clock).

        Raises:
            UsageError: it has not started.
            GossipxError: training cannot go on.
        """
        assert self.peer and self._optimizer is not None
        self._updated.clear()
        self._optimizer.step()  # finds no gradients; what hangs on it ends the iteration

    def _number(self, table: int) -> int:
        if isinstance(table, bool) or not isinstance(table, int) or not 0 <= table < len(self._parameters):
            raise UsageError(f"there is no table {table!r}: create_table gave 0 to {len(self._parameters) - 1}")
        return table

    # --- the end ----------------------------------------------------------------------------------

    def values(self, table: int) -> Tensor:
        """A table's values as they are here: before the start those it was made with, after the end the final ones.

        Raises:
            UsageError: no such table.
        """
        return self._parameters[self._number(table)].detach()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        if self._peer is not None:
            self._peer.__exit__(kind, error, trace)


def initialize(
    *,
    peers: str | Path | None = None,
    rank: int | None = None,
    optimizer: OptimizerOf = PAPERS_SGD,
    config_file: str | Path | None = None,
    parts: Parts | None = None,
    **settings: Any,
) -> ParameterServer:
    """Set a parameter server up (Modularized Parameter Server, Table 4.1, Initialize); start connects it.

    Args:
        peers, rank, config_file, parts: as for :func:`gossipx.join`.
        optimizer: makes the optimizer from the tables, ``functools.partial(torch.optim.Adam, lr=0.001)``, say.
        settings: any setting of ``gossipx run`` by its name: ``servers="0,1"``, ``sync="ssp:staleness=3"``. Under
            ``gossipx run`` the run's hold, and it is to have a parameter server (``--servers``).

    Raises:
        UsageError: settings that do not fit, or of a run without a parameter server.
    """
    progress()  # from here on, under a run, an error is one line
    settings.setdefault("mode", "server")
    run = settings_of(config_file, settings)
    if run.sync.mode != "server" and run.server.servers is None:
        raise UsageError("this run has no parameter server: name the peers that hold it by --servers")

    def join_by(tables: nn.Module, made: torch.optim.Optimizer) -> Peer:
        return join(tables, made, peers=peers, rank=rank, config_file=config_file, parts=parts, **settings)

    return ParameterServer(optimizer, join_by)
