"""Policies: rules that decide after each iteration whether a peer begins an exchange of models, usually a pull.

A policy is an immutable value with explicit, plain state: ``init() -> state`` and
``decide(state, observation) -> (pull, state)``. The :class:`~gossipx.sync.SyncManager` collects all measurements that a
policy may use in an :class:`Observation`, so the built-in policies are one-line rules without state. A custom policy is
a subclass of :class:`Policy` or a function ``observation -> bool``.

A *retrieval* is an exchange in which this peer mixes another peer's model into its own. A *wave* is an exchange in
which all peers average their models; any peer may begin it, and the others join. In this module, the *last retrieval*
is the last exchange that this peer began or agreed to, or the last wave that it joined. Counters restart when it begins
for this peer; if it fails, they continue as before. Models that other peers push do not restart them.

Sections, figures, equations and algorithms are those of the paper *Adaptive Communication*; x is the vector of trained
weights and t the iteration.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

from gossipx import specs
from gossipx.errors import UsageError
from gossipx.specs import plugins

State = Any
"""Plain data that a checkpoint can hold: None, numbers, strings, and lists and dicts of them."""


@dataclass(frozen=True)
class Observation:
    """The measurements on which a policy decides after iteration ``step``.

    Before the first retrieval, the quantities since the last retrieval count from step 0.

    Attributes:
        step: t, the number of finished iterations, at least 1.
        delta: Δ_t = ‖x_t − x_{t−1}‖₂, the length of the last optimizer step (Eq. 6).
        delta_at_retrieval: Δ_r, the delta when the request of the last retrieval was sent; 0 before the first.
        travelled: the sum of all deltas since the last retrieval, up to and including Δ_t.
        drift_measured: :attr:`drift`; None unless the policy has ``uses_drift``.
        silence: number of iterations since the last retrieval, up to and including t.
        shared: whether the last retrieval was a wave or a pair, which may have been begun by another peer.
        uniform: a random number in [0, 1), drawn for this iteration from the peer's seeded generator.
    """

    step: int
    delta: float
    delta_at_retrieval: float
    travelled: float
    drift_measured: float | None
    silence: int
    uniform: float
    shared: bool = False

    @property
    def difference(self) -> float:
        """The difference of delta, ``|Δ_t − Δ_r|`` (section V-B)."""
        return abs(self.delta - self.delta_at_retrieval)

    @property
    def drift(self) -> float:
        """‖x_t − x_r‖₂, the distance covered by the peer's own steps since the last retrieval.

        Raises:
            UsageError: the policy does not have ``uses_drift``.
        """
        if self.drift_measured is None:
            raise UsageError(
                "the policy reads observation.drift, which is not measured for it, as that costs memory for a model:"
                " set uses_drift = True on the function or class"
            )
        return self.drift_measured


@dataclass(frozen=True)
class Policy(abc.ABC):
    """A rule that decides after each iteration whether to pull.

    Attributes:
        warmup: number of iterations at the start in which the peer does not pull, whatever the policy decides.
        max_silence: number of iterations without a retrieval after which the peer pulls in any case; 0: no limit.
        uses_drift: whether the policy reads ``Observation.drift``. Measuring it costs one pass over the model per step,
            and memory for one more copy of the model. A function has it as an attribute.
        depends_on_model: whether it depends on the model when the policy fires, so that it may never do so.
    """

    warmup: int = field(default=0, kw_only=True)
    max_silence: int = field(default=0, kw_only=True)
    uses_drift: ClassVar[bool] = False
    depends_on_model: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.max_silence < 0:
            raise ValueError("warmup and max_silence count iterations and are not negative")

    def init(self) -> State:
        """Return the policy's state before the first iteration."""
        return None

    @abc.abstractmethod
    def decide(self, state: State, observation: Observation) -> tuple[bool, State]:
        """Return whether to pull now, and the next state."""

    def explain(self, observation: Observation) -> str:
        """Return, for messages, what the policy compares: the measured value, and its threshold if it has one."""
        return f"the delta is {observation.delta:.3g}"


@final
@dataclass(frozen=True)
class Never(Policy):
    """Never pull: each peer trains alone. This is gossiping SGD with τ = ∞ (Figure 6)."""

    depends_on_model: ClassVar[bool] = False

    def decide(self, state: State, observation: Observation) -> tuple[bool, State]:
        return False, state


@final
@dataclass(frozen=True)
class Tau(Policy):
    """Pull every τ iterations: when τ divides t (Algorithm 2, line 3).

    After a wave or a pair, count τ iterations from that instead, on all peers that took part. Peers are at different
    iterations, so with the first rule each would begin waves at its own multiples of τ.

    Attributes:
        period: τ.
    """

    period: int
    depends_on_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 1:
            raise ValueError("period must be at least 1 iteration")

    def decide(self, state: State, observation: Observation) -> tuple[bool, State]:
        counted = observation.silence if observation.shared else observation.step
        return counted % self.period == 0, state


