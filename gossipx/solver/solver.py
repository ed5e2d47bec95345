"""Caffe's solver for a torch module, with pycaffe's interface and Caffe's formulas, files and log lines.

The order of a step (one iteration) is Caffe's: clear the gradients; run the test nets if due; call ``on_start`` of all
callbacks; run ``iter_size`` forward and backward passes, which add up gradients; display; call ``on_gradients_ready``
of all callbacks; update the weights and increment ``iter``; write a snapshot if due.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import torch
from torch import nn

from gossipx.errors import GossipxError, UsageError
from gossipx.model.layout import plain_name
from gossipx.solver import net as nets
from gossipx.solver.net import Net, Objective, Score, SourceBatches
from gossipx.solver.optimizers import DEFAULTS, TYPES, CaffeOptimizer
from gossipx.solver.prototxt import LEAST, SolverParameter
from gossipx.solver.rates import POLICIES, learning_rate, steps_passed
from gossipx.specs import known_word, texts

Callback = Callable[[], object]


class Solver:
    """A trainer of a module by a solver file; see :func:`gossipx.get_solver`.

    Args:
        param: the solver file's parameters.
        net: the model. With ``solver_mode: GPU``, Caffe's default, it is moved to the GPU ``device_id``; without a GPU
            it stays where it is, with a warning.
        loss: the objective is ``loss(net(x), y)``, a tensor of one number.
        train: batches (x, y), which are iterated again at their end.
        test: batches of one test net, or a mapping with those of several, in the order of the file's test_iter.
        scores: further outputs of the test nets by name, each a function of ``net(x)`` and y; their means are logged.
        lr_mult, decay_mult: factors for the rate and decay of single parameters, 1 by default, by patterns of
            parameter names. Caffe's nets often have ``{"*.bias": 2}`` and ``{"*.bias": 0}``.
        stream: destination of log lines; None: standard error, as in Caffe.

    Attributes:
        param: the parameters, as given.
        net: the training net.
        test_nets: the test nets, in the order of test_iter.
        iter: iterations done.
        optimizer: the optimizer, whose state is the solver's history.
        snapshot_prefix: the path prefix of snapshots.
        results: iteration and results of the last :meth:`test`.
        settle: called before a snapshot reads the weights, to wait for pulls from a parameter server.

    Raises:
        UsageError: invalid parameters, with file, line and column, or arguments that conflict with them.
    """

    def __init__(
        self,
        param: SolverParameter,
        *,
        net: nn.Module,
        loss: Objective,
        train: Iterable[Any],
        test: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
        scores: Mapping[str, Score] | None = None,
        lr_mult: Mapping[str, float] | None = None,
        decay_mult: Mapping[str, float] | None = None,
        stream: TextIO | None = None,
    ):
        tests = _test_data(test)
        _check_trainable(param, len(tests))
        _check_arguments(net, scores)
        self.param = param
        self.iter = 0
        self.snapshot_prefix = nets.snapshot_prefix(param.snapshot_prefix, param.path)
        self._log = _log_to(sys.stderr if stream is None else stream)
        data, *test_data = [SourceBatches(one, name) for name, one in [("train=", train), *tests]]
        for warning in [*param.warnings(), *(line for one in (data, *test_data) for line in one.warnings())]:
            self._log.warning(warning)
        if param.random_seed >= 0:
            torch.manual_seed(param.random_seed)
        self._place(net)
        self.net = Net(net, loss, data, {}, trains=True)
        self.test_nets = [Net(net, loss, one, scores or {}, trains=False) for one in test_data]
        self.optimizer = self._make_optimizer(net, lr_mult or {}, decay_mult or {})
        self.results: tuple[int, list[dict[str, float]]] = (-1, [])
        self.settle: Callback = lambda: None
        self._callbacks: list[tuple[Callback, Callback]] = []
        self._requests = _SignalRequests()
        self._unwritten_at: int | None = None  # iteration of the last snapshot that could not be written
        self._losses: list[float] = []
        if param.snapshot:
            self._probe()
        for file in param.weight_files:
            self._log.info(f"Finetuning from {file}")
            nets.load_weights(Path(file), net)

    def _place(self, net: nn.Module) -> None:
        if self.param.solver_mode == "CPU":
            return
        if torch.cuda.is_available():
            if not 0 <= self.param.device_id < torch.cuda.device_count():
                raise self.param.error("device_id", f"this machine has {torch.cuda.device_count()} GPUs")
            net.to(f"cuda:{self.param.device_id}")
        else:
            self._log.warning("solver_mode: GPU: no CUDA device found; training on the net's device")

    def _make_optimizer(
        self, net: nn.Module, lr_mult: Mapping[str, float], decay_mult: Mapping[str, float]
    ) -> CaffeOptimizer:
        names = {plain_name(name): one for name, one in net.named_parameters() if one.requires_grad}
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in names.items():
            factors = _factor(lr_mult, name), _factor(decay_mult, name)
            groups.setdefault(factors, []).append(parameter)
        for argument, given in (("lr_mult", lr_mult), ("decay_mult", decay_mult)):
            for pattern in given:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise UsageError(f"{argument}: '{pattern}' matches none of the parameters: {', '.join(names)}")
        settings = {name: float(getattr(self.param, name)) for name in DEFAULTS if hasattr(self.param, name)}
        settings["l1"] = float(self.param.regularization_type == "L1")
        params = [{"params": own, "lr_mult": lr, "decay_mult": decay} for (lr, decay), own in groups.items()]
        return TYPES[self.param.type](params, **settings)

    def _probe(self) -> None:
        """Check that snapshots can be written, to fail before hours of training."""
        try:
            nets.probe_snapshots(self.snapshot_prefix)
        except OSError as error:
            cause = f"snapshots cannot be written to {self.snapshot_prefix} ({error.strerror})"
            raise self.param.error("snapshot_prefix", cause) from None

    # --- pycaffe's interface ------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The rate of the next iteration."""
        return learning_rate(self.param, self.iter)

    def add_callback(self, on_start: Callback, on_gradients_ready: Callback) -> None:
        """Register functions to call without arguments in each iteration; see the order of a step."""
        self._callbacks.append((on_start, on_gradients_ready))

    def solve(self, resume: str | Path | None = None) -> None:
        """Train until ``max_iter``, then snapshot and test.

        Args:
            resume: a ``.solverstate`` file to resume from.

        Raises:
            KeyboardInterrupt: after SIGINT and its snapshot.
            UsageError: ``max_iter`` is missing, snapshots cannot be written, or as for :meth:`restore` and
                :meth:`step`.
        """
        if "max_iter" not in self.param.given:
            raise self.param.error("max_iter", "it is missing, and solve trains until it is reached")
        if self.param.snapshot_after_train:
            self._probe()
        self._log.info(f"Solving {self.net.name}")
        self._log.info(f"Learning Rate Policy: {self.param.lr_policy}")
        if resume is not None:
            self.restore(resume)
        start = self.iter
        with self._requests.caught():
            self.step(self.param.max_iter - self.iter)
            if self._wants_last_snapshot:
                self.snapshot()
            if self.param.display and self.iter % self.param.display == 0:
                with torch.no_grad():
                    self._smooth(float(self.net.forward()["loss"]), start)
                self._log.info(f"Iteration {self.iter}, loss = {self.smoothed_loss:g}")
            if self.param.test_interval and self.iter % self.param.test_interval == 0:
                self.test()
        self._log.info("Optimization Done.")

    def step(self, iterations: int) -> None:
        """Run a number of iterations.

        Raises:
            KeyboardInterrupt: after SIGINT, at the end of the iteration, and a snapshot unless ``snapshot_after_train``
                is false.
            UsageError: the source gives no batches, or the loss is invalid.
        """
        start, self._losses = self.iter, []
        with self._requests.caught():
            while self.iter < start + iterations:
                self.net.clear_param_diffs()
                if self._tests_now():
                    self.test()
                for on_start, _ in self._callbacks:
                    on_start()
                self._set_rate()  # gradients go to a parameter server during backward, with the rate
                self._smooth(self._forward_backward(), start)
                if self.param.display and self.iter % self.param.display == 0:
                    self._show()
                for _, on_gradients_ready in self._callbacks:
                    on_gradients_ready()
                self.apply_update()
                due = bool(self.param.snapshot) and self.iter % self.param.snapshot == 0
                if self._requests.take_snapshot_request() or due:
                    self._try_snapshot()
                if self._requests.stop:
                    self._stop(self._wants_last_snapshot)

    def apply_update(self) -> None:
        """Update the weights by the current gradients at this iteration's rate, and increment ``iter``.

        The sum of gradients is clipped, then divided by ``iter_size``. The optimizer applies decay and its formula.
        """
        if self.param.lr_policy == "multistep" and self.iter in self.param.stepvalue:
            passed = steps_passed(self.param, self.iter)
            self._log.info(f"MultiStep Status: Iteration {self.iter}, step = {passed}")
        if self.param.display and self.iter % self.param.display == 0:
            self._log.info(f"Iteration {self.iter}, lr = {self.lr:g}")
        self.net.flush()
        gradients = self._gradients()
        self._clip(gradients)
        if self.param.iter_size > 1:
            for gradient in gradients:
                gradient.div_(self.param.iter_size)
        self._set_rate()
        self.optimizer.step()
        self.iter += 1

    def test(self) -> list[dict[str, float]]:
        """Run all test nets on ``test_iter`` batches each.

        Returns:
            For each net, the means of its outputs by name.

        Raises:
            KeyboardInterrupt: after SIGINT.
        """
        self.results = self.iter, [self._test(number, net) for number, net in enumerate(self.test_nets)]
        return self.results[1]

    def snapshot(self) -> Path:
        """Write the weights and the state.

        Returns:
            The ``.solverstate`` file, for :meth:`restore`; the weights are in the same directory.

        Raises:
            GossipxError: the files cannot be written.
        """
        self.settle()
        self.net.flush()
        weights, state = nets.save_snapshot(self.snapshot_prefix, self.iter, self.net.module, self.optimizer)
        self._log.info(f"Snapshotting to safetensors file {weights}")
        self._log.info(f"Snapshotting solver state to safetensors file {state}")
        return state

    def _try_snapshot(self) -> None:
        """Write a snapshot in mid-training; if that fails, log it: a later one may succeed."""
        try:
            self.snapshot()
        except GossipxError as error:
            self._unwritten_at = self.iter
            logging.getLogger("gossipx").warning("%s", error)

    def restore(self, file: str | Path) -> None:
        """Resume from a snapshot: iterations done, the optimizer's history and the weights.

        Raises:
            UsageError: it cannot be read, or belongs to another net or type of solver. Nothing is changed then.
        """
        self._log.info(f"Restoring previous solver status from {file}")
        state = nets.load_solver_state(Path(file), self.net.module, self.optimizer)
        nets.load_weights(state.weights, self.net.module)
        self.optimizer.state.clear()
        for parameter, histories in state.histories.items():
            self.optimizer.state[parameter] = histories
        self.iter = state.iteration

    def state_dict(self) -> dict[str, Any]:
        """Return iterations done and the optimizer's state, without the weights, which checkpoints store separately."""
        return {"iter": self.iter, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a result of :meth:`state_dict`."""
        self.iter = int(state["iter"])
        self.optimizer.load_state_dict(state["optimizer"])

    # --- parts of a step ----------------------------------------------------------------------------

    def _tests_now(self) -> bool:
        param = self.param
        due = param.test_interval and self.iter % param.test_interval == 0
        return bool(due) and (self.iter > 0 or param.test_initialization)

    def _forward_backward(self) -> float:
        """Run ``iter_size`` passes, and return the mean of their losses."""
        total = 0.0
        for _ in range(self.param.iter_size):
            total += float(self.net.forward()["loss"])
            self.net.backward()
        return total / self.param.iter_size

    def _set_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"], group["iteration"] = self.lr, float(self.iter)

    def _smooth(self, loss: float, start: int) -> None:
        """Add a loss to the ring buffer of the last ``average_loss`` losses of this :meth:`step`."""
        size = self.param.average_loss
        if len(self._losses) < size:
            self._losses.append(loss)
        else:
            self._losses[(self.iter - start) % size] = loss

    @property
    def smoothed_loss(self) -> float:
        """The mean of the last ``average_loss`` losses, as displayed; NaN before the first."""
        return sum(self._losses) / len(self._losses) if self._losses else math.nan

    def _show(self) -> None:
        self._log.info(f"Iteration {self.iter}, loss = {self.smoothed_loss:g}")
        for number, name in enumerate(self.net.outputs):
            value = float(self.net.blobs[name].data)
            self._log.info(f"    Train net output #{number}: {_caffe_output(name, value)}")

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients of all trained parameters; as in Caffe, zeros for parameters that no pass has used."""
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in parameters]

    def _clip(self, gradients: list[torch.Tensor]) -> None:
        limit = self.param.clip_gradients
        if limit < 0:
            return
        norm = float(torch.linalg.vector_norm(torch.stack([one.norm().double() for one in gradients])))
        scale = 1.0
        if norm > limit:
            scale = limit / norm
            self._log.info(
                f"Gradient clipping: scaling down gradients (L2 norm {norm:g} > {limit:g}) by scale factor {scale:g}"
            )
        for gradient in gradients:  # even by 1: a parameter server's worker learns from the first step that we clip
            gradient.mul_(scale)

    def _test(self, number: int, net: Net) -> dict[str, float]:
        self._log.info(f"Iteration {self.iter}, Testing net (#{number})")
        sums = dict.fromkeys(net.outputs, 0.0)
        count = self.param.test_iter[number]
        for _ in range(count):
            if self._requests.take_snapshot_request():
                self._try_snapshot()
            if self._requests.stop:
                self._log.info("Test interrupted.")
                self._stop(self._wants_last_snapshot)
            for name, value in net.forward().items():
                sums[name] += float(value)
        means = {name: total / count for name, total in sums.items()}
        if self.param.test_compute_loss:
            self._log.info(f"Test loss: {means['loss']:g}")
        for place, (name, mean) in enumerate(means.items()):
            self._log.info(f"    Test net output #{place}: {_caffe_output(name, mean)}")
        return means

    # --- the end ------------------------------------------------------------------------------------

    @property
    def _wants_last_snapshot(self) -> bool:
        """Whether to write a snapshot at the end of training, unless the last iteration has just written one.

        One that failed at the last iteration is tried again, so that its error ends the training.
        """
        snapshot = self.param.snapshot
        written = snapshot and self.iter and self.iter % snapshot == 0
        return self._unwritten_at == self.iter or (self.param.snapshot_after_train and not written)

    def stop_early(self, takes_snapshot: bool) -> None:
        """Write a snapshot if asked to, and log that the training ends here."""
        if takes_snapshot:
            self.snapshot()
        self._log.info("Optimization stopped early.")

    def _stop(self, takes_snapshot: bool) -> NoReturn:
        self.stop_early(takes_snapshot)
        raise KeyboardInterrupt


