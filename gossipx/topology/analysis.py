"""What to expect of a topology under a schedule and weights, before anything is run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gossipx.errors import UsageError
from gossipx.topology.graphs import Topology
from gossipx.topology.schedules import DEFAULT, BandwidthAware, InnerOuter, InTurn, Schedule, parse
from gossipx.topology.weights import Matrix, Weights, all_shares, mixing_matrix

BETA = 0.5
"""The mixing's share that figures are for: Algorithm 2, line 5."""
TOLERANCE = 1e-3
"""Models count as equal when their distance from their mean is this part of what it was: one in a thousand is far below
what training moves them apart by between two rounds."""
ROUNDS = 10_000
"""Longest that consensus is waited for. Graphs that need more mix no better than none at all."""
LARGEST = 1024
"""Peers of the largest graph that is looked at: a matrix of them squared takes 8 MB, and its eigenvalues a second."""
WORK = 2**32
"""Values that are worked out for the rounds at most, peers squared in each: some 20 seconds. From 656 peers on, these
are fewer rounds than :data:`ROUNDS`."""
_EPSILON = 1e-9


@dataclass(frozen=True)
class Analysis:
    """Figures of one topology, schedule and weights. A round: every peer pulls once, all at the same time.

    Attributes:
        edges: pairs that may exchange; over a directed graph, edges.
        degree_min, degree_mean, degree_max: of neighbours that a peer turns to.
        strongly_connected: whether every peer's model can reach every other.
        spectral_gap: 1 − |λ₂| of the expected mixing matrix; 0: never agree, 1: at once.
        keeps_mean: whether the mean of all models stays what it is, in expectation.
        rounds_to_consensus: until the models' root mean square distance from their mean is ``tolerance`` of what it was
            with unrelated models; None: not within :func:`most_rounds`. If the schedule draws: in one such run.
        messages_per_round: models that cross between peers in a round, in the mean.
        nics: machines, with ``slots`` peers each.
        messages_per_nic: that enter or leave one machine in a round: mean over the machines, and the busiest.
        warnings: what a user should know, a line each.
    """

    topology: str
    schedule: str
    weights: Weights
    size: int
    directed: bool
    edges: int
    degree_min: int
    degree_mean: float
    degree_max: int
    strongly_connected: bool
    spectral_gap: float
    keeps_mean: bool
    rounds_to_consensus: int | None
    tolerance: float
    messages_per_round: float
    slots: int
    nics: int
    messages_per_nic: tuple[float, float]
    warnings: tuple[str, ...]

    def lines(self) -> list[tuple[str, str]]:
        """The figures in words, but for the warnings."""
        kind = "directed edges" if self.directed else "edges"
        rounds = self.rounds_to_consensus
        crossing, busiest = self.messages_per_nic
        return [
            ("peers", str(self.size)),
            (kind, str(self.edges)),
            ("neighbours: least, mean, most", f"{self.degree_min}, {self.degree_mean:.2f}, {self.degree_max}"),
            ("strongly connected", "yes" if self.strongly_connected else "no"),
            ("schedule", self.schedule),
            ("weights", self.weights),
            ("keeps the mean of all models", "yes" if self.keeps_mean else "no"),
            ("spectral gap of the mean mixing matrix", f"{self.spectral_gap:.4f}"),
            (
                f"rounds until models are equal to {self.tolerance:g}",
                f"more than {most_rounds(self.size)}" if rounds is None else str(rounds),
            ),
            ("models sent a round", f"{self.messages_per_round:.2f}"),
            (f"... in and out of a NIC (slots: {self.slots}), mean", f"{crossing:.2f}"),
            ("... in and out of the busiest NIC", f"{busiest:.2f}"),
        ]


