"""``gossipx.initialize``: the parameter server API of Modularized Parameter Server (Table 4.1), for loops without a
module.

``gossipx.initialize`` is the paper's Initialize; the other operations are methods of its result: ``create_table``,
``start``, ``update``, ``clock`` and ``sync``, and ``pull`` in the way of FluentPS. It calls :func:`gossipx.join` with a
module that contains only the tables, so settings, :class:`~gossipx.assembly.server.Parts` and peer are the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossipx.assembly.server import Parts
from gossipx.errors import UsageError
from gossipx.launch.environment import start_reporting
from gossipx.launch.loops.join import join, settings_of
from gossipx.runtime.training.peer import Peer
from gossipx.settings.modes import Server

OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer from tables; each server makes one for the tables that it stores."""
PAPERS_SGD: OptimizerOf = functools.partial(torch.optim.SGD, lr=0.1)
"""Plain SGD with learning rate 0.1, as in all measurements of the paper (chapter 5)."""


@dataclass(frozen=True)
class PendingPull:
    """A pull of one table under way (FluentPS, Algorithm 1, line 5); made by :meth:`ParameterServer.pull`."""

    _server: ParameterServer
    _table: int
    _iteration: int

    def wait(self) -> Tensor:
        """Return the table's values, as :meth:`ParameterServer.sync` does.

        Raises:
            UsageError: the iteration of the pull is over, and with it these values.
            GossipxError: training cannot continue.
        """
        if self._server.peer.iteration != self._iteration:
            raise UsageError(f"this pull is of iteration {self._iteration}, which is over: pull the table again")
        return self._server.sync(self._table)


