"""Recorders: where a peer's curves go, such as TensorBoard or Weights & Biases.

A spec names one, or several that are joined by ``+``: ``tensorboard+csv``. Installed packages add names by entry points
of the group ``gossipx.recorders``, each of which loads a :class:`RecorderKind`.
"""

from __future__ import annotations

import abc
import csv
import importlib
import io
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, final

from gossipx.errors import UsageError, how_to_install
from gossipx.metrics import TensorBoardRecorder
from gossipx.metrics.guarded_file import GuardedFile
from gossipx.metrics.recorder import Recorder
from gossipx.specs import plugins

log = logging.getLogger("gossipx")

ENTRY_POINT_GROUP = "gossipx.recorders"
PATIENCE = 30.0
"""Seconds that the end of a run waits for a service that still has to send values or to end its record."""


@dataclass(frozen=True)
class Recorded:
    """The peer whose curves are recorded.

    Attributes:
        run: name of the run.
        peer: name of the peer.
        rank: its rank.
        directory: its directory, ``runs/NAME/peer-00``.
        settings: hyperparameters, by name.
        parts: the kinds of curves that it has; see ``gossipx.metrics.board.PAGE``.
        resumes_at: iteration that a resumed run continues from; None: a new run.
        clock: returns the time of a record, in seconds: virtual ones in a simulated run.
    """

    run: str
    peer: str
    rank: int
    directory: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: Sequence[str] = ()
    resumes_at: int | None = None
    clock: Callable[[], float] = time.time


@dataclass(frozen=True)
class RecorderKind(abc.ABC):
    """A kind of recorder, with its settings."""

    @abc.abstractmethod
    def open(self, of: Recorded) -> Recorder:
        """Begin to record the curves of a peer.

        Raises:
            OSError: nothing can be written in its directory.
            UsageError: the package of this kind is not installed, or its service refuses.
        """


@final
@dataclass(frozen=True)
class TensorBoard(RecorderKind):
    """``tensorboard``: an event file in the peer's directory."""

    def open(self, of: Recorded) -> Recorder:
        return TensorBoardRecorder(of.directory, of.parts, of.resumes_at, of.clock)