@final
@dataclass(frozen=True)
class Random(Policy):
    """Pull with probability ``p`` after each iteration (section IV: "a probability distribution")."""

    p: float
    depends_on_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.p <= 1:
            raise ValueError("p must be a probability, from 0 to 1")

    def decide(self, state: State, observation: Observation) -> tuple[bool, State]:
        return observation.uniform < self.p, state


@final
@dataclass(frozen=True)
class Adaptive(Policy):
    """Pull when the difference of delta exceeds a threshold: ``|Δ_t − Δ_r| > threshold`` (section V-B).

    The spec ``adaptive`` without a threshold is a relative one, see :data:`FRACTION`. Section IV may also be read as a
    threshold on Δ_t itself: the "difference of local model" of this iteration and the last.

    Attributes:
        threshold: a length in the space of weights; the paper uses 0.025, 0.02 and 0.01 (section VI).
        relative: whether ``threshold`` is a fraction of Δ_r instead.
        of: what is compared with it: the ``difference`` of delta, or ``delta`` itself.
    """

    threshold: float
    relative: bool = False
    of: str = "difference"

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_zero("threshold", self.threshold)
        if self.of not in ("difference", "delta"):
            raise ValueError("of is difference (of delta, section V-B) or delta (section IV)")

    def decide(self, state: State, observation: Observation) -> tuple[bool, State]:
        measured = observation.delta if self.of == "delta" else observation.difference
        return measured > self._limit(observation), state

    def _limit(self, observation: Observation) -> float:
        return self.threshold * (observation.delta_at_retrieval if self.relative else 1.0)

    def explain(self, observation: Observation) -> str:
        difference = "" if self.of == "delta" else f" and its difference {observation.difference:.3g}"
        return f"{super().explain(observation)}{difference}, the threshold {self._limit(observation):.3g}"


FRACTION = 0.75
"""Threshold of ``adaptive`` without one, as a fraction of Δ_r. An absolute one fits only models and learning rates
whose steps are about as long as the paper's: the steps of a small model under Adam may never differ by 0.02. Δ also
varies from batch to batch, with plain SGD and batches of 32 often by a half of Δ_r, and rarely by more than 0.75."""
MAX_SILENCE = 100
"""The ``max_silence`` of ``adaptive`` without a threshold: a tenth of the pulls of ``tau:10``, the paper's reference.
If the length of the steps hardly changes, as with Adam and a constant learning rate, the rule alone never fires."""


def _adaptive(
    threshold: float | None = None,
    relative: bool | None = None,
    of: str = "difference",
    *,
    warmup: int = 0,
    max_silence: int | None = None,
) -> Adaptive:
    """Build ``adaptive`` from a spec's keys: the paper's rule with a threshold, else one that suits any model."""
    if threshold is not None:
        return Adaptive(threshold, bool(relative), of, warmup=warmup, max_silence=max_silence or 0)
    if of == "delta":
        raise ValueError("delta itself exceeds a threshold: give threshold=")
    if relative is False:
        raise ValueError("no absolute threshold suits every model: give threshold=")
    return Adaptive(FRACTION, True, of, warmup=warmup, max_silence=MAX_SILENCE if max_silence is None else max_silence)


@final
@dataclass(frozen=True)
class Travel(Policy):
    """Pull when the deltas since the last retrieval add up to more than ``distance``: the length of the path of x."""

    distance: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_zero("distance", self.distance)

    def decide(self, state: State, observation: Observation) -> tuple[bool, State]:
        return observation.travelled > self.distance, state

    def explain(self, observation: Observation) -> str:
        return (
            f"{super().explain(observation)} and the deltas add up to {observation.travelled:.3g} of {self.distance:g}"
        )


@final
@dataclass(frozen=True)
class Drift(Policy):
    """Pull when ‖x_t − x_r‖₂ exceeds ``distance``.

    This is how far the peer's own steps have moved it in total since the last retrieval. Unlike the path of
    :class:`Travel`, it does not grow when steps cancel each other.
    """

    distance: float
    uses_drift: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_zero("distance", self.distance)

    def decide(self, state: State, observation: Observation) -> tuple[bool, State]:
        return observation.drift > self.distance, state

    def explain(self, observation: Observation) -> str:
        return f"{super().explain(observation)} and the drift {observation.drift:.3g} of {self.distance:g}"


CREDIT = 4.0
"""Exchanges that ``auto`` may spend in advance, after its first: a small part of any budget."""
ROUNDING = 1e-9
"""Relative error of sums of deltas; without it, a model that moves evenly might exchange one iteration late."""


