"""Measured regret of FluentPS's sync models beside the bounds of section III-E.

The problem is a softmax regression on inputs with ‖x‖ ≤ 1. Its loss is convex in the weights, and L-Lipschitz with
L = √2: the gradient is (p − y) xᵀ, and ‖p − y‖ ≤ √2. Proposition 1 also asks that D(w₁‖w₂) = ½‖w₁ − w₂‖² ≤ F² for all
weights that occur: F is chosen, w* is the best in a ball that no weight leaves, and the rate of the t-th gradient is
σ/√t with σ = F / (L √(2 (s + 1) N)), as in the proof for SSP by Ho et al. 2013.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from _bench.tasks import Samples, Task
from _table import Part
from _workers import Problem, train
from torch import Tensor, nn
from torch.nn import functional

LIPSCHITZ = math.sqrt(2)
F = 2.0
RADIUS = F / math.sqrt(2)
"""Of a ball in which ½‖w₁ − w₂‖² ≤ F²."""
STEPS = 300
"""Of the descent to w*."""
FEATURES, CLASSES, BATCH = 20, 10, 16


@dataclass
class _Seen:
    """The losses f_t(w_t), with their batches and weights."""

    losses: list[float] = field(default_factory=list)
    batches: list[Samples] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def __call__(self, rank: int, iteration: int, module: nn.Module, batch: Samples) -> None:
        with torch.no_grad():
            self.losses.append(float(functional.cross_entropy(module(batch[0]), batch[1])))
        self.batches.append(batch)
        self.weights.append(next(module.parameters()).detach().clone().flatten())

    def regret(self) -> tuple[float, float]:
        """Return the mean of f_t(w_t) − f_t(w*), and max ‖w_t‖."""
        return fmean(self.losses) - self.least(), float(torch.stack(self.weights).norm(dim=1).max())

    def least(self) -> float:
        """Return the mean of f_t(w*), with the best w* whose norm is at most RADIUS."""
        inputs = torch.cat([one for one, _ in self.batches])
        labels = torch.cat([one for _, one in self.batches])
        smoothness = float(torch.linalg.matrix_norm(inputs, 2)) ** 2 / len(inputs) / 2
        best = torch.zeros(CLASSES, FEATURES)
        for _ in range(STEPS):  # projected gradient descent
            shares = torch.softmax(inputs @ best.T, 1) - functional.one_hot(labels, CLASSES)
            best = best - shares.T @ inputs / len(inputs) / smoothness
            best = best * min(1.0, RADIUS / float(best.norm()))
        return float(functional.cross_entropy(inputs @ best.T, labels))


def bound(terms: float, workers: int, iterations: int) -> float:
    """Return 4 F L √(2 · terms · N / T); terms: s + 1, s + 1/c or s + 2/α."""
    return 4 * F * LIPSCHITZ * math.sqrt(2 * terms * workers / (workers * iterations))


def part(workers: int, iterations: int) -> Part:
    """Return the regret of SSP, constant PSSP and dynamic PSSP beside its bounds."""
    models: Sequence[tuple[str, str, float]] = (
        ("SSP, s = 3 (Eq. 1)", "ssp:staleness=3", 4),
        ("PSSP, s = 3, c = 1/2 (Theorem 1)", "pssp:staleness=3,p=0.5", 5),
        ("SSP, s = 4, the same bound", "ssp:staleness=4", 5),
        ("PSSP, s = 3, c = 1/10 (Theorem 1)", "pssp:staleness=3,p=0.1", 13),
        ("SSP, s = 12, the same bound", "ssp:staleness=12", 13),
        ("PSSP, s = 3, α = 1 (Theorem 2)", "pssp:staleness=3,alpha=1", 5),
        ("bsp", "bsp", 4),
        ("asp", "asp", 4),
    )
    setting = (
        f"softmax regression of {FEATURES} inputs and {CLASSES} classes, {workers} workers, {iterations} iterations, "
        f"one worker 1.76 times as slow, soft barrier; F = {F:g}, L = √2; the learning rate is that of each bound, so "
        "that models with equal bounds have equal rates; bsp and asp, which have no bound here, have that of SSP with "
        "s = 3; the paper has no measurement"
    )
    made = Part("Section III-E: regret beside its bounds", setting)
    widest, least = 0.0, 0.0
    for name, sync, terms in models:
        seen = _Seen()
        train(_problem(seen, terms, workers), workers, 1, iterations, _slow, sync=sync, pulls="soft", apply="each")
        measured, norm = seen.regret()
        widest, least = max(widest, norm), seen.least()
        limit = bound(terms, workers, iterations)
        told = f"at most {limit:.3g}" if "(" in name or "bound" in name else "no bound"
        says = told != "no bound" and limit < math.log(CLASSES) - least  # else no model can exceed it
        made.add(name, told, measured, "nats", measured <= limit if says else None)
    nothing = math.log(CLASSES) - least
    made.add("no training at all, w = 0", "no bound", nothing, "nats")
    learns = "SSP, s = 3: less regret than without training"
    made.add(learns, "it follows from learning", made.lines[0].ours / nothing, "", made.lines[0].ours < nothing, True)
    made.add("largest ‖w‖", f"at most F / √2 = {RADIUS:.3g}", widest, "", widest <= RADIUS, holds=True)
    return made


def _slow(worker: int) -> Callable[[], float]:
    return lambda: 1.76 if worker == 0 else 1.0


def _problem(seen: _Seen, terms: float, workers: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.randint(0, CLASSES, (4_000,), generator=generator)
    inputs = centres[labels] + 2 * torch.randn(4_000, FEATURES, generator=generator)
    inputs = inputs / inputs.norm(dim=1).max()
    sigma = F / (LIPSCHITZ * math.sqrt(2 * terms * workers))

    def model() -> nn.Module:
        module = nn.Linear(FEATURES, CLASSES, bias=False)
        nn.init.zeros_(module.weight)
        return module

    return Problem(
        "softmax regression",
        Task(model, (inputs, labels), (inputs, labels)),
        BATCH,
        lambda parameters: torch.optim.SGD(parameters, lr=sigma),
        lambda iteration: sigma / math.sqrt((iteration - 1) * workers + 1),
        seen,
    )
