"""Sections: all tensors of one dtype in a flat vector, and the single passes over it.

The passes run on the training stream, over the *values* of a section. A model that is trained in 16 bits has float32
*masters*: bfloat16 keeps 8 significant bits, float16 11. The share of a small difference is less than half of the last
bit and would be lost in each mix, so models would stop converging to each other while still apart. So such a model's
values are also kept in float32, where differences and averages are computed, and the module gets them rounded.

The optimizer changes the module's tensors, not the masters. The new master is then the tensor's value plus what
rounding had left out of the old master, provided that it rounds to the tensor's value: the optimizer's result is never
altered. A pass first updates the masters from the tensors, or afterwards writes them back. Models of other dtypes need
no masters and have no such cost.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossipx.memory import PIECE
from gossipx.model import kernels
from gossipx.model.kernels import Update

ALIGNMENT = 64
"""Bytes: every tensor starts on a cache line."""


class TensorKind(enum.IntEnum):
    """The kinds of tensors, in the order of the layout; their names in lower case stand in the manifest."""

    TRAINABLE = 0
    MIXED = 1
    FROZEN = 2
    LOCAL = 3


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in the layout.

    Attributes:
        start: index of its first element in its section's vector; tied tensors share one place.
    """

    name: str
    tensor: Tensor
    kind: TensorKind
    start: int

    @property
    def end(self) -> int:
        """Index at which the next tensor may begin."""
        step = ALIGNMENT // self.tensor.dtype.itemsize
        return self.start + -(-self.tensor.numel() // step) * step

    def line(self, masters: bool) -> str:
        """Return its line of the manifest; ``masters``: it is exchanged in float32."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        shape = "x".join(map(str, self.tensor.shape)) or "scalar"
        strides = "x".join(map(str, self.tensor.stride())) or "-"
        exchanged = f"{dtype} as float32" if masters else dtype
        return f"{self.name} {exchanged} {shape} strides {strides} {self.kind.name.lower()}"


@dataclass
class Section:
    """All tensors of one dtype.

    Attributes:
        storage: flat vector on the module's device; the module's tensors lie in its memory.
        values: vector that is measured, exchanged and mixed: the storage itself, or its float32 masters for training in
            16 bits.
        trainable: number of leading elements that are trained.
        mixed: number of leading elements that a retrieval exchanges.
    """

    storage: Tensor
    values: Tensor
    trainable: int
    mixed: int

    def part(self, start: int, stop: int) -> Section:
        """Return a range of the values that a retrieval exchanges, as views of the same memory."""
        storage = self.storage[start:stop]
        values = storage if self.values is self.storage else self.values[start:stop]
        return Section(storage, values, min(max(self.trainable - start, 0), stop - start), stop - start)

    # --- masters ----------------------------------------------------------------------------------------------------

    def update_masters(self) -> None:
        """Update the masters of exchanged values from the module's tensors."""
        if self.values is not self.storage:
            cut, end = self.trainable, self.mixed
            kernels.follow(self.storage[:cut], self.values[:cut])
            self.values[cut:end].copy_(self.storage[cut:end])

    def write_back(self, whole: bool = False) -> None:
        """Round the masters into the module's tensors: the exchanged values, or all."""
        if self.values is not self.storage:
            end = len(self.storage) if whole else self.mixed
            with torch.no_grad():
                self.storage[:end].copy_(self.values[:end])

    # --- passes -----------------------------------------------------------------------------------------------------

    def copy(self, to: Tensor) -> None:
        """Copy the exchanged values as they are now."""
        self.update_masters()
        kernels.copy(self.values[: self.mixed], to)

    def advance(self, before: Tensor, after: Tensor, on_device: bool) -> float | Tensor:
        """Copy the section's boundary to ``after``; return its Δ_t²."""
        self.update_masters()
        cut, end = self.trainable, self.mixed
        past = before[:cut]
        measure = kernels.advance_on_device if on_device else kernels.advance
        squared = measure(self.values[:cut], past, past if after is before else after[:cut])
        after[cut:].copy_(self.values[cut:end])
        return squared

    def sampled(self, sample: kernels.Sampled, on_device: bool) -> float | Tensor:
        """Return an estimate of Δ_t² of a section; the module's tensors serve as well as their masters here."""
        x = self.storage[: self.trainable]
        return sample.advance_on_device(x) if on_device else sample.advance(x)

    def subtract(self, received: Tensor, host_copy: Tensor | None, base: Tensor | None) -> float:
        """x_j ← x_j − base for trained values; return ‖x_j − base‖₂². ``host_copy`` receives a copy of the result.

        Args:
            base: in host memory; None: x.
        """
        cut = self.trainable
        own = self.values[:cut]
        if base is not None:
            cut = len(base)
            own = base.to(received.device)
        squared = kernels.difference(received[:cut], own, received[:cut])
        if host_copy is not None:
            host_copy[:cut].copy_(received[:cut])
        return squared

    def commit(self, change: Tensor, share: float, boundary: Tensor | None) -> None:
        """Add a share of the changes to trained values, and move buffers towards those of another model.

        Args:
            change: as in :meth:`gossipx.model.arena.Fragment.commit`.
            boundary: receives a copy of the result; None: no copy.
        """
        cut = self.trainable
        kernels.commit(self.values[:cut], change[:cut], share, None if boundary is None else boundary[:cut])
        self._commit_buffers(change, share, boundary)
        self.write_back()

    def commit_outer(
        self,
        change: Tensor,
        share: float,
        boundary: Tensor | None,
        own: Tensor,
        kept: Sequence[Tensor],
        update: Update,
    ) -> None:
        """Like :func:`commit`, with an outer optimizer, which leaves its result for trained values in ``change``.

        Args:
            own, kept, update: as in :func:`gossipx.model.kernels.apply_outer`.
        """
        cut = self.trainable
        kernels.apply_outer(self.values[:cut], own[:cut], change[:cut], kept, update, share)
        if boundary is not None:
            kernels.copy(self.values[:cut], boundary[:cut])
        self._commit_buffers(change, share, boundary)
        self.write_back()

    def _commit_buffers(self, received: Tensor, share: float, boundary: Tensor | None) -> None:
        cut, end = self.trainable, self.mixed
        if cut < end:
            own, other = self.values[cut:end], received[cut:end]
            as_is = (own == other) | ~own.isfinite()
            own.copy_(torch.where(as_is, own, own + share * (other - own)))
            if boundary is not None:
                boundary[cut:].copy_(own)

    def apply_merged(
        self, mean: Tensor, captured: Tensor, boundary: Tensor | None, kept: Sequence[Tensor], update: Update
    ) -> None:
        """x ← mean + (x − captured) for trained values; finite buffers become the mean's; ``boundary`` gets a copy.

        Args:
            kept, update: an outer optimizer as in :func:`gossipx.model.kernels.apply_outer`, which changes ``mean``.
        """
        cut, end = self.trainable, self.mixed
        kernels.apply_outer(self.values[:cut], captured[:cut], mean[:cut], kept, update)
        own = self.values[cut:end]
        own.copy_(torch.where(own.isfinite(), mean[cut:end], own))
        self.write_back()
        if boundary is not None:
            boundary.copy_(self.values[:end])

    def merge(self, received: Tensor, captured: Tensor, a: float, b: float) -> tuple[float, float]:
        """x_j ← a · h + b · x_j; return ‖x_j − h‖₂² as it was, of the trained values and of the buffers.

        Args:
            received: x_j, in host memory.
            captured: h.
        """
        cut = self.trainable
        trained = 0.0
        pieces = (torch.split(vector[:cut], PIECE // vector.itemsize) for vector in (received, captured))
        for x, h in zip(*pieces, strict=True):
            trained += kernels.squared_norm(x - h)
            x.mul_(b).add_(h * a)
        x, h = received[cut : self.mixed], captured[cut : self.mixed]
        as_is = (x == h) | ~h.isfinite()
        others = kernels.squared_norm((x - h).masked_fill(kernels.same(x, h), 0))
        x.copy_(torch.where(as_is, h, b * x + a * h))
        return trained, others

    def adopt(self, model: Tensor) -> None:
        """Replace the values by those of a model, whole or only the exchanged part."""
        self.values[: len(model)].copy_(model)
        self.write_back(whole=len(model) > self.mixed)

    def sampler(self, slots: list[Slot], seed: int) -> kernels.Sampled:
        """Return the sampler for :func:`sampled` of a section that was laid out from ``slots``."""
        trained = [slot for slot in slots if slot.kind is TensorKind.TRAINABLE]
        small = [slot for slot in trained if 0 < slot.tensor.numel() < kernels.SMALL]
        ranges = [(slot.start, slot.start + slot.tensor.numel()) for slot in small]
        return kernels.Sampled(self.storage[: self.trainable], seed, ranges)
