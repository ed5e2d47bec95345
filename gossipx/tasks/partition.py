"""Partitions of a data set among peers.

A split depends only on the labels, the number of parts and the seed. So each peer computes the same split and takes its
part without communication.
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

Indices = npt.NDArray[np.int64]

SMALLEST_ALPHA = 1e-6
"""The minimum of alpha. At this value each class already belongs to a single peer."""


def seeded(*numbers: int) -> np.random.RandomState:
    """Return a generator seeded by ``numbers`` (each modulo 2^64).

    It is a ``RandomState``, whose streams numpy guarantees to keep (NEP 19). Those of ``Generator`` may change between
    versions, and peers would then disagree on the partition of the samples.
    """
    words = [(number >> shift) & 0xFFFFFFFF for number in numbers for shift in (0, 32)]
    return np.random.RandomState(words)


@dataclass(frozen=True)
class DataPartition(abc.ABC):
    """A rule that distributes samples over parts.

    Attributes:
        by_label: whether the split depends on the labels, or only on their number.
    """

    by_label: ClassVar[bool] = False

    @abc.abstractmethod
    def split(self, labels: npt.NDArray[np.integer[Any]], parts: int, seed: int) -> list[Indices]:
        """Split the samples into disjoint parts that cover all of them.

        Args:
            labels: (N,), each sample's class.
            parts: number of parts, from 1.
            seed: determines the split.

        Returns:
            One ascending vector of indices into ``labels`` per part. No part is empty if N ≥ parts.

        Raises:
            UsageError: ``parts`` is below 1.
        """


@final
@dataclass(frozen=True)
class IID(DataPartition):
    """A random split into parts of equal size, give or take one."""

    def split(self, labels: npt.NDArray[np.integer[Any]], parts: int, seed: int) -> list[Indices]:
        _check_parts(parts)
        return [np.sort(part) for part in np.array_split(seeded(seed).permutation(len(labels)), parts)]


@final
@dataclass(frozen=True)
class Dirichlet(DataPartition):
    """A split with skewed classes: the proportions of each class are drawn from a symmetric Dirichlet distribution.

    The split is that of Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (2019),
    section 4: p_k ~ Dir(α) over the parts for each class k. α has the same meaning as in Hsu et al., "Measuring the
    Effects of Non-Identical Data Distribution" (2019), who draw class proportions for each part instead and keep the
    parts equal in size; here sizes differ, too. An empty part receives one sample of the part that is largest then.

    Attributes:
        alpha: concentration; near 0 each class belongs to one peer, and for large values all peers have the same
            proportions. The default 0.3 is clearly skewed, and still gives most peers several classes.
    """

    by_label: ClassVar[bool] = True
    alpha: float = 0.3

    def __post_init__(self) -> None:
        if not SMALLEST_ALPHA <= self.alpha < math.inf:
            raise ValueError(f"alpha must be a finite number above 0 (at least {SMALLEST_ALPHA:g})")

    def split(self, labels: npt.NDArray[np.integer[Any]], parts: int, seed: int) -> list[Indices]:
        _check_parts(parts)
        generator = seeded(seed)
        owned: list[list[Indices]] = [[] for _ in range(parts)]
        for label in np.unique(labels):
            members = generator.permutation(np.flatnonzero(labels == label))
            shares = _dirichlet(generator, self.alpha, parts)
            # Round the running sum instead of each share, so that no sample is lost or duplicated.
            cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
            for part, piece in zip(owned, np.split(members, cuts), strict=True):
                part.append(piece)
        return [np.sort(part) for part in _fill_empty([_join(pieces) for pieces in owned])]


@final
@dataclass(frozen=True)
class Contiguous(DataPartition):
    """Consecutive samples for each part, in the order of the data set, of equal number, give or take one.

    With text each peer has files of its own; a file at a border is cut.
    """

    def split(self, labels: npt.NDArray[np.integer[Any]], parts: int, seed: int) -> list[Indices]:
        _check_parts(parts)
        return np.array_split(np.arange(len(labels), dtype=np.int64), parts)


PARTITIONS: dict[str, type[DataPartition]] = {"iid": IID, "dirichlet": Dirichlet, "contiguous": Contiguous}


def partition_from(spec: str) -> DataPartition:
    """Parse a spec such as ``iid`` or ``dirichlet:alpha=0.3``.

    Raises:
        UsageError: the spec is invalid; the message lists valid ones.
    """
    return specs.build(spec, PARTITIONS, "partition")


def _dirichlet(generator: np.random.RandomState, alpha: float, parts: int) -> npt.NDArray[np.float64]:
    """Draw from Dir(α, ..., α), shape (parts,).

    It uses logarithms of gamma variates, log G(α) = log G(α + 1) + log(U)/α (Marsaglia and Tsang 2000, section 6),
    because for a small α the variates themselves are all 0, and numpy's ``dirichlet`` divides by their sum.
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
