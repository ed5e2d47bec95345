"""Caffe's solver over a torch module: pycaffe's surface, Caffe's order of a step, its formulas, files and lines.

A step (one iteration): gradients are cleared; test nets are tested if that is due; ``on_start`` of all callbacks;
``iter_size`` forward and backward passes, whose gradients add up; display; ``on_gradients_ready`` of all callbacks; the
update, after which ``iter`` is one more; a snapshot if that is due.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
from torch import nn

from gossipx.errors import UsageError
from gossipx.model.layout import plain_name
from gossipx.solver import log, snapshots
from gossipx.solver.checks import check, check_length
from gossipx.solver.net import Batches, Net, Objective, Score
from gossipx.solver.optimizers import DEFAULTS, TYPES, CaffeOptimizer
from gossipx.solver.prototxt import SolverParameter
from gossipx.solver.rates import learning_rate, steps_passed
from gossipx.solver.signals import Requests

Callback = Callable[[], object]


class Solver:
    """Trains a module as a solver file says; see :func:`gossipx.get_solver`.

    Args:
        param: the solver file's parameters.
        net: the model. With ``solver_mode: GPU``, Caffe's default, it is moved to the GPU ``device_id``; where there is
            none, a warning says so and it stays.
        loss: the objective is ``loss(net(x), y)``, a tensor of one number.
        train: batches (x, y), begun again when they end.
        test: of one test net; or of several, as a mapping whose values are these, in the order of the file's test_iter.
        scores: further outputs of the test nets by name, each a function of ``net(x)`` and y; their means are told.
        lr_mult, decay_mult: factors of single parameters' rate and decay, 1 where there is none, by a pattern that
            matches parameters' names: ``{"*.bias": 2}`` with ``{"*.bias": 0}`` is what Caffe's nets often have.
        stream: where lines go; None: standard error, as Caffe's.

    Attributes:
        param: as it was given.
        net: the training net.
        test_nets: in the order of test_iter.
        iter: iterations done.
        optimizer: makes the updates; its state is the solver's history.
        snapshot_prefix: how names of snapshots begin.
        results: of the last :meth:`test`, at which iteration it was.
        settle: called before the weights are read for a snapshot: with a parameter server some may be under way.

    Raises:
        UsageError: parameters that cannot be, by file, line and column; or arguments that do not go with them.
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
        tests = _tests(test)
        check(param, len(tests), "test=")
        check_length(param)
        _check_arguments(net, scores)
        self.param = param
        self.iter = 0
        self.snapshot_prefix = snapshots.prefix_of(param.snapshot_prefix, param.path)
        self._log = log.to_stream(sys.stderr if stream is None else stream)
        data, *test_data = [Batches(one, called) for called, one in [("train=", train), *tests]]
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
        self._requests = Requests()
        self._losses: list[float] = []
        if param.snapshot:
            self._probe()
        for file in param.weight_files:
            self._log.info(f"Finetuning from {file}")
            snapshots.load_weights(Path(file), net)

    def _place(self, net: nn.Module) -> None:
        if self.param.solver_mode == "CPU":
            return
        if torch.cuda.is_available():
            if not 0 <= self.param.device_id < torch.cuda.device_count():
                raise self.param.error("device_id", f"there are {torch.cuda.device_count()} GPUs")
            net.to(f"cuda:{self.param.device_id}")
        else:
            self._log.warning("solver_mode: GPU: there is no CUDA device; training where the net is")

    def _make_optimizer(
        self, net: nn.Module, lr_mult: Mapping[str, float], decay_mult: Mapping[str, float]
    ) -> CaffeOptimizer:
        names = {plain_name(name): one for name, one in net.named_parameters() if one.requires_grad}
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in names.items():
            factors = _factor(lr_mult, name), _factor(decay_mult, name)
            groups.setdefault(factors, []).append(parameter)
        for called, given in (("lr_mult", lr_mult), ("decay_mult", decay_mult)):
            for pattern in given:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise UsageError(f"{called}: '{pattern}' matches none of the parameters: {', '.join(names)}")
        settings = {name: float(getattr(self.param, name)) for name in DEFAULTS if hasattr(self.param, name)}
        settings["l1"] = float(self.param.regularization_type == "L1")
        made = [{"params": own, "lr_mult": lr, "decay_mult": decay} for (lr, decay), own in groups.items()]
        return TYPES[self.param.type](made, **settings)

    def _probe(self) -> None:
        """See before hours of training that snapshots can be written."""
        try:
            snapshots.probe(self.snapshot_prefix)
        except OSError as error:
            told = f"snapshots cannot be written to {self.snapshot_prefix} ({error.strerror})"
            raise self.param.error("snapshot_prefix", told) from None

    # --- pycaffe's surface --------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The rate of the iteration that comes next."""
        return learning_rate(self.param, self.iter)

    def add_callback(self, on_start: Callback, on_gradients_ready: Callback) -> None:
        """Have these called in each iteration, without arguments; see the order of a step."""
        self._callbacks.append((on_start, on_gradients_ready))

    def solve(self, resume: str | Path | None = None) -> None:
        """Train until ``max_iter``, then snapshot and test.

        Args:
            resume: a ``.solverstate`` file to go on from.

        Raises:
            KeyboardInterrupt: after SIGINT, and the snapshot that it asks for.
            UsageError: no ``max_iter``, snapshots that cannot be written; or as :meth:`restore` and :meth:`step`.
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
        """Make so many iterations.

        Raises:
            KeyboardInterrupt: after SIGINT, at the end of the iteration, and a snapshot unless ``snapshot_after_train``
                is false.
            UsageError: batches that cannot be had, or a loss that is none.
        """
        start, self._losses = self.iter, []
        with self._requests.caught():
            while self.iter < start + iterations:
                self.net.clear_param_diffs()
                if self._tests_now():
                    self.test()
                for on_start, _ in self._callbacks:
                    on_start()
                self._set_rate()  # a parameter server takes gradients as they are made, and the rate with them
                self._smooth(self._forward_backward(), start)
                if self.param.display and self.iter % self.param.display == 0:
                    self._show()
                for _, on_gradients_ready in self._callbacks:
                    on_gradients_ready()
                self.apply_update()
                due = bool(self.param.snapshot) and self.iter % self.param.snapshot == 0
                if self._requests.snapshot() or due:
                    self.snapshot()
                if self._requests.stop:
                    self._stop(self._wants_last_snapshot)

    def apply_update(self) -> None:
        """Update by the gradients that are there, at the rate of this iteration; ``iter`` is one more then.

        They are clipped as a sum, then divided by ``iter_size``; decay and the type's formula are the optimizer's.
        """
        if self.param.lr_policy == "multistep" and self.iter in self.param.stepvalue:
            passed = steps_passed(self.param, self.iter)
            self._log.info(f"MultiStep Status: Iteration {self.iter}, step = {passed}")
        if self.param.display and self.iter % self.param.display == 0:
            self._log.info(f"Iteration {self.iter}, lr = {self.lr:g}")
        self.net.bring()
        gradients = self._gradients()
        self._clip(gradients)
        if self.param.iter_size > 1:
            for gradient in gradients:
                gradient.div_(self.param.iter_size)
        self._set_rate()
        self.optimizer.step()
        self.iter += 1

    def test(self) -> list[dict[str, float]]:
        """Test all test nets, ``test_iter`` batches each.

        Returns:
            For each net the means of its outputs by name.

        Raises:
            KeyboardInterrupt: after SIGINT.
        """
        self.results = self.iter, [self._test(number, net) for number, net in enumerate(self.test_nets)]
        return self.results[1]

    def snapshot(self) -> Path:
        """Write the weights and the state.

        Returns:
            The ``.solverstate`` file, for :meth:`restore`; the weights lie beside it.

        Raises:
            GossipxError: they cannot be written.
        """
        self.settle()
        self.net.bring()
        weights, state = snapshots.save(self.snapshot_prefix, self.iter, self.net.module, self.optimizer)
        self._log.info(f"Snapshotting to safetensors file {weights}")
        self._log.info(f"Snapshotting solver state to safetensors file {state}")
        return state

    def restore(self, file: str | Path) -> None:
        """Go on from a snapshot: iterations done, the optimizer's history, and the weights beside the file.

        Raises:
            UsageError: it cannot be read, or is of another net or type of solver; nothing was changed then.
        """
        self._log.info(f"Restoring previous solver status from {file}")
        state = snapshots.load_state(Path(file), self.net.module, self.optimizer)
        snapshots.load_weights(state.weights, self.net.module)
        self.optimizer.state.clear()
        for parameter, histories in state.histories.items():
            self.optimizer.state[parameter] = histories
        self.iter = state.iteration

    def state_dict(self) -> dict[str, Any]:
        """Iterations done and the optimizer's state, for whoever keeps the weights elsewhere, as checkpoints do."""
        return {"iter": self.iter, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.iter = int(state["iter"])
        self.optimizer.load_state_dict(state["optimizer"])

    # --- parts of a step ----------------------------------------------------------------------------

    def _tests_now(self) -> bool:
        param = self.param
        due = param.test_interval and self.iter % param.test_interval == 0
        return bool(due) and (self.iter > 0 or param.test_initialization)

    def _forward_backward(self) -> float:
        """``iter_size`` passes; the mean of their losses."""
        total = 0.0
        for _ in range(self.param.iter_size):
            total += float(self.net.forward()["loss"])
            self.net.backward()
        return total / self.param.iter_size

    def _set_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"], group["iteration"] = self.lr, float(self.iter)

    def _smooth(self, loss: float, start: int) -> None:
        """The mean of the last ``average_loss`` losses of this :meth:`step`."""
        most = self.param.average_loss
        if len(self._losses) < most:
            self._losses.append(loss)
        else:
            self._losses[(self.iter - start) % most] = loss

    @property
    def smoothed_loss(self) -> float:
        """The mean of the last ``average_loss`` losses, which display shows; NaN before the first."""
        return sum(self._losses) / len(self._losses) if self._losses else math.nan

    def _show(self) -> None:
        self._log.info(f"Iteration {self.iter}, loss = {self.smoothed_loss:g}")
        for number, name in enumerate(self.net.outputs):
            value = float(self.net.blobs[name].data)
            self._log.info(f"    Train net output #{number}: {_told(name, value)}")

    def _gradients(self) -> list[torch.Tensor]:
        """Of all parameters that are trained: one that no pass has used has a gradient of zeros, as Caffe's."""
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in parameters]

    def _clip(self, gradients: list[torch.Tensor]) -> None:
        most = self.param.clip_gradients
        if most < 0:
            return
        norm = float(torch.linalg.vector_norm(torch.stack([one.norm().double() for one in gradients])))
        if norm > most:
            scale = most / norm
            self._log.info(
                f"Gradient clipping: scaling down gradients (L2 norm {norm:g} > {most:g}) by scale factor {scale:g}"
            )
            for gradient in gradients:
                gradient.mul_(scale)

    def _test(self, number: int, net: Net) -> dict[str, float]:
        self._log.info(f"Iteration {self.iter}, Testing net (#{number})")
        sums = dict.fromkeys(net.outputs, 0.0)
        count = self.param.test_iter[number]
        for _ in range(count):
            if self._requests.snapshot():
                self.snapshot()
            if self._requests.stop:
                self._log.info("Test interrupted.")
                self._stop(self._wants_last_snapshot)
            for name, value in net.forward().items():
                sums[name] += float(value)
        means = {name: total / count for name, total in sums.items()}
        if self.param.test_compute_loss:
            self._log.info(f"Test loss: {means['loss']:g}")
        for place, (name, mean) in enumerate(means.items()):
            self._log.info(f"    Test net output #{place}: {_told(name, mean)}")
        return means

    # --- the end ------------------------------------------------------------------------------------

    @property
    def _wants_last_snapshot(self) -> bool:
        """Of what training ends with, unless there is one already."""
        snapshot = self.param.snapshot
        return self.param.snapshot_after_train and not (snapshot and self.iter and self.iter % snapshot == 0)

    def _stop(self, takes_snapshot: bool) -> NoReturn:
        if takes_snapshot:
            self.snapshot()
        self._log.info("Optimization stopped early.")
        raise KeyboardInterrupt


def _tests(test: Iterable[Any] | Mapping[str, Iterable[Any]] | None) -> list[tuple[str, Iterable[Any]]]:
    """The data of each test net, and how messages call them."""
    if test is None:
        return []
    if isinstance(test, Mapping):
        return [(f"test={{'{name}'}}", batches) for name, batches in test.items()]
    return [("test=", test)]


def _check_arguments(net: object, scores: Mapping[str, Score] | None) -> None:
    if not isinstance(net, nn.Module):
        raise UsageError(f"net= is of type {type(net).__name__}, and is to be a torch module")
    if not any(one.requires_grad for one in net.parameters()):
        raise UsageError("net= has no parameters that are trained: none requires_grad")
    if "loss" in (scores or {}):
        raise UsageError("scores= names one 'loss', as the objective is called: give it another name")


def _factor(given: Mapping[str, float], name: str) -> float:
    return next((float(value) for pattern, value in given.items() if fnmatchcase(name, pattern)), 1.0)


def _told(name: str, value: float) -> str:
    """As Caffe tells an output: of the loss also its part in the objective, of which it is all."""
    return f"{name} = {value:g}" + (f" (* 1 = {value:g} loss)" if name == "loss" else "")
