"""The built-in task trained with a Caffe solver file: ``gossipx run --solver``."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossipx.errors import UsageError
from gossipx.launch.loops.attach import AttachedPeer, attach
from gossipx.runtime.figures.scores import Evaluate
from gossipx.runtime.models import directory_of
from gossipx.settings.sections import RunConfig
from gossipx.solver import prototxt
from gossipx.solver.solver import Solver
from gossipx.tasks import solvers
from gossipx.tasks.data import Batches, Samples
from gossipx.tasks.partition import partition_from

TEST_BATCH = 100
"""Images per test iteration, as in Caffe's examples for small images: a test_iter of 100 covers 10,000."""
LOG_FILE = "caffe.log"
"""Name of the log in the peer's directory, next to its snapshots."""


class _LazyBatches:
    """An iterable of batches that is filled once the peer has joined."""

    def __init__(self) -> None:
        self.batches: Iterator[tuple[Tensor, Tensor]] = iter(())

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.batches


def train(
    run: RunConfig,
    directory: Path,
    rank: int,
    model: nn.Module,
    everything: Samples,
    test: Samples,
    evaluate: Evaluate,
) -> None:
    """Train the built-in model as peer ``rank``, to the end.

    Args:
        run: settings of the run, with a solver file.
        directory: the run's directory; log and snapshots go to the peer's directory in it.
        rank: rank of the peer.
        model: the model, on its device; the run's device overrides the solver file's.
        everything: the training images of all peers.
        test: the test images.
        evaluate: returns a model's figures on all test images.
    """
    assert run.task.solver is not None and run.task.batch_size is not None
    # SIGHUP requests a snapshot. Outside of training it must not end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    own = directory_of(directory, rank)
    given = prototxt.read_solver(solvers.solver_file(run.task.solver))
    prefix = own / (Path(given.snapshot_prefix).name or Path(run.task.solver).stem)
    param = dataclasses.replace(
        given,
        max_iter=run.run.iterations,
        given=given.given | {"max_iter"},
        snapshot_prefix=str(prefix),
        solver_mode="CPU",
        random_seed=-1,
        # Do not warn about fields without effect: the command has shown them, and uses ``net`` as the model's name.
        places={name: place for name, place in given.places.items() if name not in prototxt.WITHOUT_MEANING},
    )
    data = _LazyBatches()
    with _log_in(own) as stream:
        solver = Solver(
            param,
            net=model,
            loss=functional.cross_entropy,
            train=data,
            test=_test_batches(test) if param.test_iter else None,
            scores={"accuracy": lambda made, labels: (made.argmax(1) == labels).float().mean()},
            stream=stream,
        )
        with attach(solver, evaluate=lambda one: evaluate(one.net.module)) as attached:
            solver.snapshot_prefix = prefix  # each peer already has its own directory
            peer = attached.peer
            parts = partition_from(run.task.partition).split(everything.labels.numpy(), peer.size, run.run.seed)
            mine = everything.take(parts[peer.rank])
            batches = Batches(mine, run.task.batch_size, run.run.seed * 1000 + peer.rank)
            batches.seek(peer.iteration * param.iter_size)
            data.batches = batches
            _log(attached, solver, run.run.log_interval)
            solver.solve()


@contextlib.contextmanager
def _log_in(directory: Path) -> Iterator[TextIO]:
    """Open the log for appending; later lines may find no room."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        stream = (directory / LOG_FILE).open("a", buffering=1, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write there: {error.strerror}; give another --logdir", directory) from error
    try:
        yield stream
    finally:
        with contextlib.suppress(OSError):  # of lines that found no room
            stream.close()


def _test_batches(test: Samples) -> list[tuple[Tensor, Tensor]]:
    return [test.batch(index) for index in torch.split(torch.arange(len(test)), TEST_BATCH)]


def _log(attached: AttachedPeer, solver: Solver, every: int) -> None:
    """Log curves: the loss every few iterations, the accuracy after each test of the solver."""
    peer = attached.peer

    def on_start() -> None:
        iteration, results = solver.results
        if iteration == solver.iter and results:
            peer.log("test/accuracy", results[0]["accuracy"])

    def on_gradients_ready() -> None:
        if solver.iter % every == 0:
            peer.log("train/loss", solver.smoothed_loss)

    solver.add_callback(on_start, on_gradients_ready)