@final
@dataclass(frozen=True)
class CSV(RecorderKind):
    """``csv``: the file ``metrics.csv`` in the peer's directory, with the columns of :attr:`COLUMNS`."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("iteration", "seconds", "tag", "value")

    def open(self, of: Recorded) -> Recorder:
        return _CSVRecorder(of.directory / "metrics.csv", of.resumes_at, of.clock)


class _CSVRecorder:
    """Appends rows to a CSV file.

    Args:
        resumes_at: later rows, of work that was lost, are removed; None: a new file.
        clock: returns the time in seconds.
    """

    def __init__(self, path: Path, resumes_at: int | None, clock: Callable[[], float]):
        self._clock = clock
        self._began = clock()
        kept: list[Sequence[object]] = []
        if resumes_at is not None and path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                kept = [row for row in csv.reader(file) if row and row[0].isdecimal() and int(row[0]) <= resumes_at]
            self._began -= max((float(str(row[1])) for row in kept), default=0.0)
        self._file = GuardedFile(path, _rows(CSV.COLUMNS, *kept))
        self.unwritten, self.close = self._file.flush, self._file.close

    def scalar(self, tag: str, value: float, step: int) -> None:
        self._file.add(_rows((step, round(self._clock() - self._began, 3), tag, value)))


def _rows(*rows: Sequence[object]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode("utf-8")


@final
@dataclass(frozen=True)
class WandB(RecorderKind):
    """``wandb``: a run of Weights & Biases per peer, in a group per gossipx run. Needs ``gossipx[wandb]``.

    ``wandb login``, ``WANDB_MODE=offline`` and wandb's other settings apply.

    Attributes:
        project: wandb's project.
        entity: user or team; empty: wandb's default.
    """

    project: str = "gossipx"
    entity: str = ""

    def open(self, of: Recorded) -> Recorder:
        wandb = _imported("wandb", "wandb")
        try:
            run = wandb.init(
                project=self.project,
                entity=self.entity or None,
                group=of.run,
                name=f"{of.run}/{of.peer}",
                config={**of.settings, "rank": of.rank},
                dir=of.directory,
                reinit="create_new",
            )
        except (wandb.errors.Error, OSError) as error:
            raise _refused("wandb", error) from error
        # An x axis of our own: wandb drops what is logged at an earlier step than its last one.
        run.define_metric("iteration", hidden=True)
        run.define_metric("*", step_metric="iteration")
        return Guarded(lambda tag, value, step: run.log({"iteration": step, tag: value}), run.finish, "wandb")


@final
@dataclass(frozen=True)
class MLflow(RecorderKind):
    """``mlflow``: a run of MLflow per peer. Needs ``gossipx[mlflow]``.

    Attributes:
        experiment: MLflow's experiment, which is created if necessary.
        uri: tracking server or store; empty: ``MLFLOW_TRACKING_URI``, or MLflow's default.
    """

    experiment: str = "gossipx"
    uri: str = ""

    def open(self, of: Recorded) -> Recorder:
        mlflow = _imported("mlflow", "mlflow")
        try:
            client = mlflow.MlflowClient(self.uri or None, self.uri or None)
            found = client.get_experiment_by_name(self.experiment)
            number = client.create_experiment(self.experiment) if found is None else found.experiment_id
            run = client.create_run(number, run_name=f"{of.run}/{of.peer}").info.run_id
            for name, value in {"run": of.run, "rank": of.rank, **of.settings}.items():
                client.log_param(run, name, value)
        except (mlflow.exceptions.MlflowException, OSError) as error:
            raise _refused("mlflow", error) from error

        return Guarded(
            lambda tag, value, step: client.log_metric(run, tag, value, step=step, synchronous=False),
            lambda: client.set_terminated(run),
            "mlflow",
        )


class Guarded:
    """A recorder over a foreign service, whose errors do not end the training: they are told once, and counted.

    Args:
        scalar: records one value. If a thread of the service sends it later, this returns an object whose ``wait()``
            waits for that and raises its error.
        close: ends the record.
        name: of the service, for messages.
    """

    def __init__(self, scalar: Callable[[str, float, int], Any], close: Callable[[], object], name: str):
        self._scalar = scalar
        self._close = close
        self._name = name
        self._lost = 0
        self._unconfirmed = 0  # values that a thread of the service still has to send
        self._pending: SimpleQueue[Any] = SimpleQueue()
        self._changed = threading.Condition()  # guards the counters
        self._confirming: threading.Thread | None = None
        self._patience = PATIENCE  # what is left of it: waits for other peers come between those of the end
        self._is_late = False

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Record ``value`` under ``tag`` at iteration ``step``."""
        operation = self._call(lambda: self._scalar(tag, value, step))
        if hasattr(operation, "wait"):
            if self._confirming is None:
                self._confirming = threading.Thread(target=self._confirm, name=f"{self._name} values", daemon=True)
                self._confirming.start()
            with self._changed:
                self._unconfirmed += 1
            self._pending.put(operation)

    def unwritten(self) -> int:
        """Return how many records the service has refused, or has not taken within :data:`PATIENCE`."""
        with self._changed:
            if not self._patiently(lambda left: self._changed.wait_for(lambda: not self._unconfirmed, left)):
                self._late(f"has not taken all curves within {PATIENCE:g} s; missing values: {self._unconfirmed}")
            return self._lost + self._unconfirmed

    def close(self) -> None:
        """End the record. All waits together, with those of :meth:`unwritten`, take :data:`PATIENCE` at most."""
        self.unwritten()
        ending = threading.Thread(target=self._call, args=(self._close,), name=f"{self._name} end", daemon=True)
        ending.start()
        self._patiently(ending.join)
        if ending.is_alive():
            self._late(f"has not ended the record of this peer within {PATIENCE:g} s")

    def _patiently(self, wait: Callable[[float], object]) -> object:
        began = time.monotonic()
        found = wait(self._patience)
        self._patience = max(0.0, self._patience - (time.monotonic() - began))
        return found

    def _late(self, what: str) -> None:
        if not self._is_late:
            self._is_late = True
            log.warning("%s %s", self._name, what)

    def _confirm(self) -> None:
        while True:
            self._call(self._pending.get().wait)
            with self._changed:
                self._unconfirmed -= 1
                self._changed.notify_all()

    def _call(self, work: Callable[[], object]) -> object:
        try:
            return work()
        except Exception as error:  # whatever it is, curves are worth less than training
            with self._changed:
                self._lost += 1
                is_first = self._lost == 1
            if is_first:
                log.warning("%s refuses curves (%s); training continues", self._name, error)
            return None