@final
@dataclass(frozen=True)
class Auto(Policy):
    """Spend a budget of exchanges where the model moves most. It needs no length in the units of the weights.

    After t iterations the peer has earned b · t exchanges, and has had n. The policy fires when the distance travelled
    since the last one exceeds S / (b · t) · exp((n + 1 − b · t) / G), with S the whole distance travelled so far: the
    average distance per earned exchange, more where the budget is overdrawn, and less where it is not used. A model
    that moves evenly exchanges every 1/b iterations. One that moves more now than on average exchanges more often, up
    to G exchanges in advance; :data:`CREDIT` is G. The first exchange comes after 1/b iterations in any case, since
    until then the model has no other distance to be compared with.

    Attributes:
        budget: b, as a share of exchanging in every iteration: ``1%`` or 0.01.
    """

    budget: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self._share <= 1:
            raise ValueError("budget is a share of all iterations, above 0% and up to 100%")

    @property
    def _share(self) -> float:
        text = self.budget.strip()
        try:
            return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            return math.nan

    def init(self) -> State:
        return [0, 0, 0.0]  # iterations, exchanges, S

    def decide(self, state: State, observation: Observation) -> tuple[bool, State]:
        iterations, exchanges, length = state
        exchanges += observation.silence == 1 and iterations > 0  # also those that other peers have begun
        iterations, length = iterations + 1, length + observation.delta
        earned = self._share * iterations
        ahead = exchanges + 1 - earned  # if the policy fires now
        limit = length / earned * math.exp(ahead / CREDIT) * (1 - ROUNDING)
        return ahead <= CREDIT and 0 < limit <= observation.travelled, [iterations, exchanges, length]

    def most(self, iterations: int) -> int:
        """Return the greatest number of exchanges that the policy begins in a run of this length."""
        return math.floor(self._share * iterations + CREDIT)

    def explain(self, observation: Observation) -> str:
        return f"{super().explain(observation)} and the deltas add up to {observation.travelled:.3g}"


@final
@dataclass(frozen=True)
class FunctionPolicy(Policy):
    """A custom policy without state: pull when ``function(observation)`` is true.

    The function may have the attribute ``uses_drift``, with the meaning that it has for :class:`Policy`.
    """

    function: Callable[[Observation], bool]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "uses_drift", bool(getattr(self.function, "uses_drift", False)))

    def decide(self, state: State, observation: Observation) -> tuple[bool, State]:
        return bool(self.function(observation)), state


BUILT_IN: dict[str, Callable[..., Policy]] = {
    "never": Never,
    "tau": Tau,
    "random": Random,
    "adaptive": _adaptive,
    "travel": Travel,
    "drift": Drift,
    "auto": Auto,
}
ENTRY_POINT_GROUP = "gossipx.policies"


def parse(spec: str | Policy | Callable[[Observation], bool]) -> Policy:
    """Return the policy that ``spec`` names.

    Args:
        spec: a name with arguments, such as ``tau:10``, ``adaptive:threshold=0.02`` or
            ``travel:distance=2,max_silence=500``; a policy; or a function. Installed packages add names by entry points
            of the group ``gossipx.policies``.

    Raises:
        UsageError: the name, a key or a value is not valid; the message lists the valid ones.
    """
    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, type) or not (isinstance(spec, str) or callable(spec)):
        what = f"the class {spec.__name__}" if isinstance(spec, type) else f"one of type {type(spec).__name__}"
        raise UsageError(f"policy: a spec such as 'tau:10', a policy or a function is required, not {what}")
    if callable(spec):
        return FunctionPolicy(spec)
    if is_object(spec):
        raise UsageError(
            f"the policy is the {spec} of a script, which no setting can name: pass it as gossipx.join(policy=...) or"
            " sync_manager=..., or give another --policy"
        )
    built = plugins.build(spec, BUILT_IN, ENTRY_POINT_GROUP, "policy")
    if isinstance(built, Policy):
        return built
    if callable(built):
        return FunctionPolicy(built)
    raise UsageError(f"policy '{spec}': its entry point returns a {type(built).__name__}, not a policy or a function")


def complete(spec: str) -> str:
    """Return the spec with the values that its policy chooses itself: ``adaptive`` without a threshold has some."""
    if is_object(spec):
        return spec
    policy = parse(spec)
    return describe(policy) if isinstance(policy, Adaptive) else spec


def check(spec: str) -> None:
    """Check the spec or the name of a policy: a bare name may take its arguments from the model's preset.

    Raises:
        UsageError: as :func:`parse`. A custom policy is refused only as the run begins, if no script passes it.
    """
    if is_object(spec):
        return
    if ":" in spec:
        parse(spec)
    elif spec.strip() not in BUILT_IN:
        specs.known_word("policy", spec.strip(), names())


def names() -> dict[str, Callable[..., Any]]:
    """Return all policies by name: the built-in ones and those of installed packages, which are not imported yet."""
    return plugins.names(BUILT_IN, ENTRY_POINT_GROUP)


def describe(policy: Policy) -> str:
    """Return the spec of a policy; for a custom one, the name of its function or class, as :func:`is_object` knows it.

    Such as ``function mine`` or ``object Late:period=10``.
    """
    if isinstance(policy, FunctionPolicy):
        return f"function {getattr(policy.function, '__qualname__', type(policy.function).__name__)}"
    names: dict[object, str] = {**{kind: name for name, kind in BUILT_IN.items()}, Adaptive: "adaptive"}
    return specs.text(policy, names.get(type(policy), f"object {type(policy).__name__}"))


def is_object(spec: str) -> bool:
    """Return whether ``spec`` is the description of a policy that a script passed as an object or a function."""
    return spec.startswith(("function ", "object "))


def _at_least_zero(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{name} is a length in the units of the weights, a finite number of at least 0")
