"""The analysis of a topology with a schedule and weights, before a run: traffic, spectral gap, rounds to consensus."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gossipx.errors import UsageError
from gossipx.topology.graphs import Topology
from gossipx.topology.schedules import DEFAULT, BandwidthAware, InnerOuter, InTurn, Schedule, schedule_from
from gossipx.topology.weights import Matrix, Weights, all_shares, mixing_matrix

BETA = 0.5
"""The mixing share β of the analysis (*Adaptive Communication*, Algorithm 2, line 5)."""
TOLERANCE = 1e-3
"""Models count as equal when their distance from their mean has fallen to this fraction, which is far less than the
distance that training adds between two rounds."""
ROUNDS = 10_000
"""Maximum number of simulated rounds. A graph that needs more hardly mixes at all."""
LARGEST = 1024
"""Peers of the largest graph that is analysed: its matrix takes 8 MB, and its eigenvalues a second."""
WORK = 2**32
"""Maximum number of values computed in all simulated rounds, size² per round: about 20 seconds. From 656 peers on, this
allows fewer rounds than :data:`ROUNDS`."""
_EPSILON = 1e-9


@dataclass(frozen=True)
class Analysis:
    """Properties of one topology, schedule and weights.

    In a round every peer pulls once (with push-sum: pushes once), all at the same time.

    Attributes:
        edges: number of undirected edges; in a directed graph, of directed ones.
        degree_min, degree_mean, degree_max: number of neighbours (out-degree) of a peer.
        strongly_connected: whether every peer's model can reach every other peer.
        spectral_gap: 1 − |λ₂| of the expected mixing matrix; 0: models never agree; 1: they agree after one round.
        keeps_mean: whether the expected mean of all models is constant.
        rounds_to_consensus: rounds until the models' root mean square distance from their mean falls to ``tolerance``
            times its initial value, from unrelated models; None: more than :func:`most_rounds`. For a random schedule,
            the result of one simulation.
        messages_per_round: expected number of models sent between peers in a round.
        nics: number of machines, with ``slots`` peers each.
        messages_per_nic: expected number of models that enter or leave a machine in a round: mean and maximum.
        warnings: warnings for the user, one line each.
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
        """Return all properties but the warnings as pairs of a label and a value."""
        kind = "directed edges" if self.directed else "edges"
        rounds = self.rounds_to_consensus
        crossing, busiest = self.messages_per_nic
        return [
            ("peers", str(self.size)),
            (kind, str(self.edges)),
            ("neighbours: min, mean, max", f"{self.degree_min}, {self.degree_mean:.2f}, {self.degree_max}"),
            ("strongly connected", "yes" if self.strongly_connected else "no"),
            ("schedule", self.schedule),
            ("weights", self.weights),
            ("keeps the mean of all models", "yes" if self.keeps_mean else "no"),
            ("spectral gap of the mean mixing matrix", f"{self.spectral_gap:.4f}"),
            (
                f"rounds until models are equal to {self.tolerance:g}",
                f"more than {most_rounds(self.size)}" if rounds is None else str(rounds),
            ),
            ("models sent per round", f"{self.messages_per_round:.2f}"),
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
    """Analyse a topology.

    Args:
        topology: connected or not.
        schedule: a spec; None: the topology's own, or the default.
        weights: the weights of the edges.
        slots: number of peers per machine, with consecutive ranks; the machines are also the sites of a topology
            without sites.
        tolerance: fraction of the initial distance at which models count as equal.
        seed: seeds the random draws.

    Raises:
        UsageError: more than :data:`LARGEST` peers, an unknown schedule, or weights that do not fit the graph.
    """
    size = topology.size
    check_graph_size(size, f"topology '{topology.name}' has {size} peers")
    machines = [rank // slots for rank in range(size)]
    if not topology.sites and slots > 1:
        topology = replace(topology, sites=tuple(machines))
    plan = schedule_from(schedule, topology)
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


def check_graph_size(size: int, what: str) -> None:
    """Refuse a graph whose analysis would take minutes or longer; ``what`` begins the message and names the graph.

    Raises:
        UsageError: there are more than :data:`LARGEST` peers.
    """
    if size > LARGEST:
        raise UsageError(
            f"{what}: at most {LARGEST} peers can be checked, since time grows with their cube;"
            " check a smaller graph of the same kind"
        )


def most_rounds(size: int) -> int:
    """Return the maximum number of rounds to simulate with ``size`` peers."""
    return min(ROUNDS, WORK // size**2)


def spectral_gap(matrix: Matrix) -> float:
    """Return 1 − |λ₂| of a stochastic matrix [n, n], from 0 to 1; a larger gap means faster consensus."""
    moduli = np.sort(np.abs(np.linalg.eigvals(matrix)))[::-1]
    gap = 1.0 - float(moduli[1]) if len(moduli) > 1 else 1.0
    return gap if gap > _EPSILON else 0.0


def rounds_to_consensus(
    schedule: Schedule, weights: Weights = "uniform", tolerance: float = TOLERANCE, seed: int = 0
) -> int | None:
    """Simulate a schedule and return the number of rounds until all models are equal within ``tolerance``.

    The initial models are the unit vectors: after k rounds row i of X = W_k ⋯ W_1 is peer i's model. The remaining
    fraction of the peers' root mean square distance from their mean (*Adaptive Communication*, Eq. 8) is
    ‖X − 1 x̄‖ / ‖I − J/n‖, with Frobenius norms and J the matrix of ones. For push-sum, X holds the de-biased models
    x / w.

    Returns:
        None if more than :func:`most_rounds` are needed.
    """
    topology, size = schedule.topology, schedule.topology.size
    factors = all_shares(weights, schedule)
    pushes = weights == "push-sum"
    rng = random.Random(seed)
    # For push-sum, a last column holds the weights w.
    masses = np.hstack([np.eye(size), np.ones((size, 1))]) if pushes else np.eye(size)
    scratch = np.empty_like(masses)
    deviations = scratch[:, :size]
    initial_norm = np.sqrt(max(size - 1, 1))
    for number in range(most_rounds(size) + 1):
        models = np.divide(masses[:, :-1], masses[:, -1:], out=deviations) if pushes else masses
        np.subtract(models, models.mean(0), out=deviations)
        if np.linalg.norm(deviations) <= tolerance * initial_norm:
            return number
        partners = [schedule.partner(rank, number, topology.neighbours[rank], rng, {}) for rank in range(size)]
        if pushes:
            _push(masses, partners, scratch)
        else:
            _pull(masses, partners, factors, scratch)
    return None


def _push(masses: Matrix, partners: Sequence[int | None], scratch: Matrix) -> None:
    """Simulate a push round on the masses [size, values]: each peer sends half of its mass to its partner."""
    halves = np.divide(masses, 2, out=scratch)
    for source, partner in enumerate(partners):
        if partner is not None:
            masses[source] -= halves[source]
            masses[partner] += halves[source]


def _pull(models: Matrix, partners: Sequence[int | None], factors: Sequence[dict[int, float]], scratch: Matrix) -> None:
    """Simulate a pull round on the models [size, values]: each peer mixes in a share of its partner's model."""
    sources = [rank if partner is None else partner for rank, partner in enumerate(partners)]
    pairs = zip(factors, partners, strict=True)
    share = [0.0 if partner is None else BETA * factor.get(partner, 1.0) for factor, partner in pairs]
    change = np.take(models, sources, 0, out=scratch, mode="clip")  # "raise" would make another copy
    change -= models
    change *= np.array(share)[:, None]
    models += change


def traffic_of(schedule: Schedule) -> Matrix:
    """Return [size, size]: the expected number of models that peer i (row) pulls from peer j (column) in a round."""
    size = schedule.topology.size
    traffic = np.zeros((size, size))
    for rank in range(size):
        for other, often in schedule.frequency(rank).items():
            traffic[rank, other] = often
    return traffic


def _per_machine(traffic: Matrix, machines: Sequence[int]) -> tuple[float, float]:
    machine_of = np.array(machines)
    crossing = np.where(machine_of[:, None] != machine_of[None, :], traffic, 0.0)
    each = np.bincount(machine_of, weights=crossing.sum(0) + crossing.sum(1))
    return float(each.mean()), float(each.max())


def _warnings(found: Analysis, schedule: Schedule) -> list[str]:
    warnings = []
    topology = schedule.topology
    if not found.strongly_connected:
        count = len(topology.islands())
        warnings.append(f"not strongly connected: {count} parts never become equal, and a run refuses the graph")
    elif found.rounds_to_consensus is None:
        warnings.append(f"models are not equal within {most_rounds(found.size)} rounds")
    if not found.keeps_mean:
        warnings.append(_mean_lost(found))
    exponential = topology.generator == "exponential" and found.schedule == "one-peer"
    if isinstance(schedule, InTurn) and exponential and not _is_exact(schedule):
        warnings.append("a one-peer exponential schedule averages exactly only with base 2 and 2^k peers")
    if isinstance(schedule, InnerOuter) and len(set(topology.sites)) < 2:
        warnings.append("only one site, so inner-outer is the same as random: set --slots, or sites in the topology")
    if isinstance(schedule, BandwidthAware):
        warnings.append("assumes equal rates: in a run, measured rates change the frequency of pulls, and the mean")
    return warnings


def _mean_lost(found: Analysis) -> str:
    lost = f"with {found.weights} weights does not keep the mean: some peers are not pulled from as often as they pull"
    return f"a directed graph {lost}" if found.directed else f"this graph {lost}; --weights metropolis keeps it"


def _is_exact(schedule: InTurn) -> bool:
    """Return whether one period of the schedule makes all models equal."""
    period = max(len(turns) for turns in schedule.turns)
    rounds = rounds_to_consensus(schedule, tolerance=_EPSILON)
    return rounds is not None and rounds <= period