def _test_data(test: Iterable[Any] | Mapping[str, Iterable[Any]] | None) -> list[tuple[str, Iterable[Any]]]:
    """Return the data of each test net, with its name in messages."""
    if test is None:
        return []
    if isinstance(test, Mapping):
        return [(f"test={{'{name}'}}", batches) for name, batches in test.items()]
    return [("test=", test)]


def _check_arguments(net: object, scores: Mapping[str, Score] | None) -> None:
    if not isinstance(net, nn.Module):
        raise UsageError(f"net= is of type {type(net).__name__}, and must be a torch module")
    if not any(one.requires_grad for one in net.parameters()):
        raise UsageError("net= has no trained parameters: set requires_grad on some")
    if "loss" in (scores or {}):
        raise UsageError("scores= has a score 'loss', which is the objective's name: rename the score")


def _factor(given: Mapping[str, float], name: str) -> float:
    return next((float(value) for pattern, value in given.items() if fnmatchcase(name, pattern)), 1.0)


def _caffe_output(name: str, value: float) -> str:
    """Format an output as Caffe does; for the loss add its weighted part in the objective, whose weight is 1."""
    return f"{name} = {value:g}" + (f" (* 1 = {value:g} loss)" if name == "loss" else "")


# --- checks before training, many of which Caffe makes only when it uses a value --------------------