def analyse(
    topology: Topology,
    schedule: str | None = None,
    weights: Weights = "uniform",
    slots: int = 1,
    tolerance: float = TOLERANCE,
    seed: int = 0,
) -> Analysis:
    """Compute the figures.

    Args:
        topology: connected or not.
        schedule: a spec; None: the topology's own, or the default.
        slots: peers a machine, on consecutive ranks; also the sites of a topology that has none.
        seed: of the draws.

    Raises:
        UsageError: more than :data:`LARGEST` peers, an unknown schedule, or weights that do not fit the graph.
    """
    size = topology.size
    check_size(size, f"topology '{topology.name}' has {size} peers")
    machines = [rank // slots for rank in range(size)]
    if not topology.sites and slots > 1:
        topology = replace(topology, sites=tuple(machines))
    plan = parse(schedule, topology)
    matrix = mixing_matrix(weights, plan, BETA)
    degrees = [len(others) for others in topology.neighbours]
    keeps_mean = bool(np.allclose(matrix.sum(0), 1.0, rtol=0, atol=_EPSILON))
    connected = len(topology.islands()) == 1
    traffic = traffic_of(plan)
    found = Analysis(
        topology=topology.name,
        schedule=schedule or topology.schedule or DEFAULT,
        weights=weights,
        size=size,
        directed=topology.directed,
        edges=sum(degrees) if topology.directed else sum(degrees) // 2,
        degree_min=min(degrees),
        degree_mean=sum(degrees) / size,
        degree_max=max(degrees),
        strongly_connected=connected,
        spectral_gap=spectral_gap(matrix),
        keeps_mean=keeps_mean,
        rounds_to_consensus=rounds_to_consensus(plan, weights, tolerance, seed),
        tolerance=tolerance,
        messages_per_round=float(traffic.sum()),
        slots=slots,
        nics=machines[-1] + 1,
        messages_per_nic=_per_machine(traffic, machines),
        warnings=(),
    )
    return replace(found, warnings=tuple(_warnings(found, plan)))


def check_size(size: int, what: str) -> None:
    """Refuse what would take minutes and more.

    Args:
        what: has so many peers, for the message.

    Raises:
        UsageError: they are more than :data:`LARGEST`.
    """
    if size > LARGEST:
        raise UsageError(
            f"{what}: at most {LARGEST} peers can be checked, as that takes memory by their square and time by their"
            " cube; a smaller graph of the kind tells as much"
        )


def most_rounds(size: int) -> int:
    """How many rounds of so many peers are carried out at most."""
    return min(ROUNDS, WORK // size**2)


def spectral_gap(matrix: Matrix) -> float:
    """1 − |λ₂| of a stochastic matrix [n, n], from 0 to 1: the larger, the faster all become equal."""
    moduli = np.sort(np.abs(np.linalg.eigvals(matrix)))[::-1]
    gap = 1.0 - float(moduli[1]) if len(moduli) > 1 else 1.0
    return gap if gap > _EPSILON else 0.0


def rounds_to_consensus(
    schedule: Schedule, weights: Weights = "uniform", tolerance: float = TOLERANCE, seed: int = 0
) -> int | None:
    """Rounds until all models are equal to ``tolerance``, by carrying the schedule's rounds out one after the other.

    The models begin as the unit vectors: after k rounds row i of X = W_k ⋯ W_1 is peer i's model, and what is left of
    the peers' root mean square distance from their mean (Eq. 8's) is ‖X − 1 x̄‖ / ‖I − J/n‖ (Frobenius). Of push-sum
    the de-biased models x / w.

    Returns:
        None if :func:`most_rounds` are not enough.
    """
    topology, size = schedule.topology, schedule.topology.size
    factors = all_shares(weights, schedule)
    pushes = weights == "push-sum"
    rng = random.Random(seed)
    masses = np.hstack([np.eye(size), np.ones((size, 1))]) if pushes else np.eye(size)
    beside = np.empty_like(masses)
    apart = beside[:, :size]
    begin = np.sqrt(max(size - 1, 1))
    for number in range(most_rounds(size) + 1):
        models = np.divide(masses[:, :-1], masses[:, -1:], out=apart) if pushes else masses
        np.subtract(models, models.mean(0), out=apart)
        if np.linalg.norm(apart) <= tolerance * begin:
            return number
        partners = [schedule.partner(rank, number, topology.neighbours[rank], rng, {}) for rank in range(size)]
        if pushes:
            _push(masses, partners, beside)
        else:
            _pull(masses, partners, factors, beside)
    return None


def _push(masses: Matrix, partners: Sequence[int | None], beside: Matrix) -> None:
    """A round of all masses [size, values], in which each peer gives half of its own to its partner.

    Args:
        beside: memory of the same size.
    """
    halves = np.divide(masses, 2, out=beside)
    for source, partner in enumerate(partners):
        if partner is not None:
            masses[source] -= halves[source]
            masses[partner] += halves[source]


def _pull(models: Matrix, partners: Sequence[int | None], factors: Sequence[dict[int, float]], beside: Matrix) -> None:
    """A round of all models [size, values], in which each peer takes a share of the model that its partner has.

    Args:
        beside: memory of the same size.
    """
    givers = [rank if partner is None else partner for rank, partner in enumerate(partners)]
    share = [0.0 if partner is None else BETA * factors[rank][partner] for rank, partner in enumerate(partners)]
    change = np.take(models, givers, 0, out=beside, mode="clip")  # "raise" would copy once more
    change -= models
    change *= np.array(share)[:, None]
    models += change


def traffic_of(schedule: Schedule) -> Matrix:
    """[size, size]: models that go from peer j (column) to peer i (row) in a round, in the mean."""
    size = schedule.topology.size
    traffic = np.zeros((size, size))
    for rank in range(size):
        for other, often in schedule.frequency(rank).items():
            traffic[rank, other] = often
    return traffic


def _per_machine(traffic: Matrix, machines: Sequence[int]) -> tuple[float, float]:
    of = np.array(machines)
    crossing = np.where(of[:, None] != of[None, :], traffic, 0.0)
    each = np.bincount(of, weights=crossing.sum(0) + crossing.sum(1))
    return float(each.mean()), float(each.max())


def _warnings(found: Analysis, schedule: Schedule) -> list[str]:
    told = []
    topology = schedule.topology
    if not found.strongly_connected:
        count = len(topology.islands())
        told.append(f"not strongly connected, in {count} parts that never become equal: a run refuses it")
    elif found.rounds_to_consensus is None:
        told.append(f"models are not equal within {most_rounds(found.size)} rounds")
    if not found.keeps_mean:
        told.append(_mean_lost(found))
    exponential = topology.generator == "exponential" and found.schedule == "one-peer"
    if isinstance(schedule, InTurn) and exponential and not _is_exact(schedule):
        told.append("a one-peer exponential schedule averages exactly only with base 2 and a power of two of peers")
    if isinstance(schedule, InnerOuter) and len(set(topology.sites)) < 2:
        told.append("one site only: inner-outer is random here; sites are those of --slots, or of the topology")
    if isinstance(schedule, BandwidthAware):
        told.append("as if all rates were equal: those of a run shift who is pulled from, and the mean with it")
    return told


def _mean_lost(found: Analysis) -> str:
    lost = f"with {found.weights} weights does not keep the mean: not all are pulled from as often as they pull"
    return f"a directed graph {lost}" if found.directed else f"this graph {lost}; --weights metropolis keeps it"


def _is_exact(schedule: InTurn) -> bool:
    """Whether one time through all turns leaves all models equal."""
    period = max(len(turns) for turns in schedule.turns)
    rounds = rounds_to_consensus(schedule, tolerance=_EPSILON)
    return rounds is not None and rounds <= period
