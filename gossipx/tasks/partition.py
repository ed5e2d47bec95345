"""Partitions: which samples belong to which peer.

A split depends on the labels, the number of parts and the seed alone, so that every peer computes the same one and
takes its own part, without a message.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt

from gossipx import specs
from gossipx.errors import UsageError
from gossipx.tasks.seeds import seeded

Indices = npt.NDArray[np.int64]

SMALLEST_ALPHA = 1e-6
"""Below it nothing differs any more: each class lies whole on one peer."""


@dataclass(frozen=True)
class Partition(abc.ABC):
    """Deals samples out to parts.

    Attributes:
        by_label: whether the labels matter, or only how many there are.
    """

    by_label: ClassVar[bool] = False

    @abc.abstractmethod
    def split(self, labels: npt.NDArray[np.integer[Any]], parts: int, seed: int) -> list[Indices]:
        """The parts: disjoint, together every sample.

        Args:
            labels: (N,), each sample's class.
            parts: how many, from 1.
            seed: fixes the split.

        Returns:
            One ascending vector of indices into ``labels`` for each part. None is empty if N ≥ parts.

        Raises:
            UsageError: ``parts`` is below 1.
        """


@final
@dataclass(frozen=True)
class IID(Partition):
    """Shuffle and deal out evenly: sizes differ by one at most."""

    def split(self, labels: npt.NDArray[np.integer[Any]], parts: int, seed: int) -> list[Indices]:
        _check_parts(parts)
        return [np.sort(part) for part in np.array_split(seeded(seed).permutation(len(labels)), parts)]


@final
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Skewed classes: each class is dealt out by proportions of its own, drawn from a symmetric Dirichlet distribution.

    The split is that of Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (2019),
    section 4: p_k ~ Dir(α) over the parts for each class k. α reads as in Hsu et al., "Measuring the Effects of
    Non-Identical Data Distribution" (2019), who draw class proportions for each part instead and keep the parts equal
    in size; here their sizes differ too. A part that came out empty gets one sample of the part that is largest by
    then.

    Attributes:
        alpha: concentration; towards 0 each class lies on one peer, towards infinity all peers have all alike. 0.3 is
            skewed clearly, and still gives most peers several classes.
    """

    by_label: ClassVar[bool] = True
    alpha: float = 0.3

    def __post_init__(self) -> None:
        if not SMALLEST_ALPHA <= self.alpha < math.inf:
            raise ValueError(f"alpha is a finite number above 0 (at least {SMALLEST_ALPHA:g})")

    def split(self, labels: npt.NDArray[np.integer[Any]], parts: int, seed: int) -> list[Indices]:
        _check_parts(parts)
        generator = seeded(seed)
        owned: list[list[Indices]] = [[] for _ in range(parts)]
        for label in np.unique(labels):
            members = generator.permutation(np.flatnonzero(labels == label))
            shares = _dirichlet(generator, self.alpha, parts)
            # Cuts of the running sum and not of each share: rounding then neither loses nor doubles a sample.
            cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
            for part, piece in zip(owned, np.split(members, cuts), strict=True):
                part.append(piece)
        return [np.sort(part) for part in _fill_empty([_join(pieces) for pieces in owned])]


PARTITIONS: dict[str, type[Partition]] = {"iid": IID, "dirichlet": Dirichlet}


def parse(spec: str) -> Partition:
    """The partition that ``spec`` means: ``iid`` or ``dirichlet:alpha=0.3``.

    Raises:
        UsageError: naming what would have been right.
    """
    return specs.build(spec, PARTITIONS, "partition")


def _dirichlet(generator: np.random.RandomState, alpha: float, parts: int) -> npt.NDArray[np.float64]:
    """One draw of Dir(α, ..., α), (parts,).

    By logarithms of gamma variates, log G(α) = log G(α + 1) + log(U)/α (Marsaglia and Tsang 2000, section 6): the
    variates themselves are all 0 for a small α, and numpy's own ``dirichlet`` divides by their sum.
    """
    logs = np.log(generator.standard_gamma(alpha + 1.0, parts)) + np.log1p(-generator.random_sample(parts)) / alpha
    weights = np.exp(logs - logs.max())
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares


def _join(pieces: list[Indices]) -> Indices:
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def _fill_empty(parts: list[Indices]) -> list[Indices]:
    for index, part in enumerate(parts):
        if not len(part):
            largest = max(range(len(parts)), key=lambda other: len(parts[other]))
            if len(parts[largest]) < 2:
                break
            parts[index], parts[largest] = parts[largest][-1:], parts[largest][:-1]
    return parts


def _check_parts(parts: int) -> None:
    if parts < 1:
        raise UsageError(f"a partition needs at least one part, not {parts}")
