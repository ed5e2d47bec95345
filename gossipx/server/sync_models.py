"""The built-in sync models and their specs: ``ssp:staleness=3``, ``hybrid:step=5/lr``.

All of them are push and pull conditions on one mechanism (FluentPS, Table III); see :mod:`gossipx.server.conditions`.
In the formulas, progress is the number of iterations that the pulling worker has done, and V_train is the shard's
clock.

The threshold K of the hybrid model is a growth function of the number of gradients (Hybrid Approach, section 4). The
paper leaves the function open ("different monotonically increasing functions can also be used", section 9) and uses the
step function. For a custom one, inherit from :class:`Growth`.
"""

from __future__ import annotations

import abc
import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, final

from gossipx import specs
from gossipx.errors import UsageError
from gossipx.server.conditions import Apply, Conditions, Pull, State, SyncModel, View

E = TypeVar("E", bound=enum.Enum)

# --- growth functions -----------------------------------------------------------------------------

_OVER_RATE = "/lr"
_MOST_DOUBLINGS = 62  # 2**62 is above any number of workers; K is never larger than that


@dataclass(frozen=True)
class Growth(abc.ABC):
    """K as a function of the gradients so far. The model limits it to the number of living workers."""

    @abc.abstractmethod
    def threshold(self, gradients: int) -> int:
        """Return K, at least 1, for the ``gradients``-th gradient (from 1, of complete pushes; see :class:`View`)."""

    @property
    def needs_rate(self) -> bool:
        """Whether the function depends on a learning rate that is not known yet."""
        return False

    def resolved(self, learning_rate: float) -> Growth:
        """Return the function with the learning rate inserted."""
        return self

    def describe(self) -> str:
        """Return the function as the hybrid model's spec names it; a custom one has no spec: its class name."""
        return type(self).__name__


@dataclass(frozen=True)
class _Periodic(Growth):
    """A growth function whose K changes after every ``every`` gradients; see :class:`Step`."""

    every: int | str = "5" + _OVER_RATE

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", _period(self._word, self.every))

    @property
    def _word(self) -> str:
        return type(self).__name__.lower()

    @property
    def needs_rate(self) -> bool:
        return isinstance(self.every, str)

    def resolved(self, learning_rate: float) -> Growth:
        if isinstance(self.every, int):
            return self
        if not 0 < learning_rate < math.inf:
            raise ValueError(f"a step of {self.every} needs a learning rate above 0, not {learning_rate}")
        return replace(self, every=max(1, round(float(self.every.removesuffix(_OVER_RATE)) / learning_rate)))

    def describe(self) -> str:
        return f"{self._word}={self.every}"

    def _periods(self, gradients: int) -> int:
        """Return the whole periods before the ``gradients``-th gradient: 0 for the first ``every`` gradients."""
        if isinstance(self.every, str):
            raise ValueError(f"a step of {self.every} is not resolved: call resolved(learning_rate) first")
        return max(0, gradients - 1) // self.every


@final
class Step(_Periodic):
    """K starts at 1 and grows by one after every ``every`` gradients: the step function of section 6.

    A linear function, rounded down to whole gradients, is the same.

    Attributes:
        every: a number of gradients, or a text such as ``"5/lr"``, a multiple of the learning rate's reciprocal as in
            the paper. Of those that it compares, 5/lr has the highest accuracy and lowest loss (Table 4).
    """

    def threshold(self, gradients: int) -> int:
        return 1 + self._periods(gradients)


@final
class Double(_Periodic):
    """K starts at 1 and doubles after every ``every`` gradients: most of the run is asynchronous, and the switch is
    short.

    Attributes:
        every: as for :class:`Step`.
    """

    def threshold(self, gradients: int) -> int:
        return 1 << min(self._periods(gradients), _MOST_DOUBLINGS)


