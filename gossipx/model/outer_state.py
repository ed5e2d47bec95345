"""The vectors that an outer optimizer keeps between exchanges, on the module's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gossipx.model.layout import Section
from gossipx.model.streams import DeviceStreams

Update = Callable[[Tensor, Tensor, Sequence[Tensor]], None]
"""``update(own, mixed, kept)``, in place; see :class:`gossipx.outer.Outer`."""


def unchanged(own: Tensor, mixed: Tensor, kept: Sequence[Tensor]) -> None:
    """Leave the result of an exchange as it is: no outer optimizer."""


class OuterRule(Protocol):
    """The part of :class:`gossipx.outer.Outer` that works on vectors."""

    @property
    def vectors(self) -> int:
        """Number of vectors that it keeps."""

    @property
    def from_start(self) -> bool:
        """Whether it begins with the common initial model."""

    @property
    def begin(self) -> Update:
        """The update at the first exchange."""

    @property
    def step(self) -> Update:
        """The update at every other exchange."""


class OuterState:
    """One peer's outer optimizer with its state, used by the arena. Memory is allocated when it is first needed.

    Args:
        rule: the outer optimizer.
        sections: sections of the module.
        streams: work queues of its device.

    Attributes:
        begun: whether the kept vectors hold values.
    """

    def __init__(self, rule: OuterRule, sections: Sequence[Section], streams: DeviceStreams):
        self.begun = False
        self._rule = rule
        self._sections = sections
        self._streams = streams
        self._kept: list[list[Tensor]] = []  # by section

    @property
    def update(self) -> Update:
        """The update of the next exchange."""
        return self._rule.step if self.begun else self._rule.begin

    @property
    def kept(self) -> list[list[Tensor]]:
        """The kept vectors, of trained values only, by section."""
        if not self._kept:
            for section in self._sections:
                like = section.values[: section.trainable]
                self._kept.append([self._streams.empty_like(like) for _ in range(self._rule.vectors)])
        return self._kept

    def start(self, is_initial: bool) -> None:
        """Forget the earlier exchanges, because the weights were replaced.

        Args:
            is_initial: whether they are now the initial model, which is the same on all peers.
        """
        self.begun = is_initial and self._rule.from_start
        if self.begun:
            for section, kept in zip(self._sections, self.kept, strict=True):
                model = section.values[: section.trainable]
                self._streams.train(lambda model=model, kept=kept: self._rule.begin(model, model, kept))  # type: ignore[misc]

    def vectors(self) -> list[Tensor]:
        """Return the kept vectors, for a checkpoint; empty before the first exchange."""
        return [vector for kept in self._kept for vector in kept] if self.begun else []

    def load(self, vectors: Sequence[Tensor]) -> None:
        """Restore what :meth:`vectors` returned, on a peer with the same rule and layout."""
        self.begun = bool(vectors)
        if vectors:
            kept = [vector for of_section in self.kept for vector in of_section]
            for vector, saved in zip(kept, vectors, strict=True):
                with torch.no_grad():
                    vector.copy_(saved)
