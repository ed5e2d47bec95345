"""The peer object that a training script uses: the public face of one process of a run."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import Dataset

from gossipx.comm import CommManager
from gossipx.errors import UsageError
from gossipx.model.arena import ParameterArena
from gossipx.protocol.events import StepDone
from gossipx.runtime import model_files
from gossipx.runtime.checkpoints import Checkpoints
from gossipx.runtime.driver import Driver
from gossipx.runtime.ending import exit_hooks
from gossipx.runtime.ending.lifecycle import Lifecycle
from gossipx.runtime.figures.reporting import Reporter
from gossipx.runtime.figures.scores import as_float
from gossipx.runtime.optimizers import OneOrMore, Optimizers, untraced
from gossipx.runtime.place import Place
from gossipx.runtime.training.backward import Backward
from gossipx.runtime.training.data import shard_of
from gossipx.runtime.training.hooks import Hooks
from gossipx.runtime.training.schedule_free import ScheduleFree
from gossipx.settings.sections import RunConfig
from gossipx.specs import rank_of
from gossipx.tasks import partition


class Peer:
    """One process with one model replica, created by :func:`gossipx.join`.

    Use it as a context manager: leaving the block ends the training, by default with a last wave after which all peers
    hold the average of their models. Without a context manager this happens when the script exits.

    Attributes:
        rank: from 0 to ``size`` − 1.
        iteration: iterations done; a peer that joins a running run starts at the iteration of the others.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Optimizers,
        driver: Driver,
        comm: CommManager,
        reporter: Reporter,
        checkpoints: Checkpoints,
        config: RunConfig,
        place: Place,
        backward: Callable[[Callable[[], None]], Backward] | None = None,
        schedule_free: ScheduleFree | None = None,
    ):
        self.rank = driver.role.rank
        self._driver = driver
        self._role = driver.role
        self._arena = driver.arena
        self._comm = comm
        self._reporter = reporter
        self._checkpoints = checkpoints
        self._config = config
        self._place = place
        self._optimizers = optimizers
        self._backward = None if backward is None else backward(lambda: self._lifecycle.poll_while_waiting())
        self._hooks = Hooks(module, optimizers, self.step, self._backward, schedule_free)
        self._lifecycle = Lifecycle(module, driver, comm, reporter, checkpoints, config, place, self._hooks)
        self.step = untraced(self.step)  # type: ignore[method-assign]  # a loop that calls it may be compiled
        self._hooks.closes.callback(lambda: vars(self).pop("step"))  # break the reference cycle

    # --- the training loop --------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of peers in the run; it grows when a peer joins the run while it is in progress."""
        return self._role.members.size

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self._arena.step

    @property
    def seconds(self) -> float:
        """Seconds of training so far, with those before the checkpoint from which a run resumed."""
        return self._reporter.figures.elapsed

    @property
    def directory(self) -> Path:
        """This peer's own directory for files that the script writes, ``runs/NAME/peer-00``."""
        assert self._place.directory is not None  # without one, only parts of a peer are tested
        return model_files.directory_of(self._place.directory, self.rank)

    @property
    def mixes(self) -> int:
        """How often a model of another peer was mixed into this one; constant between two calls of :meth:`step`.

        It does not count the tables that a parameter server sends.
        """
        return self._arena.mixes

    @property
    def arena(self) -> ParameterArena:
        """The contiguous vectors that hold the model's parameters. Read-only: write to the module instead."""
        return self._arena

    @property
    def trains(self) -> bool:
        """Whether this peer trains; if not, it is a hub or server only, and serves the others in :meth:`finish`."""
        return self._role.trains

    def step(self) -> None:
        """Count one iteration and let the policy decide whether to exchange models.

        The optimizer given to :func:`gossipx.join` calls this after each of its steps. Of several optimizers, the step
        after which all of them have stepped does so.

        Raises:
            GossipxError: training cannot continue, for example because too few peers are left or the models differ.
        """
        if not self._lifecycle.open:
            self._lifecycle.end_again()
            return
        began = time.perf_counter()
        exit_hooks.training_continues()
        self._arena.places.check()
        self._lifecycle.steps += 1
        delta = self._arena.step_done()
        self._hooks.watch.iteration_done(self._arena.step)
        drift = self._driver.captures.drift(self._role.pulling) if self._role.sync.policy.uses_drift else None
        measured = time.perf_counter()
        try:
            self._driver.handle(StepDone(self._arena.step, delta, drift))
            if self._driver.waiting or self._driver.error or self._lifecycle.asked_to_leave:
                self._lifecycle.wait()
            resumed = time.perf_counter()
            self._reporter.step_done(delta)
            self._checkpoints.step_done(self._reporter.state_dict)
        finally:
            self._arena.leave_boundary()
        if self._backward is not None:
            self._backward.after_step()
            self._lifecycle.add_wait_time()
        figures = self._reporter.figures
        figures.blocked += resumed - measured
        figures.overhead += measured - began + time.perf_counter() - resumed

    def join_optimizer(self, optimizer: OneOrMore) -> None:
        """Take the steps of another optimizer, or of several, for iterations from now on, instead of the joined ones'.

        For training that changes its optimizer in mid-run. Checkpoints then hold the state of this one. A script that
        resumes after the change calls this before its first step, and the optimizer gets its state back.

        Args:
            optimizer: trains parameters of the joined model; or several such optimizers.

        Raises:
            UsageError: it does not, or the run has a parameter server, whose servers make the updates.
        """
        if self._backward is not None:
            raise UsageError("servers make the updates, by the optimizer given to gossipx.join: keep that one")
        self._optimizers.replace(optimizer)
        self._hooks.watch.optimizers_replaced()
        self._checkpoints.optimizers_replaced()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate gradients and do not send them.

        In server mode, use it for all but the last backward pass of an iteration. In other modes it does nothing.
        """
        return contextlib.nullcontext() if self._backward is None else self._backward.no_sync()

    def sync(self, tables: Sequence[int] | None = None) -> None:
        """In server mode, wait until parameters have their current values; in other modes do nothing.

        Parameters are fetched in the background and written into the model when a module's forward pass needs them.
        Call this before reading parameters in any other way.

        Args:
            tables: indices of the parameters to read, in the order of the model's trained parameters; None: all.
        """
        self._lifecycle.wait_for_tables(tables)

    def update(self, table: int, gradient: torch.Tensor) -> None:
        """In server mode, push a gradient that autograd does not compute.

        Args:
            table: index of the parameter, as for :meth:`sync`.
            gradient: copied before this returns.

        Raises:
            ValueError: the table has a gradient in this iteration already.
        """
        assert self._backward is not None
        self._backward.update(table, gradient)

    def set_sync(self, sync: str, shard: int | None = None, *, apply: str = "", pulls: str = "") -> None:
        """Switch the parameter server to another sync model during the run.

        May be called from any thread, on any peer.

        Args:
            sync: as for ``--sync``, such as ``ssp:staleness=3``.
            shard: index of one shard; None: all shards.
            apply, pulls: as for ``--apply`` and ``--pulls``; empty: the sync model's default, and unchanged.

        Raises:
            UsageError: the sync model does not exist or cannot be used here, or a server does not answer.
        """
        problem = self._driver.commands.switch_sync(sync, shard, apply, pulls)
        if problem:
            raise UsageError(problem)

    def set_servers(self, servers: str | Sequence[int | str]) -> None:
        """Move the parameter server's shards to other peers during the run.

        May be called from any thread, on any peer. If several calls overlap, all but one are refused.

        Args:
            servers: ranks or names of the new servers, in any order; or text as for ``--servers``, such as ``0,1``.

        Raises:
            UsageError: one of them is not a peer or not present, or the shards cannot be moved. The servers are
                unchanged then.
        """
        given = servers.split(",") if isinstance(servers, str) else servers
        names = self._comm.names
        ranks = [rank_of(server.strip(), "server", names) if isinstance(server, str) else server for server in given]
        problem = self._driver.commands.change_servers(ranks)
        if problem:
            raise UsageError(problem)

    def log(self, tag: str, value: float | torch.Tensor) -> None:
        """Record a figure at the current iteration.

        Args:
            tag: such as ``train/loss`` or ``test/accuracy``.
            value: a number, or anything that ``float()`` accepts, such as a tensor of one element.
        """
        self._reporter.scalar(tag, as_float(value))

    def state_dict(self) -> dict[str, Any]:
        """Return the iteration count and the state of the policy, as plain data.

        For loops that save and restore their own state. Save the model and the optimizer beside it. gossipx's
        checkpoints contain all of this already.
        """
        return {"rank": self.rank, "peers": self.size, **self._driver.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Call it after joining and after loading the model's values.

        An outer optimizer and a codec start anew, since what they keep belongs to the earlier values. The centre of a
        hub stays as it is.

        Args:
            state: what :meth:`state_dict` returned, under the same policy.

        Raises:
            UsageError: it is the state of another peer, or of a run with another number of peers.
        """
        check_own(state, self.rank, self.size)
        self._driver.load_state_dict(state)
        self._arena.leave_boundary()

    def checkpoint_part(
        self, name: str, *, state_dict: Callable[[], object], load_state_dict: Callable[[Any], object]
    ) -> None:
        """Add state of the script to each checkpoint, such as a data order or a learning rate schedule.

        In a run that resumes from a checkpoint this calls ``load_state_dict`` at once, with the saved state. A
        checkpoint is taken within the optimizer's step: whatever the loop does after it belongs to the next iteration.

        Args:
            name: letters, digits and ``. - _``.
            state_dict: returns tensors, numbers, text, None, and lists, tuples and dicts of them.
            load_state_dict: accepts what ``state_dict`` returned.

        Raises:
            UsageError: the name is invalid or in use, or the state contains other types.
        """
        self._checkpoints.register(name, state_dict, load_state_dict)

    def shard(self, dataset: Dataset[Any]) -> Dataset[Any]:
        """Return this peer's part of a data set; the parts of all peers are disjoint and cover it.

        The run's ``partition`` setting says how a data set with a length is divided. Of a stream, a torch
        ``IterableDataset``, a peer gets every ``size``-th item from item ``rank`` on, as a stream.

        Args:
            dataset: for a Dirichlet partition it has ``targets`` or ``labels``, one integer per sample. A stream yields
                the same items in the same order in all peers.

        Raises:
            UsageError: the partition needs labels, and the data set has none.
        """
        rule, peers = partition.partition_from(self._config.task.partition), len(self._place.names)
        split = functools.partial(rule.split, parts=peers, seed=self._config.run.seed)
        return shard_of(dataset, split, rule.by_label, self.rank, lambda: self.size)

    # --- from join to finish ------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, get the initial model, and wait for the other peers; called by :func:`gossipx.join`."""
        self._lifecycle.start(self._command)

    def _command(self, command: Mapping[str, Any]) -> str:
        """Carry out a command to the run. Return why that failed; empty on success."""
        if "set-servers" in command:
            try:
                self.set_servers(str(command["set-servers"]))
            except UsageError as error:
                return str(error)
            return ""
        shard = command.get("shard")
        return self._driver.commands.switch_sync(
            str(command["set-sync"]),
            None if shard is None else int(shard),
            str(command.get("apply", "")),
            str(command.get("pulls", "")),
        )

    def finish(self) -> None:
        """End the training: take part in the finish, write the model and the figures, and leave.

        A hub or a server stays until the training of the other peers has ended, too.
        """
        self._lifecycle.finish()

    def leave_at_exit(self) -> None:
        """Leave without a finish if the script ends without closing this peer.

        For frameworks that do not report a failed training which the script has caught.
        """
        self._lifecycle.finishes_at_exit = False

    def saved_by(self, framework: str, defers: bool) -> None:
        """Leave it to a framework to save the state, and write no checkpoint when a signal has asked to stop.

        Args:
            framework: its name.
            defers: whether it then calls :meth:`leave_saved` before the next step. Otherwise this peer leaves by
                itself, within the step.
        """
        self._lifecycle.saved_by(framework, defers)

    @property
    def asked(self) -> bool:
        """Whether a signal has asked this peer to stop."""
        return self._lifecycle.leaves_in_order

    def leave_saved(self, kept: str) -> NoReturn:
        """Leave as a signal has asked, after the framework has saved its state, and end the script.

        Args:
            kept: its checkpoint.

        Raises:
            KeyboardInterrupt, SystemExit: always, as the signal asks.
        """
        self._lifecycle.leave_on_request(kept)

    def before_leaving(self, prepare: Callable[[], None]) -> None:
        """Call ``prepare`` when a signal has asked this peer to leave, before its last checkpoint is taken."""
        self._hooks.before_leaving.append(prepare)

    def leave(self) -> None:
        """Leave the run without a finish, and notify the other peers.

        If a signal has asked this peer to stop, it leaves with a checkpoint and its model.

        Raises:
            GossipxError: they cannot be written.
        """
        self._lifecycle.leave()

    def close(self) -> None:
        """Leave the run without a finish or a notice. The weights stay as they are. Idempotent."""
        self._lifecycle.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
            return
        try:
            self._lifecycle.end_failed(error)
        except (KeyboardInterrupt, SystemExit) as end:
            raise end from None  # the script's error was told


def check_own(state: Mapping[str, Any], rank: int, size: int) -> None:
    """Check that a state is that of the peer with this rank in a run of this size.

    Raises:
        UsageError: it is not.
    """
    if "rank" not in state or "peers" not in state:
        raise UsageError("this is not the state of a peer: load what its state_dict() returned")
    if state["rank"] != rank:
        raise UsageError(
            f"this is the state of peer {state['rank']}, not of peer {rank}: each peer resumes from its own"
        )
    if state["peers"] != size:
        raise UsageError(f"this is the state of a peer in a run with {state['peers']} peers, not {size}")
