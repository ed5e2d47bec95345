"""Growth functions of the hybrid sync model: its threshold K by the number of gradients (Hybrid Approach, section 4).

The paper leaves the function open ("different monotonically increasing functions can also be used", section 9) and uses
the step function. For a custom one, inherit from :class:`Growth`.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import final

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


@final
@dataclass(frozen=True)
class Step(Growth):
    """K starts at 1 and grows by one after every ``every`` gradients: the step function of section 6.

    A linear function, rounded down to whole gradients, is the same.

    Attributes:
        every: a number of gradients, or a text such as ``"5/lr"``, a multiple of the learning rate's reciprocal as in
            the paper. Of those that it compares, 5/lr has the highest accuracy and lowest loss (Table 4).
    """

    every: int | str = "5" + _OVER_RATE

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", _period("step", self.every))

    @property
    def needs_rate(self) -> bool:
        return isinstance(self.every, str)

    def resolved(self, learning_rate: float) -> Step:
        return Step(_put_in(self.every, learning_rate))

    def describe(self) -> str:
        return f"step={self.every}"

    def threshold(self, gradients: int) -> int:
        return 1 + _periods(self.every, gradients)


@final
@dataclass(frozen=True)
class Double(Growth):
    """K starts at 1 and doubles after every ``every`` gradients: most of the run is asynchronous, and the switch is
    short.

    Attributes:
        every: as for :class:`Step`.
    """

    every: int | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", _period("double", self.every))

    @property
    def needs_rate(self) -> bool:
        return isinstance(self.every, str)

    def resolved(self, learning_rate: float) -> Double:
        return Double(_put_in(self.every, learning_rate))

    def describe(self) -> str:
        return f"double={self.every}"

    def threshold(self, gradients: int) -> int:
        return 1 << min(_periods(self.every, gradients), _MOST_DOUBLINGS)


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


def fixed(text: str) -> Fixed:
    """Parse a whole number.

    Raises:
        ValueError: naming a valid value.
    """
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


def _put_in(every: int | str, learning_rate: float) -> int:
    if isinstance(every, int):
        return every
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"a step of {every} needs a learning rate above 0, not {learning_rate}")
    return max(1, round(float(every.removesuffix(_OVER_RATE)) / learning_rate))


def _periods(every: int | str, gradients: int) -> int:
    """Return the whole periods before the ``gradients``-th gradient: 0 for the first ``every`` gradients."""
    if isinstance(every, str):
        raise ValueError(f"a step of {every} is not resolved: call resolved(learning_rate) first")
    return max(0, gradients - 1) // every