@final
@dataclass(frozen=True)
class Fixed(Growth):
    """A constant K: 1 is asynchronous, the number of workers or more is synchronous."""

    gradients: int

    def __post_init__(self) -> None:
        if self.gradients < 1:
            raise ValueError("fixed must be at least 1 gradient")

    def describe(self) -> str:
        return f"fixed={self.gradients}"

    def threshold(self, gradients: int) -> int:
        return self.gradients


def _fixed(text: str) -> Fixed:
    """Return the constant K that a spec names; ValueError naming a valid value."""
    if not text.isdecimal():
        raise ValueError(f"fixed='{text}' is not a number of gradients, such as 4")
    return Fixed(int(text))


def _period(name: str, every: int | str) -> int | str:
    """Return a number of gradients, or a multiple of the learning rate's reciprocal in canonical spelling."""
    if isinstance(every, str) and every.isdecimal():
        every = int(every)
    if isinstance(every, int):
        if every < 1:
            raise ValueError(f"{name} must be at least 1 gradient")
        return every
    try:
        times = float(every.removesuffix(_OVER_RATE)) if every.endswith(_OVER_RATE) else math.nan
    except ValueError:
        times = math.nan
    if not 0 < times < math.inf:
        raise ValueError(f"{name}='{every}' is neither a number of gradients (500) nor a multiple of 1/lr (5/lr)")
    return f"{int(times) if times.is_integer() else times}{_OVER_RATE}"


# --- sync models ----------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class BSP(SyncModel):
    """Bulk synchronous parallel: no worker continues before all have pushed. progress < V_train."""

    default_apply = Apply.TICK

    def may_pull(self, state: State, view: View, pull: Pull) -> bool:
        return pull.progress < view.clock


@final
@dataclass(frozen=True)
class ASP(SyncModel):
    """Asynchronous parallel: no worker waits. progress < V_train + ∞."""

    def may_pull(self, state: State, view: View, pull: Pull) -> bool:
        return True


@final
@dataclass(frozen=True)
class SSP(SyncModel):
    """Stale synchronous parallel: progress < V_train + s.

    An answer contains every living worker's pushes up to iteration progress − s.

    Attributes:
        staleness: s, iterations; 0 is BSP, ``inf`` is ASP. The paper's AlexNet has 3 (section IV-B).
    """

    staleness: float = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "staleness", _staleness(self.staleness))

    def may_pull(self, state: State, view: View, pull: Pull) -> bool:
        return pull.progress < view.clock + self.staleness


@final
@dataclass(frozen=True)
class DSPS(SyncModel):
    """DSPS: SSP with a staleness that is adapted during the run (FluentPS, section V-B).

    The paper names the idea and gives no rule. Ours follows the purpose of staleness, that few workers wait: every
    ``window`` ticks, s grows by one if more than a tenth of the window's pulls had to wait, and shrinks by one if there
    were pulls and none had to. In between it stays, so that s settles. Steps of one limit the cost of a slow spell.

    Attributes:
        staleness: the initial s, iterations; the same as SSP's.
        low: the least s; 0 is BSP.
        high: the most; 12 is the largest that the paper tries (Figure 9).
        window: ticks. With 10, a worker pulls ten times in a window, so a single delayed pull never raises s.
    """

    staleness: int = 3
    low: int = 0
    high: int = 12
    window: int = 10

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.staleness <= self.high:
            raise ValueError("low, staleness and high must satisfy 0 ≤ low ≤ staleness ≤ high")
        if self.window < 1:
            raise ValueError("window must be at least 1 tick")

    def init(self) -> State:
        return {"staleness": self.staleness, "ticks": 0, "pulls": 0, "delayed": 0}

    def may_pull(self, state: State, view: View, pull: Pull) -> bool:
        return bool(pull.progress < view.clock + state["staleness"])

    def ticked(self, state: State, view: View, pulls: int, delayed: int) -> State:
        staleness, ticks = state["staleness"], state["ticks"] + 1
        pulls, delayed = state["pulls"] + pulls, state["delayed"] + delayed
        if ticks < self.window:
            return {"staleness": staleness, "ticks": ticks, "pulls": pulls, "delayed": delayed}
        if 10 * delayed > pulls:
            staleness = min(self.high, staleness + 1)
        elif pulls and not delayed:
            staleness = max(self.low, staleness - 1)
        return {"staleness": staleness, "ticks": 0, "pulls": 0, "delayed": 0}


