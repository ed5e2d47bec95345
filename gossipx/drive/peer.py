"""The peer as a training script holds it."""

from __future__ import annotations

import atexit
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import Dataset, Subset

from gossipx.actor import FiguresReady, JoinRun, LeaveRun, StepDone, TrainingEnded
from gossipx.arena import plain_name
from gossipx.comm import CommManager
from gossipx.drive.driver import Driver, Retrieval
from gossipx.drive.progress import Progress
from gossipx.messages import Stage
from gossipx.record import Recorder
from gossipx.sync import consensus_distance

log = logging.getLogger("gossipx")

MODEL_FILE = "model.safetensors"


@dataclass(frozen=True)
class PeerOptions:
    """What surrounds a peer's training.

    Attributes:
        name: this peer's.
        directory: the run's; None: nothing is written.
        iterations: the run's length, for progress; 0: not known.
        log_interval: iterations between two records of the figures of every step.
        distance_interval: iterations between two estimates of the consensus distance (Eq. 8).
        split: indices of a data set's samples for each rank, from its labels or its length.
        save_model: whether the final model is written.
        under_run: whether ``gossipx run`` started this process: SIGTERM then means leave.
    """

    name: str
    directory: Path | None
    iterations: int
    log_interval: int
    distance_interval: int
    split: Callable[[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]
    save_model: bool = True
    under_run: bool = False


class Peer:
    """One process with one model replica; made by :func:`gossipx.join`.

    Use it as a context manager: leaving the block ends the training, by default with an agreement after which all peers
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
        recorder: Recorder,
        progress: Progress,
        options: PeerOptions,
        evaluate: Callable[[nn.Module], float] | None = None,
    ):
        self.rank = driver.role.rank
        self.size = driver.role.size
        self._module = module
        self._evaluate = evaluate
        self._driver = driver
        driver.on_retrieval = self._retrieved
        self._role = driver.role
        self._arena = driver.arena
        self._comm = comm
        self._recorder = recorder
        self._progress = progress
        self._options = options
        self._figures = _Figures()
        self._last: dict[str, float] = {}
        self._term = threading.Event()
        self._open = True
        self._agreed = False  # whether this model has been averaged in the finish
        self._hook = None
        if optimizer is not None:
            self._hook = optimizer.register_step_post_hook(self._optimizer_stepped)

    # --- the training loop --------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self._arena.step

    def step(self) -> None:
        """One iteration is done: measure it, and let the policy decide. A joined optimizer calls this itself.

        Raises:
            GossipxError: training cannot go on (too few peers left, models that differ).
        """
        if not self._open:
            return
        began = time.perf_counter()
        delta = self._arena.step_done()
        drift = self._driver.drift() if self._role.sync.policy.uses_drift else None
        measured = time.perf_counter()
        self._driver.tell(StepDone(self._arena.step, delta, drift))
        if self._driver.waiting or self._driver.error or self._term.is_set():
            self._wait()
        self._figures.overhead += measured - began
        self._figures.blocked += time.perf_counter() - measured
        self._record(delta)

    def log(self, tag: str, value: float) -> None:
        """Record a figure of one's own under ``tag`` (``train/loss``, ``test/accuracy``) at this iteration."""
        self._last[tag] = value
        self._recorder.scalar(tag, value, self._arena.step)

    def state_dict(self) -> dict[str, Any]:
        """This peer's part of a checkpoint, plain data: iterations done, and what the policy's next decision needs.

        The model and the optimizer have state of their own, which belongs beside it.
        """
        return self._driver.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; call it after the model's own values are loaded, which come after joining.

        Args:
            state: what :meth:`state_dict` gave, under the same policy.
        """
        self._driver.load_state_dict(state)

    def shard(self, dataset: Dataset[Any]) -> Subset[Any]:
        """This peer's part of a data set, by the run's ``partition``; the parts of all peers are disjoint and cover it.

        Args:
            dataset: with a length; for a Dirichlet partition also with ``targets`` or ``labels``, an integer a sample.
        """
        labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
        length = len(dataset)  # type: ignore[arg-type]
        given = np.zeros(length, dtype=np.int64) if labels is None else np.asarray(labels)
        return Subset(dataset, self._options.split(given)[self.rank].tolist())

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Fused optimizers are told of an overflow by GradScaler and skip the update themselves.
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is None or not float(overflow):
            self.step()

    # --- from join to finish ------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, take a model to begin with, and wait for the others; called by :func:`gossipx.join`."""
        if self._options.under_run and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._asked_to_leave)
        try:
            self._comm.start()
            self._tell_progress("joining")
            self._driver.tell(JoinRun())
            self._wait()
        except BaseException:
            self.close()
            raise
        if self._role.sync.policy.uses_drift:
            self._driver.set_reference()
        self._figures.start(self._comm.bytes_received)
        self._tell_progress("train")
        atexit.register(self._at_exit)

    def finish(self) -> None:
        """Training is over: agree with the others, write down the figures, and leave."""
        if not self._open:
            return
        figures = self._figures
        figures.end(self._comm.bytes_received)
        self._tell_progress("finish")
        before = self._measure_accuracy()
        self._driver.tell(TrainingEnded())
        self._wait()
        figures.finish_bytes = self._comm.bytes_received - figures.bytes_at_end
        self._agreed = self._role.stage is Stage.AGREE
        after = self._measure_accuracy() if self._agreed else before
        if after is not None:
            self.log("test/accuracy", after)
        self._save()
        self._driver.tell(FiguresReady(self._report(before, after)))
        self._wait()
        self._tell_result()
        self.close()

    def close(self) -> None:
        """Take no further part, without a finish. Weights stay as they are; any number of times."""
        if not self._open:
            return
        self._open = False
        atexit.unregister(self._at_exit)
        if self._hook is not None:
            self._hook.remove()
        self._driver.close()
        self._comm.close()
        self._recorder.close()
        self._arena.detach()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif self._open:
            if not isinstance(error, KeyboardInterrupt):
                self._tell_leaving()
            self.close()

    def _at_exit(self) -> None:
        """The script ended without saying so: finish, unless it failed."""
        failed = getattr(sys, "last_value", None) is not None
        self.close() if failed else self.finish()

    # --- leaving early ------------------------------------------------------------------------------

    def _asked_to_leave(self, number: int, frame: FrameType | None) -> None:
        self._term.set()

    def _wait(self) -> None:
        """Wait until the role says go on; or leave, if SIGTERM asks for it: keep the model, tell the others, and go."""
        self._driver.wait(self._term.is_set)
        if not self._term.is_set():
            return
        self._save()
        self._tell_leaving()
        self._tell_progress("left")
        self.close()
        raise SystemExit(0)

    def _tell_leaving(self) -> None:
        if self._driver.error is None:
            self._driver.tell(LeaveRun())
            self._driver.wait()

    # --- figures ------------------------------------------------------------------------------------

    def _retrieved(self, retrieval: Retrieval) -> None:
        self._figures.squared_distances.append(retrieval.distance**2)
        step = self._arena.step
        self._recorder.scalar("comm/pull_seconds", retrieval.seconds, step)
        self._recorder.scalar("comm/staleness", retrieval.staleness, step)

    def _record(self, delta: float) -> None:
        step, options, figures = self._arena.step, self._options, self._figures
        if step % options.log_interval == 0:
            scalar = self._recorder.scalar
            scalar("sync/delta", delta, step)
            scalar("sync/delta_difference", self._role.sync.difference, step)
            scalar("sync/retrievals", self._role.sync.retrievals, step)
            scalar("comm/bytes_received", figures.received(self._comm.bytes_received), step)
            scalar("time/blocked_fraction", figures.blocked_fraction(), step)
        if step % options.distance_interval == 0 and figures.squared_distances:
            figures.distance = consensus_distance(figures.squared_distances, self.size)
            figures.squared_distances.clear()
            self._recorder.scalar("sync/consensus_distance", figures.distance, step)
        if self._progress.due:
            self._tell_progress("train")

    def _measure_accuracy(self) -> float | None:
        return None if self._evaluate is None else self._evaluate(self._module)

    def _report(self, before: float | None, after: float | None) -> dict[str, Any]:
        figures, sync = self._figures, self._role.sync
        return {
            "name": self._options.name,
            "iterations": self._arena.step,
            "retrievals": sync.retrievals,
            "bytes_received": figures.received(figures.bytes_at_end),
            "bytes_sent": self._comm.bytes_sent,
            "finish_bytes": figures.finish_bytes,
            "test_accuracy": after,
            "test_accuracy_before_finish": before,
            "blocked_seconds": figures.blocked,
            "overhead_seconds": figures.overhead,
            "train_seconds": figures.seconds,
            "skipped": sync.skipped,
            "failed": sync.failed,
            "poisoned": self._role.counts.poisoned,
            "finish_rounds_lost": self._role.rounds_lost,
            "consensus_distance": figures.distance,
        }

    def _tell_progress(self, state: str) -> None:
        self._progress.tell(
            state=state,
            step=self._arena.step,
            iterations=self._options.iterations,
            loss=self._last.get("train/loss"),
            accuracy=self._last.get("test/accuracy"),
            retrievals=self._role.sync.retrievals,
            bytes=self._comm.bytes_received,
        )

    def _tell_result(self) -> None:
        missing = self._role.missing()
        reports = {rank: other.report for rank, other in self._role.members.others.items() if rank not in missing}
        self._progress.tell(
            result={
                "report": self._role.report,
                "reports": reports,
                "missing": missing,
                "consensus_accuracy": self._averaged_accuracy(missing),
                "consensus_distance": self._figures.distance,
            }
        )

    def _save(self) -> None:
        if self._options.directory is None or not self._options.save_model:
            return
        # The format takes tensors that share no memory, in the usual order of dimensions.
        contiguous = torch.contiguous_format
        state = {name: tensor.cpu().clone(memory_format=contiguous) for name, tensor in self._tensors().items()}
        target = self._model_file(self.rank)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".tmp")
        save_file(state, unfinished)
        unfinished.replace(target)

    def _model_file(self, rank: int) -> Path:
        assert self._options.directory is not None
        return self._options.directory / f"peer-{rank:02d}" / MODEL_FILE

    def _averaged_accuracy(self, missing: Sequence[int]) -> float | None:
        """The accuracy of the average of all final models, measured by the lowest rank, where it can read them all."""
        present = [rank for rank in range(self.size) if rank not in missing]
        if self._evaluate is None or self._options.directory is None:
            return None
        # Elsewhere one's own is the average, after an agreement; without one, nobody there has it.
        elsewhere = self._last.get("test/accuracy") if self._agreed else None
        if self.rank != present[0]:
            return elsewhere
        files = [self._model_file(rank) for rank in present]
        if not all(file.is_file() for file in files):
            return elsewhere
        weights = {plain_name(name) for name, _ in self._module.named_parameters()}
        mean: dict[str, torch.Tensor] = {}
        sound = 0
        for model in map(load_file, files):
            if not all(bool(model[name].isfinite().all()) for name in weights):
                continue  # a peer that diverged; the others have agreed without it
            sound += 1
            for name, tensor in model.items():
                mean[name] = mean[name] + tensor if sound > 1 else tensor
        if not sound:
            return None
        tensors = self._tensors()
        own = {name: tensor.clone() for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            tensor.copy_(mean[name] / sound)
        accuracy = self._measure_accuracy()
        for name, tensor in tensors.items():
            tensor.copy_(own[name])
        return accuracy

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The module's tensors, by names that are the same for plain and for compiled peers."""
        state = self._module.state_dict().items()
        return {plain_name(name): tensor for name, tensor in state if isinstance(tensor, torch.Tensor)}


class _Figures:
    """What a peer measures of itself; seconds and bytes."""

    def __init__(self) -> None:
        self.blocked = 0.0
        self.overhead = 0.0
        self.distance: float | None = None
        self.squared_distances: list[float] = []
        self.bytes_at_end = 0
        self.finish_bytes = 0
        self.seconds = 0.0
        self._bytes_at_start = 0
        self._began = time.perf_counter()

    def start(self, received: int) -> None:
        """Training begins; what came before does not count."""
        self._bytes_at_start = received
        self._began = time.perf_counter()

    def end(self, received: int) -> None:
        """Training has ended."""
        self.bytes_at_end = received
        self.seconds = time.perf_counter() - self._began

    def received(self, received: int) -> int:
        """Bytes received while training."""
        return received - self._bytes_at_start

    def blocked_fraction(self) -> float:
        """Share of the training's wall time so far that gossipx stopped the training thread."""
        return self.blocked / (time.perf_counter() - self._began)