def _check_trainable(param: SolverParameter, tests: int) -> None:
    """Check that training can start.

    Args:
        param: the parameters.
        tests: number of sets of test batches.

    Raises:
        UsageError: the first invalid field, with file, line and column.
    """
    for field, mistake in _mistakes(param, tests):
        raise param.error(field, mistake)


def _mistakes(param: SolverParameter, tests: int) -> Iterator[tuple[str, str]]:
    yield from _known_names(param)
    for field, least in LEAST.items():
        if not getattr(param, field) >= least:  # also true for NaN
            yield field, f"{getattr(param, field):g} is less than {least:g}"
    yield from _rate(param)
    yield from _of_type(param)
    yield from _check_test_nets(param, tests)
    for name in param.weight_files:
        if texts.found(Path(name)) != "file":
            yield "weights", f"there is no file '{name}'"


def _known_names(param: SolverParameter) -> Iterator[tuple[str, str]]:
    known: dict[str, Mapping[str, object]] = {
        "type": TYPES,
        "lr_policy": POLICIES,
        "regularization_type": dict.fromkeys(("L1", "L2")),
    }
    for field, names in known.items():
        if field == "lr_policy" and not param.lr_policy:
            yield field, f"it is missing: one of {', '.join(POLICIES)}"
        try:
            known_word(field, getattr(param, field), names)
        except UsageError as error:
            yield field, str(error)