@final
@dataclass(frozen=True)
class Drop(SyncModel):
    """Drop stragglers: the first N_t pushes of an iteration advance the clock (Table III). progress < V_train.

    A late worker is answered at once, and its next iteration is that of the clock.

    Attributes:
        n: N_t, workers; all if fewer are living.
        late: ``drop`` drops a late push, as the paper does; ``add`` includes it in the next mean.
    """

    n: int
    late: str = "drop"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError("n must be at least 1 worker")
        if self.late not in ("drop", "add"):
            raise ValueError(f"late='{self.late}' is neither drop nor add")

    default_apply = Apply.TICK

    @property
    def drops_late(self) -> bool:
        return self.late == "drop"

    def may_pull(self, state: State, view: View, pull: Pull) -> bool:
        return pull.progress < view.clock

    def may_tick(self, state: State, view: View) -> bool:
        return view.pushed >= min(self.n, view.workers)


@final
@dataclass(frozen=True)
class ConstantPSSP(SyncModel):
    """Probabilistic SSP: a worker that is s or more ahead waits with a constant probability p (section III-E.1).

    A pull passes if its draw is not below p, so that p = 0 is ASP and p = 1 is SSP exactly (with Table III's >, a draw
    of 0 would wait in ASP).

    Attributes:
        staleness: s, iterations, from which on the draw decides.
        p: the probability that such a worker waits (c in the paper). Both defaults are those of the highest accuracy in
            Figure 10.
    """

    staleness: float = 3
    p: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "staleness", _staleness(self.staleness))
        if not 0 <= self.p <= 1:
            raise ValueError("p must be a probability, from 0 to 1")

    def may_pull(self, state: State, view: View, pull: Pull) -> bool:
        return pull.progress < view.clock + self.staleness or pull.draw >= self.p


@final
@dataclass(frozen=True)
class DynamicPSSP(SyncModel):
    """Probabilistic SSP whose probability grows with the lead k = progress − V_train (section III-E.2).

    P(s, k) = α / (1 + e^(s − k)) for k ≥ s, at most 1.

    Attributes:
        staleness: s, iterations, from which on the draw decides.
        alpha: α, a number from 0, or ``significance``: |g| / |w| of the worker's last push. With NaN, from a gradient
            that has diverged, the worker waits.
    """

    staleness: float
    alpha: float | Literal["significance"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "staleness", _staleness(self.staleness))
        if self.alpha != "significance" and not 0 <= self.alpha < math.inf:
            raise ValueError("alpha is a finite number from 0, or significance")

    @property
    def asks_significance(self) -> bool:
        return self.alpha == "significance"

    def probability(self, lead: int, significance: float) -> float:
        """Return P(s, k), the probability that a pull of a worker ``lead`` iterations ahead of the clock waits."""
        if lead < self.staleness:
            return 0.0
        alpha = significance if self.alpha == "significance" else self.alpha
        return min(1.0, alpha / (1 + math.exp(self.staleness - lead)))  # in this order NaN gives 1

    def may_pull(self, state: State, view: View, pull: Pull) -> bool:
        return pull.draw >= self.probability(pull.progress - view.clock, pull.significance)


