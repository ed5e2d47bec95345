"""How the threshold K of the hybrid sync model grows with the gradients that have come (Hybrid Approach, section 4).

The paper leaves the function open ("different monotonically increasing functions can also be used", section 9) and
uses the step function. One of your own is a subclass of :class:`Growth`.
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
    """K as a function of the gradients so far. The model never takes it as larger than the number of living workers."""

    @abc.abstractmethod
    def threshold(self, gradients: int) -> int:
        """K, at least 1, for the ``gradients``-th gradient (from 1, of complete pushes; see :class:`View`)."""

    @property
    def needs_rate(self) -> bool:
        """Whether it is written in terms of a learning rate that is not known yet."""
        return False

    def resolved(self, learning_rate: float) -> Growth:
        """The same with the learning rate put in."""
        return self

    def describe(self) -> str:
        """As the spec of the hybrid model names it; one's own, which has no spec, by its class."""
        return type(self).__name__


@final
@dataclass(frozen=True)
class Step(Growth):
    """K starts at 1 and grows by one every so many gradients: the step function of section 6.

    A function that grows linearly and is rounded down to whole gradients is this one.

    Attributes:
        every: gradients, or a text as ``"5/lr"``: so many times the reciprocal of the learning rate, as the paper
            gives its steps. Of those that it compares, 5/lr has the highest accuracy and lowest loss (Table 4).
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
    """K starts at 1 and doubles every so many gradients: most of the run is asynchronous, and the switch is short.

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
    """The same K always: 1 is asynchronous, the number of workers or more is synchronous."""

    gradients: int

    def __post_init__(self) -> None:
        if self.gradients < 1:
            raise ValueError("fixed counts gradients and is at least 1")

    def describe(self) -> str:
        return f"fixed={self.gradients}"

    def threshold(self, gradients: int) -> int:
        return self.gradients


def fixed(text: str) -> Fixed:
    """What ``text`` means, a whole number.

    Raises:
        ValueError: naming what would have been right.
    """
    if not text.isdecimal():
        raise ValueError(f"fixed='{text}' is not a number of gradients, as 4")
    return Fixed(int(text))


def _period(name: str, every: int | str) -> int | str:
    """A number of gradients, or a multiple of the learning rate's reciprocal, in the one way it is spelt."""
    if isinstance(every, str) and every.isdecimal():
        every = int(every)
    if isinstance(every, int):
        if every < 1:
            raise ValueError(f"{name} counts gradients and is at least 1")
        return every
    try:
        times = float(every.removesuffix(_OVER_RATE)) if every.endswith(_OVER_RATE) else math.nan
    except ValueError:
        times = math.nan
    if not 0 < times < math.inf:
        raise ValueError(f"{name}='{every}' is neither a number of gradients, as 500, nor a multiple of 1/lr, as 5/lr")
    return f"{int(times) if times.is_integer() else times}{_OVER_RATE}"


def _put_in(every: int | str, learning_rate: float) -> int:
    if isinstance(every, int):
        return every
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"a step of {every} needs a learning rate above 0, not {learning_rate}")
    return max(1, round(float(every.removesuffix(_OVER_RATE)) / learning_rate))


def _periods(every: int | str, gradients: int) -> int:
    """Whole periods before the ``gradients``-th gradient: the first ``every`` gradients see none."""
    if isinstance(every, str):
        raise ValueError(f"a step of {every} is not resolved: call resolved(learning_rate) first")
    return max(0, gradients - 1) // every