def _rate(param: SolverParameter) -> Iterator[tuple[str, str]]:
    if "base_lr" not in param.given:
        yield "base_lr", "it is missing"
    needs, _ = POLICIES[param.lr_policy]
    for field in needs:
        if field not in param.given:
            yield field, f'it is missing, and lr_policy: "{param.lr_policy}" needs it'
    if "stepsize" in needs and param.stepsize < 1:
        yield "stepsize", f"{param.stepsize} is less than 1"
    if list(param.stepvalue) != sorted(set(param.stepvalue)):
        yield "stepvalue", f"must be in ascending order: {', '.join(map(str, param.stepvalue))}"
    if param.lr_policy == "poly":
        if not param.power >= 0:
            yield "power", f'{param.power:g} is less than 0, and lr_policy: "poly" raises 0 to it at max_iter'
        if param.max_iter < 1:
            yield "max_iter", f'{param.max_iter} is less than 1, and lr_policy: "poly" divides by it'


def _of_type(param: SolverParameter) -> Iterator[tuple[str, str]]:
    if param.type in ("AdaGrad", "RMSProp") and param.momentum:
        yield "momentum", f"{param.type} does not use it: leave it out"
    if param.type in ("Adam", "AdaDelta") and not param.momentum < 1:
        yield "momentum", f"must be less than 1 with {param.type}"
    if param.type == "RMSProp" and not 0 <= param.rms_decay < 1:
        yield "rms_decay", f"{param.rms_decay:g} is not in [0, 1)"
    if param.type == "Adam" and not 0 <= param.momentum2 < 1:
        yield "momentum2", f"{param.momentum2:g} is not in [0, 1)"