@final
@dataclass(frozen=True)
class Hybrid(SyncModel):
    """From asynchronous to synchronous by a growing threshold on a gradient buffer (Hybrid Approach, Algorithm 1).

    A gradient enters the buffer, which makes one optimizer step as soon as it holds K gradients (step 2 (1)). The clock
    is the slowest worker's, and nothing waits for it. The paper can be read in three ways where a worker's gradient
    stays in the buffer:

    - By its words, the worker continues at once, with values that lack its gradient: "if the threshold has not been
      reached, continue with asynchronous updates ... might cause frequent stale reads" (step 2 (2), section 4). No
      worker ever waits, and one may have several gradients in the buffer. This is the default.
    - The worker waits until its gradient is applied (``wait``), as section 3 says of the synchronous approach: "each
      worker waits till updated parameters are not received". With K = N this is BSP exactly.
    - The gradient is an asynchronous update, too (``at_once``): "continue with asynchronous updates to the Parameter
      Server". It is applied when it comes and again with the buffer, except for the one that completes the buffer.

    The paper does not say how the gradients of a buffer are combined.

    Attributes:
        growth: gives K as a function of the number of gradients received; see :class:`~gossipx.parts.Growth`.
        wait: whether a pull waits until the worker's own gradients are applied.
        reduce: ``mean``, with which a step does not grow with K, or ``sum``, with which each gradient counts as much as
            in an asynchronous update.
        at_once: whether a gradient that stays in the buffer is applied at once, too.
    """

    growth: Growth = field(default_factory=Step)
    wait: bool = False
    reduce: Literal["mean", "sum"] = "mean"
    at_once: bool = False

    def __post_init__(self) -> None:
        if self.wait and self.at_once:
            raise ValueError("with at_once nothing is left to wait for: give wait or at_once")
        if self.reduce not in ("mean", "sum"):
            raise ValueError(f"reduce='{self.reduce}' is neither mean nor sum")

    default_apply = Apply.THRESHOLD

    @property
    def answers_by_condition(self) -> bool:
        return self.wait

    @property
    def applies_at_once(self) -> bool:
        return self.at_once

    @property
    def sums(self) -> bool:
        return self.reduce == "sum"

    @property
    def needs_rate(self) -> bool:
        return self.growth.needs_rate

    def resolved(self, learning_rate: float) -> Hybrid:
        return replace(self, growth=self.growth.resolved(learning_rate))

    def threshold(self, view: View) -> int:
        """Return K: the growth function's value, limited to the number of workers, as in the synchronous approach."""
        return max(1, min(self.growth.threshold(view.gradients), view.workers))

    def may_pull(self, state: State, view: View, pull: Pull) -> bool:
        return pull.applied or not self.wait

    def may_apply(self, state: State, view: View) -> bool:
        return view.buffered >= self.threshold(view)


def _pssp(staleness: float = 3, p: str = "", alpha: str = "") -> SyncModel:
    """Build either kind of PSSP from a spec's keys: p is for the constant one, alpha for the dynamic one."""
    if p and alpha:
        raise ValueError("p makes the probability constant, and alpha makes it dynamic: give one of them")
    if alpha == "significance":
        return DynamicPSSP(staleness, "significance")
    if alpha:
        return DynamicPSSP(staleness, _number(alpha, f"alpha='{alpha}' is neither a number nor significance"))
    return ConstantPSSP(staleness, _number(p, f"p='{p}' is not a number")) if p else ConstantPSSP(staleness)


def _hybrid(
    step: str = "",
    double: str = "",
    fixed: str = "",
    wait: bool = False,
    reduce: Literal["mean", "sum"] = "mean",
    at_once: bool = False,
) -> Hybrid:
    """Build the hybrid model from a spec's keys; by default, with the paper's growth function."""
    given: tuple[tuple[Callable[[str], Growth], str], ...] = ((Step, step), (Double, double), (_fixed, fixed))
    made = [make(text) for make, text in given if text]
    if len(made) > 1:
        raise ValueError("step, double and fixed are growth functions: give one of them")
    return Hybrid(made[0] if made else Step(), wait, reduce, at_once)


SYNC_MODELS: dict[str, Callable[..., SyncModel]] = {
    "bsp": BSP,
    "asp": ASP,
    "ssp": SSP,
    "dsps": DSPS,
    "drop": Drop,
    "pssp": _pssp,
    "hybrid": _hybrid,
}