class ParameterServer:
    """A worker's view of a parameter server; created by :func:`gossipx.initialize`.

    Use it as a context manager. Leaving the block ends the training; every table then has the servers' final values.
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
        """Create a table (Table 4.1, CreateTable). All peers create the same tables in the same order.

        Args:
            values: initial values, copied, on the device on which they will be used; or a shape, for zeros in float32.
            name: name in messages, without a dot; None: ``table-`` and its number.

        Returns:
            Its number, from 0.

        Raises:
            UsageError: training has started, the name is invalid or in use, or the values are not floating-point
                numbers.
        """
        if self._peer is not None or self._over:
            raise UsageError("call create_table before start, which fixes the list of tables")
        number = len(self._parameters)
        name = f"table-{number}" if name is None else name
        if not re.fullmatch(r"[\w/-]+", name) or name in self._names or hasattr(self._tables, name):
            raise UsageError(f"'{name}' is in use or not a name for a table: letters, digits and _ - / without a dot")
        if not isinstance(values, Tensor):
            values = torch.zeros(*values) if len(values) else torch.zeros(())
        if not values.is_floating_point():
            raise UsageError(f"table '{name}' has {values.dtype}: a table's values must be floating-point numbers")
        parameter = nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format))
        self._tables.register_parameter(name, parameter)
        self._parameters.append(parameter)
        self._names.append(name)
        return number

    def start(self) -> None:
        """Start (Table 4.1, Start): agree on which server stores which table, and take the servers' initial values.

        On a server that does not train (``servers_only``), serve the workers until their training is over, then exit.

        Raises:
            UsageError: training has already started, there is no table, or as :func:`gossipx.join`.
            GossipxError: as :func:`gossipx.join`.
        """
        if self._peer is not None or self._over:
            raise UsageError("start may be called only once")
        if not self._parameters:
            raise UsageError("no table exists: call create_table before start")
        self._optimizer = self._optimizer_of(self._parameters)
        self._peer = self._join_by(self._tables, self._optimizer)

    # --- while training ---------------------------------------------------------------------------

    @property
    def peer(self) -> Peer:
        """This process's peer (rank, iteration, part of the data, curves); available from start to the end of the
        block."""
        if self._peer is None or self._over:
            raise UsageError("available only from start to the end of the with block")
        return self._peer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose hyperparameters the servers follow, for learning rate schedules;
        available after start."""
        if self._optimizer is None:
            raise UsageError("the optimizer is available after start")
        return self._optimizer

    def sync(self, table: int) -> Tensor:
        """Return a table's values for this iteration (Table 4.1, Sync); waits as the sync model requires.

        Args:
            table: number of the table.

        Returns:
            The values, in the table's shape and on its device. It is the same tensor each time and changes in the first
            ``sync`` or ``update`` of a later iteration and at the end; clone it to keep the values.

        Raises:
            UsageError: the table does not exist, or training has not started.
            GossipxError: training cannot continue.
        """
        peer, number = self.peer, self._number(table)
        peer.sync([number])
        return self._parameters[number].detach()

    def pull(self, table: int) -> PendingPull:
        """Return a handle on a table's values for this iteration, without waiting for them; they come meanwhile.

        Raises:
            UsageError: the table does not exist, or training has not started.
        """
        return PendingPull(self, self._number(table), self.peer.iteration)

    def update(self, table: int, gradient: Tensor) -> None:
        """Send a table's gradient of this iteration (Table 4.1, Update); it is copied and sent at once.

        A table that was not synced in this iteration is synced first. A table without an update has a gradient of
        zeros.

        Args:
            table: number of the table.
            gradient: gradient in the table's shape.

        Raises:
            UsageError: the table does not exist, the shape differs, it is the second update in this iteration, or
                training has not started.
            GossipxError: training cannot continue.
        """
        peer, number = self.peer, self._number(table)
        name, parameter = self._names[number], self._parameters[number]
        if not isinstance(gradient, Tensor) or gradient.shape != parameter.shape:
            given = list(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            raise UsageError(f"the gradient of table '{name}' is {given}, but the table is {list(parameter.shape)}")
        if number in self._updated:
            raise UsageError(
                f"table '{name}' has two updates in one iteration: add them up, or call clock between them"
            )
        self._updated.add(number)
        peer.update(number, gradient)

    def clock(self) -> None:
        """End this iteration (Table 4.1, Clock).

        Raises:
            UsageError: training has not started.
            GossipxError: training cannot continue.
        """
        assert self.peer and self._optimizer is not None
        self._updated.clear()
        self._optimizer.step()  # there are no gradients; its hooks end the iteration

    def _number(self, table: int) -> int:
        if isinstance(table, bool) or not isinstance(table, int) or not 0 <= table < len(self._parameters):
            raise UsageError(f"unknown table {table!r}: tables are numbered 0 to {len(self._parameters) - 1}")
        return table

    # --- the end ----------------------------------------------------------------------------------

    def values(self, table: int) -> Tensor:
        """Return a table's local values: before the start the initial ones, after the end the final ones.

        Raises:
            UsageError: the table does not exist.
        """
        return self._parameters[self._number(table)].detach()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
    """Set up a parameter server (Modularized Parameter Server, Table 4.1, Initialize); ``start`` connects it.

    Args:
        peers, rank, config_file, parts: as for :func:`gossipx.join`.
        optimizer: makes the optimizer from the tables, such as ``functools.partial(torch.optim.Adam, lr=0.001)``.
        settings: any setting of ``gossipx run`` by its name: ``servers="0,1"``, ``sync="ssp:staleness=3"``. Under
            ``gossipx run`` the run's settings apply, and must include a parameter server (``--servers``).

    Raises:
        UsageError: settings are invalid, or the run has no parameter server.
    """
    start_reporting()  # errors from here on are reported in one line
    settings.setdefault("mode", "server")
    run = settings_of(config_file, settings)
    if not isinstance(run.mode, Server):
        raise UsageError("this run has no parameter server: name its servers by --servers")

    def join_by(tables: nn.Module, made: torch.optim.Optimizer) -> Peer:
        return join(tables, made, peers=peers, rank=rank, config_file=config_file, parts=parts, **settings)

    return ParameterServer(optimizer, join_by)
