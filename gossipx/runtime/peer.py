"""The peer as a training script holds it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from gossipx.comm import CommManager
from gossipx.errors import UsageError
from gossipx.model.arena import ParameterArena
from gossipx.protocol.events import StepDone
from gossipx.runtime import exit_hooks
from gossipx.runtime.backward import Backward, Bypass
from gossipx.runtime.checkpoints import Checkpoints
from gossipx.runtime.driver import Driver
from gossipx.runtime.lifecycle import Lifecycle
from gossipx.runtime.options import PeerOptions
from gossipx.runtime.reporting import Reporter
from gossipx.specs import rank_of


class Peer:
    """One process with one model replica; made by :func:`gossipx.join`.

    Use it as a context manager: leaving the block ends the training, by default with a last wave after which all peers
    hold the average of their models. A script that never says so does it when it exits.

    Attributes:
        rank: from 0 to ``size`` − 1.
        size: peers in the run.
        iteration: iterations done; a peer that joins a run under way begins where the others are.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        driver: Driver,
        comm: CommManager,
        reporter: Reporter,
        checkpoints: Checkpoints,
        options: PeerOptions,
        backward: Callable[[Callable[[], None]], Backward] | None = None,
    ):
        self.rank = driver.role.rank
        self.size = driver.role.size
        self._lifecycle = Lifecycle(module, driver, comm, reporter, checkpoints, options, backward)
        self._module = module
        self._driver = driver
        self._role = driver.role
        self._arena = driver.arena
        self._comm = comm
        self._reporter = reporter
        self._checkpoints = checkpoints
        self._options = options
        self._backward = self._lifecycle.backward
        self._bypass: Bypass | None = None
        if optimizer is not None:
            self._lifecycle.unhook.append(optimizer.register_step_post_hook(self._optimizer_stepped).remove)
            if self._backward is not None:
                self._bypass = Bypass(optimizer, self._backward.iteration_done)
                self._lifecycle.unhook.append(self._bypass.close)

    # --- the training loop --------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self._arena.step

    @property
    def mixes(self) -> int:
        """How often another's model has entered this one; between two calls of :meth:`step` it stays the same.

        With a parameter server tables come in instead.
        """
        return self._arena.mixes

    @property
    def arena(self) -> ParameterArena:
        """The vectors in which the model lies, for who keeps copies of it in step; not to be written to."""
        return self._arena

    @property
    def trains(self) -> bool:
        """Whether it trains; else it only serves those that do, in :meth:`finish`."""
        return self._role.trains

    def step(self) -> None:
        """One iteration is done: measure it, and let the policy decide. A joined optimizer calls this itself.

        Raises:
            GossipxError: training cannot go on (too few peers left, models that differ).
        """
        if not self._lifecycle.open:
            return
        began = time.perf_counter()
        exit_hooks.training_continues()
        if self._arena.step % self._options.distance_interval == 0:
            self._arena.check(self._module)
        self._lifecycle.steps += 1
        delta = self._arena.step_done()
        drift = self._driver.captures.drift(self._role.pulling) if self._role.sync.policy.uses_drift else None
        measured = time.perf_counter()
        try:
            self._driver.tell(StepDone(self._arena.step, delta, drift))
            if self._driver.waiting or self._driver.error or self._lifecycle.asked_to_leave:
                self._lifecycle.wait()
            went_on = time.perf_counter()
            self._reporter.step_done(delta)
            self._checkpoints.step_done(self._reporter.kept)
        finally:
            self._arena.go_on()
        if self._backward is not None:
            self._backward.after_step()
            self._lifecycle.count_waited(self._backward)
        figures = self._reporter.figures
        figures.blocked += went_on - measured
        figures.overhead += measured - began + time.perf_counter() - went_on

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """For all but the last backward pass of an iteration, in server mode: gradients accumulate and do not leave.

        In other modes there is nothing to keep back.
        """
        return contextlib.nullcontext() if self._backward is None else self._backward.no_sync()

    def sync(self, tables: Sequence[int] | None = None) -> None:
        """Have the model hold what it is to compute with next, for whoever reads it without a forward pass.

        In server mode parameters are fetched while the loop goes on, and put into the model where its modules use them.

        Args:
            tables: numbers of those that are read, in the order of the model's trained parameters; None: all.
        """
        self._lifecycle.wait_for_tables(tables)

    def update(self, table: int, gradient: torch.Tensor) -> None:
        """In server mode, take the gradient of a table that autograd does not make; see :meth:`sync` for its number.

        Raises:
            ValueError: it has given one in this iteration already.
        """
        assert self._backward is not None
        self._backward.update(table, gradient)

    def set_sync(self, sync: str, shard: int | None = None, *, apply: str = "", pulls: str = "") -> None:
        """Have the parameter server go over to another sync model while the run goes on. Not for the training thread
        alone: from any thread of any peer.

        Args:
            sync: as ``--sync`` has it, ``ssp:staleness=3``.
            shard: of one shard; None: of all.
            apply, pulls: as ``--apply`` and ``--pulls`` have it; empty: the sync model's way, and as before.

        Raises:
            UsageError: it is no sync model, or cannot be had; or a server does not answer.
        """
        problem = self._driver.switch_sync(sync, shard, apply, pulls)
        if problem:
            raise UsageError(problem)

    def set_servers(self, servers: str | Sequence[int | str]) -> None:
        """Have other peers hold the parameter server's shards while the run goes on: what has to move there moves.

        From any thread of any peer. Of several that ask at once all but one are refused.

        Args:
            servers: their ranks or names, in any order; or text as ``--servers`` has it, ``0,1``.

        Raises:
            UsageError: one of them is no peer or not there, or what there is cannot be moved; everything stays as it is
                then.
        """
        given = servers.split(",") if isinstance(servers, str) else servers
        names = self._comm.names
        ranks = [rank_of(one.strip(), "server", names) if isinstance(one, str) else one for one in given]
        problem = self._driver.change_servers(ranks)
        if problem:
            raise UsageError(problem)

    def log(self, tag: str, value: float | torch.Tensor) -> None:
        """Record a figure of one's own under ``tag`` (``train/loss``, ``test/accuracy``) at this iteration.

        Args:
            value: a number, or what float() makes one of, such as a tensor of one element.
        """
        self._reporter.scalar(tag, float(value))

    def state_dict(self) -> dict[str, Any]:
        """Iterations done, and what the next decision needs, as plain data: for a loop that goes back by itself.

        The model and the optimizer have state of their own, which belongs beside it. Checkpoints hold all of this.
        """
        return self._driver.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to an earlier moment; call it after the model's own values are loaded, which come after joining.

        Args:
            state: what :meth:`state_dict` gave, under the same policy.
        """
        self._driver.load_state_dict(state)
        self._arena.go_on()

    def checkpoint_part(
        self, name: str, *, state_dict: Callable[[], object], load_state_dict: Callable[[Any], object]
    ) -> None:
        """Keep something of the script's own in each checkpoint: the order of its data, a learning rate's schedule.

        A run that goes on from a checkpoint calls ``load_state_dict`` here and now, with what was kept. A checkpoint is
        taken within the optimizer's step: what the loop does after that belongs to the next iteration.

        Args:
            name: letters, digits and ``. - _``.
            state_dict: gives tensors, numbers, text, None, and lists, tuples and dicts of them.
            load_state_dict: takes the same.

        Raises:
            UsageError: the name is none or in use, or the state holds something else.
        """
        self._checkpoints.register(name, state_dict, load_state_dict)

    def shard(self, dataset: Dataset[Any]) -> Subset[Any]:
        """This peer's part of a data set, by the run's ``partition``; the parts of all peers are disjoint and cover it.

        Args:
            dataset: with a length; for a Dirichlet partition also with ``targets`` or ``labels``, an integer a sample.

        Raises:
            UsageError: it has no labels, and the partition needs them.
        """
        return Subset(dataset, self._options.part(dataset, self.rank))

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._bypass is not None:
            self._bypass.put_back()
        if not overflowed(optimizer):
            self.step()

    # --- from join to finish ------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, take a model to begin with, and wait for the others; called by :func:`gossipx.join`."""
        self._lifecycle.start(self._command)

    def _command(self, told: Mapping[str, Any]) -> str:
        """A command to the run; why it cannot be carried out, or nothing."""
        if "set-servers" in told:
            try:
                self.set_servers(str(told["set-servers"]))
            except UsageError as error:
                return str(error)
            return ""
        shard = told.get("shard")
        return self._driver.switch_sync(
            str(told["set-sync"]),
            None if shard is None else int(shard),
            str(told.get("apply", "")),
            str(told.get("pulls", "")),
        )

    def finish(self) -> None:
        """Training is over: agree with the others, write down the figures, and leave.

        A peer that others need, a hub or a server, stays until theirs is over, too.
        """
        self._lifecycle.finish()

    def leave_at_exit(self) -> None:
        """A script that ends without a word of this peer has not trained to its end: it leaves then.

        For loops of others, which do not tell of a failure that the script has caught.
        """
        self._lifecycle.finishes_at_exit = False

    def leave(self) -> None:
        """Take no further part, without a finish, and tell the others."""
        self._lifecycle.leave()

    def close(self) -> None:
        """Take no further part, without a finish. Weights stay as they are; any number of times."""
        self._lifecycle.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif isinstance(error, KeyboardInterrupt):
            self.close()
        else:
            self.leave()
            if isinstance(error, SystemExit) and not error.code:
                self._reporter.tell("left")


def overflowed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step was none: GradScaler tells fused optimizers of an overflow, and these skip the update."""
    overflow = getattr(optimizer, "found_inf", None)
    return overflow is not None and bool(float(overflow))
