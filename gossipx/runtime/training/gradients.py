"""A watch over gradients between backward and the optimizer's step.

A gradient that is sent during backward must still be the same at the optimizer's step. Clipping, noise and GradScaler
change gradients in between, and not all of them are seen by torch's version counter: GradScaler is not, nor is a change
of ``gradient.data``. So the watch compares fingerprints.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 8
"""Bytes of a fingerprint's words: the largest integers that torch adds."""


class Change(enum.Enum):
    """A change of gradients after backward."""

    NONE = "nothing"
    WRITTEN = "one was written to, but holds the same values, as after a clip whose limit was not exceeded"
    VALUES = "the values of one changed, or it was removed"


class GradientWatch:
    """The gradients of an iteration as they were when backward had computed them.

    Attributes:
        taken: by table, the fingerprint and torch's version counter.
    """

    def __init__(self) -> None:
        self.taken: dict[int, tuple[Tensor, int]] = {}

    def take(self, table: int, gradient: Tensor) -> None:
        """Note a table's gradient as it is now."""
        self.taken[table] = fingerprint(gradient), gradient._version

    def changed(self, tables: Sequence[torch.nn.Parameter]) -> tuple[Change, int]:
        """Return what happened to the gradients since they were taken, and to the gradient of which table first.

        Args:
            tables: the parameters of all tables.
        """
        now = {table: tables[table].grad for table in self.taken}
        kept = {table: gradient for table, gradient in now.items() if gradient is not None}
        if len(kept) < len(now):
            return Change.VALUES, next(table for table in now if table not in kept)
        if not kept:
            return Change.NONE, -1
        # One comparison for all tables, since each one of tensors on a GPU would wait for the GPU.
        before = torch.stack([self.taken[table][0] for table in kept])
        after = torch.stack([fingerprint(gradient) for gradient in kept.values()])
        for table, differs in zip(kept, (before != after).tolist(), strict=True):
            if differs:
                return Change.VALUES, table
        for table, gradient in kept.items():
            if gradient._version != self.taken[table][1]:
                return Change.WRITTEN, table
        return Change.NONE, -1


def fingerprint(gradient: Tensor) -> Tensor:
    """Return the sum of a dense tensor's bits modulo 2^64, a tensor without dimensions on the same device.

    A sum of integers is exact: a change of one value always changes it, which is not so for a sum of floats.
    """
    flat = gradient.detach().reshape(-1).contiguous()  # reshape keeps the stride of a vector
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.storage_offset() * flat.element_size() % WORD:
        flat = flat.clone()
    rest = flat.numel() % (WORD // flat.element_size())
    whole = flat.numel() - rest
    words = flat[:whole].view(torch.int64)
    total = words.sum() + flat[whole:].view(torch.uint8).sum()
    if flat.element_size() == WORD:  # the sum loses the signs, the highest bits, of an even number of values
        total = total + (words < 0).sum()
    return total