def _check_test_nets(param: SolverParameter, tests: int) -> Iterator[tuple[str, str]]:
    if len(param.test_iter) != tests:
        yield "test_iter", f"it is given {len(param.test_iter)} times, once per test net, and test= has {tests} of them"
    if tests and not param.test_interval:
        yield "test_interval", "it is missing, and the test nets need it"
    if any(count < 1 for count in param.test_iter):
        yield "test_iter", f"{min(param.test_iter)} is less than 1"


# --- signals and the log ---------------------------------------------------------------------------


class _SignalRequests:
    """Caffe's signals: SIGINT stops training after the iteration and a snapshot, SIGHUP requests a snapshot.

    SIGINT is left alone if the script, or the peer that the solver is, has a handler of its own.

    Attributes:
        stop: whether SIGINT was received. A second SIGINT raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.stop = False
        self._snapshot = False
        self._catching = False

    def take_snapshot_request(self) -> bool:
        """Return whether SIGHUP was received since the last call."""
        requested, self._snapshot = self._snapshot, False
        return requested

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Turn signals into requests within this context. Has no effect outside the main thread.

        Raises:
            KeyboardInterrupt: SIGINT was received after the last check of the requests.
        """
        if self._catching or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._catching = True
        before = {signal.SIGHUP: signal.getsignal(signal.SIGHUP)}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            before[signal.SIGINT] = signal.default_int_handler
        try:
            signal.signal(signal.SIGHUP, self._on_hangup)
            if signal.SIGINT in before:
                signal.signal(signal.SIGINT, self._on_interrupt)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            stopped, self.stop, self._catching = self.stop, False, False
        if stopped:
            raise KeyboardInterrupt

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        self._snapshot = True


class _Glog(logging.Formatter):
    """Caffe's format of log lines, that of glog, so that Caffe's log parser and plotting tools can read them."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        micros = int(record.created % 1 * 1e6)
        place = f"{record.filename}:{record.lineno}]"
        return f"{record.levelname[0]}{moment}.{micros:06d} {record.process:5d} {place} {record.getMessage()}"


class _LogHandler(logging.StreamHandler):  # type: ignore[type-arg]  # not generic before Python 3.11
    """Writes lines; when it cannot, it logs one warning, and later lines are tried again."""

    _has_warned = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - of logging
        error = sys.exc_info()[1]
        if not self._has_warned:
            self._has_warned = True
            name = getattr(self.stream, "name", "the solver's log")
            logging.getLogger("gossipx").warning("%s: lines of the log cannot be written (%s)", name, error)


def _log_to(stream: TextIO) -> logging.Logger:
    """Return a new logger to ``stream``, with lines ``I0210 13:39:22.381027 25210 solver.py:204] Iteration 100``."""
    log = logging.Logger("gossipx.solver")
    handler = _LogHandler(stream)
    handler.setFormatter(_Glog())
    log.addHandler(handler)
    return log