def sync_model_from(spec: str | SyncModel) -> SyncModel:
    """Return the sync model for ``spec``.

    Args:
        spec: ``bsp``, ``asp``, ``ssp:staleness=3``, ``dsps:staleness=3,low=0,high=12,window=10``,
            ``drop:n=3,late=add``, ``pssp:staleness=3,p=0.5``, ``pssp:staleness=3,alpha=significance``,
            ``hybrid:step=5/lr,wait=false,reduce=mean,at_once=false`` (or ``double=`` or ``fixed=``); or a sync model.

    Raises:
        UsageError: naming a valid spec.
    """
    return spec if isinstance(spec, SyncModel) else specs.build(spec, SYNC_MODELS, "sync model")


def check(given: str) -> None:
    """Check one sync model, or one per shard separated by ``|``; raises UsageError as :func:`sync_model_from`."""
    for spec in given.split("|"):
        sync_model_from(spec)


def spec_of(model: SyncModel) -> str:
    """Return a built-in sync model as :func:`sync_model_from` reads it; a custom one by its name, for messages."""
    if isinstance(model, Conditions):
        names = (getattr(one, "__qualname__", type(one).__name__) for one in (model.pull, model.push))
        return f"conditions {' '.join(names)}"
    if isinstance(model, Hybrid):
        wait, reduce = ",wait=true" * model.wait, f",reduce={model.reduce}" * model.sums
        return f"hybrid:{model.growth.describe()}{wait}{reduce}{',at_once=true' * model.at_once}"
    if isinstance(model, ConstantPSSP | DynamicPSSP):
        return specs.text(model, "pssp")
    known: dict[object, str] = {kind: name for name, kind in SYNC_MODELS.items()}
    return specs.text(model, known.get(type(model), type(model).__name__))


def check_workers(model: SyncModel, workers: int) -> None:
    """Check that ``model`` differs from BSP with this number of workers, if it waits for a number of them.

    Raises:
        UsageError: it waits for all of them, or for more.
    """
    if isinstance(model, Drop) and model.n >= workers:
        raise UsageError(
            f"sync model '{spec_of(model)}' waits for all of {workers} worker{'s' * (workers > 1)}: give bsp, or a"
            " smaller n"
        )


def check_shards(model: SyncModel, shards: int) -> None:
    """Check that no worker could wait for the gradient buffer of one shard while others wait for that of another.

    Raises:
        UsageError: there are several shards, and pulls wait for a buffer.
    """
    if shards > 1 and model.answers_by_condition and model.default_apply is Apply.THRESHOLD:
        raise UsageError(
            f"with sync model '{spec_of(model)}' workers wait for a gradient buffer, and {shards} servers have one"
            " each, so that all may wait: give one server, or leave out wait=true"
        )


def chosen(kind: type[E], given: E | str, what: str) -> E:
    """Return the member of an enumeration that a user names; UsageError for an unknown ``what``."""
    if isinstance(given, str):
        specs.known_word(what, given, {one.value: one for one in kind})
    return kind(given)


def application(model: SyncModel, apply: Apply | str | None = None) -> Apply:
    """Return how gradients are applied under ``model``.

    Args:
        model: a sync model.
        apply: ``push``, ``each``, ``tick`` or ``threshold``; None: the model's default.

    Raises:
        UsageError: an unknown word, or one that does not suit the model.
    """
    if apply is None:
        return model.default_apply
    apply = chosen(Apply, apply, "way to apply gradients")
    by_threshold = model.default_apply is Apply.THRESHOLD
    if by_threshold and apply is not Apply.THRESHOLD:
        raise UsageError(f"sync model '{spec_of(model)}' applies gradients by its threshold, not '{apply.value}'")
    if apply is Apply.THRESHOLD and not by_threshold:
        raise UsageError(f"sync model '{spec_of(model)}' has no threshold: apply is one of push, each, tick")
    return apply


def _number(text: str, wrong: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(wrong) from None


def _staleness(value: float) -> float:
    """Return a valid staleness, as an integer if it is finite."""
    if math.isinf(value) and value > 0:
        return value
    if not (value >= 0 and float(value).is_integer()):
        raise ValueError("staleness counts iterations: a whole number from 0, or inf")
    return int(value)
