"""A peer's way from joining to the end of its run."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import nn

from gossipx.comm import CommManager
from gossipx.errors import GossipxError, UsageError
from gossipx.protocol.events import FiguresReady, JoinRun, LeaveRun, TrainingEnded
from gossipx.protocol.messages import Stage
from gossipx.runtime import exit_hooks, models
from gossipx.runtime.backward import Backward
from gossipx.runtime.checkpoints import Checkpoints
from gossipx.runtime.control import Control
from gossipx.runtime.driver import Driver
from gossipx.runtime.options import PeerOptions
from gossipx.runtime.reporting import Reporter

log = logging.getLogger("gossipx")


class Lifecycle:
    """How a peer joins, waits for the others, and ends; what it trains with in between is the caller's.

    Args:
        backward: in server mode makes the module's hooks; given what is called now and then while these wait.

    Attributes:
        open: until it is closed.
        finishes_at_exit: whether a script that ends without a word of the peer has trained to its end.
        steps: iterations done in this process.
        backward: the module's hooks, in server mode.
        unhook: called as it is closed; what takes the caller's own hooks away.
    """

    def __init__(
        self,
        module: nn.Module,
        driver: Driver,
        comm: CommManager,
        reporter: Reporter,
        checkpoints: Checkpoints,
        options: PeerOptions,
        backward: Callable[[Callable[[], None]], Backward] | None,
    ):
        self.open = True
        self.finishes_at_exit = True
        self.steps = 0
        self.unhook: list[Callable[[], None]] = []
        self._module = module
        self._driver = driver
        self._role = driver.role
        self._arena = driver.arena
        self._comm = comm
        self._reporter = reporter
        self._checkpoints = checkpoints
        self._options = options
        self._term = threading.Event()
        self._control: Control | None = None
        self.backward = None if backward is None else backward(self._look_while_waiting)

    # --- joining ------------------------------------------------------------------------------------

    def start(self, command: Callable[[Mapping[str, Any]], str]) -> None:
        """Listen, take a model to begin with, and wait for the others.

        Args:
            command: carries out a command to the run; returns why that cannot be, or nothing.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if kept := self._checkpoints.restore():
                self._reporter.figures.go_on(kept)
            exit_hooks.register(self, self._options.under_run)
            if threading.current_thread() is threading.main_thread() and self._options.under_run:
                exit_hooks.on_sigterm(self._terminated)
            self._reporter.progress.watch_parent()
            self._comm.start()
            self._reporter.tell("joining")
            self._driver.tell(JoinRun(self._checkpoints.resumed))
            self.wait()
            if self._driver.stranger is not None:  # nobody else has come: do not train alone by mistake
                raise self._driver.stranger
            undo.pop_all()
        if self._role.sync.policy.uses_drift and not self._checkpoints.resumed:
            self._driver.captures.reference.set()
        if self.backward is not None and self._role.trains:
            self.backward.start()
        self._checkpoints.start()
        if self.backward is not None and self._options.directory is not None:
            self._control = Control(self._options.directory, command)
        self._reporter.training_begins()
        self._reporter.tell("train")
        self._arena.go_on()

    # --- ending -------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Training is over: agree with the others, write down the figures, and leave."""
        if not self.open:
            return
        if not self.steps and self._role.trains:
            log.warning("no iteration was counted: give gossipx.join the optimizer, or call peer.step() in the loop")
        reporter = self._reporter
        reporter.training_ended()
        agrees = self._takes_part()
        self._arena.set_boundary(self._arena.step)  # with what the loop did since its last step (averaged weights, say)
        reporter.tell("finish" if self._role.trains else "serve")
        if agrees:
            self._checkpoints.training_ended(reporter.kept)
        before = reporter.accuracy() if self._role.trains else None
        self._driver.tell(TrainingEnded(agrees))
        self.wait()
        self.wait_for_tables()
        if not self._role.trains:  # that was what it is here for
            reporter.training_ended()
        reporter.finished()
        agreed = self._role.stage is Stage.AGREE  # this model has been averaged
        after = reporter.accuracy() if agreed else before
        if after is not None:
            reporter.scalar("test/accuracy", after)
        unsaved = self._save() or self._checkpoints.flush()
        self._driver.tell(FiguresReady(reporter.report(before, after)))
        self.wait()
        reporter.tell_result(agreed)
        self.close()
        if unsaved is not None:
            raise unsaved

    def _takes_part(self) -> bool:
        """Whether the arena still holds the model. If not, the training is done all the same, and worth keeping."""
        try:
            self._arena.check(self._module)
        except UsageError as error:
            log.warning("%s; this peer takes no part in the finish", error)
            return False
        return True

    def _save(self) -> GossipxError | None:
        """Write the model; an error to end with, if that cannot be done: the figures are worth telling first."""
        if self._options.directory is None or not self._options.save_model:
            return None
        return models.save(self._module, self._arena.step, models.file_of(self._options.directory, self._role.rank))

    def leave(self) -> None:
        """Take no further part, without a finish, and tell the others."""
        if self.open:
            self._arena.give_up()
            self._tell_leaving()
        self.close()

    def close(self) -> None:
        """Take no further part, without a finish. Weights stay as they are; any number of times."""
        if not self.open:
            return
        self.open = False
        if self._control is not None:
            self._control.close()
            self._control = None  # its command holds the peer
        self._arena.give_up()
        exit_hooks.unregister(self)
        for unhook in self.unhook:
            unhook()
        if self.backward is not None:
            self.backward.close()
        self._driver.close()
        self._comm.close()
        self._driver.comm = None  # it tells the driver of requests: both would stay until a gc run
        self._reporter.close()
        self._checkpoints.close()
        self._arena.detach()

    # --- waiting, and leaving early -----------------------------------------------------------------

    @property
    def asked_to_leave(self) -> bool:
        """SIGTERM has asked for it: :meth:`wait` leaves."""
        return self._term.is_set()

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self._term.set()

    def wait(self) -> None:
        """Wait until the role says go on; or leave, if SIGTERM asks for it: keep the state, tell the others, and go."""
        self._driver.wait(self._look)
        if not self._term.is_set():
            return
        if self.steps:
            self._checkpoints.leaving(self._reporter.kept)
        self._tell_leaving()
        with self._driver.committing:
            unsaved = self._save() or self._checkpoints.flush()
        self._reporter.tell("left")
        self.close()
        if unsaved is not None:
            raise unsaved
        raise SystemExit(0)

    def wait_for_tables(self, tables: Sequence[int] | None = None) -> None:
        """In server mode, have the model hold what it is to compute with next.

        Args:
            tables: numbers of those that are read; None: all.
        """
        if self.backward is not None:
            self.backward.wait(tables)
            self.count_waited(self.backward)

    def count_waited(self, backward: Backward) -> None:
        """What the training thread has stood still for tables since the last time is of the figures."""
        figures = self._reporter.figures
        figures.blocked += backward.waited
        figures.waited += backward.waited
        backward.waited = 0.0

    def _look_while_waiting(self) -> None:
        """Now and then while tables are waited for: leave, or fail, if it has come to that."""
        if self._driver.error is not None:
            raise self._driver.error
        self._arena.stand_still()
        if self._look():
            self.wait()

    def _look(self) -> bool:
        """Now and then while waiting: whether to leave."""
        reporter = self._reporter
        if reporter.progress.due:
            reporter.tell(reporter.state)
        if reporter.state == "serve":  # no step of its own would be one to take a checkpoint at, or record something
            self._checkpoints.step_done(reporter.kept)
            reporter.record_counted(self._options.log_interval)
        return self._term.is_set()

    def _tell_leaving(self) -> None:
        if self._driver.error is None:
            self._driver.tell(LeaveRun())
            self._driver.wait()