class Several:
    """Records everything with each of several recorders."""

    def __init__(self, recorders: Sequence[Recorder]):
        self._recorders = recorders

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Record ``value`` under ``tag`` at iteration ``step``."""
        for each in self._recorders:
            each.scalar(tag, value, step)

    def unwritten(self) -> int:
        """Flush. Return how many records could not be written."""
        return sum(each.unwritten() for each in self._recorders)

    def close(self) -> None:
        """Flush and close."""
        for each in self._recorders:
            each.close()


NOWHERE: Recorder = Several(())
"""The recorder of a run without one."""
BUILT_IN: dict[str, type[RecorderKind]] = {"tensorboard": TensorBoard, "csv": CSV, "wandb": WandB, "mlflow": MLflow}


def recorders_from(spec: str) -> list[RecorderKind]:
    """Return the recorders of a spec: ``tensorboard``, ``csv+wandb:project=mine``; none for ``none``.

    Raises:
        UsageError: the spec is wrong, or the plugin of a name is not a kind of recorder.
    """
    if spec.strip() == "none":
        return []
    kinds = [plugins.build(part, BUILT_IN, ENTRY_POINT_GROUP, "recorder") for part in spec.split("+")]
    for part, kind in zip(spec.split("+"), kinds, strict=True):
        if not isinstance(kind, RecorderKind):
            raise UsageError(f"recorder '{part}': its entry point returns a {type(kind).__name__}, not a RecorderKind")
    return kinds


def recorder_names() -> dict[str, Callable[..., Any]]:
    """Return all recorders by name: the built-in ones and those of installed packages, which are not imported yet."""
    return plugins.names(BUILT_IN, ENTRY_POINT_GROUP)


def open_all(spec: str, own: Recorder | None, of: Recorded) -> Recorder:
    """Begin to record the curves of a peer.

    Args:
        spec: the run's recorders.
        own: a recorder that a script passes, in place of these.

    Raises:
        OSError: nothing can be written in the peer's directory.
        UsageError: a recorder cannot begin, or the script's is a class or lacks a method.
    """
    if own is not None:
        if isinstance(own, type):
            raise UsageError(f"recorder= is the class {own.__name__}: give an object of it, such as {own.__name__}()")
        missing = [name for name in ("scalar", "unwritten", "close") if not callable(getattr(own, name, None))]
        if missing:
            raise UsageError(f"recorder= of type {type(own).__name__} has no method '{missing[0]}'")
        return own
    opened = [kind.open(of) for kind in recorders_from(spec)]
    return opened[0] if len(opened) == 1 else Several(opened) if opened else NOWHERE


def _refused(name: str, error: Exception) -> UsageError:
    lines = str(error).splitlines()
    return UsageError(f"--recorder {name}: {lines[0] if lines else type(error).__name__}")


def _imported(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"--recorder {module} needs {module}: {how_to_install(extra)}") from error
