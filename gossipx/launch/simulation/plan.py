"""The common part of all peers of a simulated run: settings, schedule, network, times, and the layout of servers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gossipx import policies
from gossipx.assembly.graph import build_schedule
from gossipx.assembly.server import Parts, server_plan
from gossipx.errors import UsageError
from gossipx.hub import rank_of_hub
from gossipx.policies import Never, Observation, Random, Tau
from gossipx.protocol.messages import WHOLE
from gossipx.server import placement
from gossipx.server.placement import Layouts, Table
from gossipx.server.plan import ServerPlan, server_ranks
from gossipx.settings.modes import Elastic, Server, Waves
from gossipx.settings.scenario import MANY, NetworkSettings, Scenario
from gossipx.settings.sections import RunConfig
from gossipx.sim import Network, traces
from gossipx.sim.compute import StepTimes, sigma_from
from gossipx.sim.network import FULL_PACKET, PRESETS
from gossipx.sim.traffic import FORWARD, Segment, Sizes
from gossipx.specs import known_word
from gossipx.tasks import costs
from gossipx.topology.schedules import Schedule
from gossipx.transports.pace import parse_rate

FLOAT = 4
"""Bytes of a value; models are float32."""


@dataclass(frozen=True)
class Plan:
    """A simulated run.

    Attributes:
        config: its settings, with presets filled in.
        names: names of the peers, by rank.
        schedule: the exchange schedule.
        hub: the rank of the hub; None: the run has none.
        times: the seconds of iterations.
        assembled: whether peers begin without announcements.
        parts: custom parts of a parameter server.
    """

    scenario: Scenario
    config: RunConfig
    names: Sequence[str]
    schedule: Schedule
    hub: int | None
    times: StepTimes
    assembled: bool
    parts: Parts

    @property
    def size(self) -> int:
        """Number of peers."""
        return len(self.names)

    @property
    def late(self) -> dict[int, float]:
        """When the peers start that are late, in seconds, by rank."""
        return {rank: fault.at for fault in self.scenario.faults if fault.kind == "late" for rank in fault.ranks}


def plan_of(scenario: Scenario, config: RunConfig, parts: Parts) -> Plan:
    """Return the plan of a scenario.

    Args:
        config: its settings, with presets filled in.
        parts: custom parts of a parameter server.

    Raises:
        UsageError: settings exclude each other.
    """
    of, given, net = scenario.simulation, scenario.compute, scenario.network
    if of.work == "traffic":
        _check_traffic(scenario, config)
    if given.forward is not None and not (of.work == "traffic" and isinstance(config.mode, Server)):
        raise UsageError("forward is for traffic around servers: leave it out")
    names = [f"peer-{rank:0{max(2, len(str(of.peers - 1)))}d}" for rank in range(of.peers)]
    sigma, seconds = sigma_from(given.spread), given.seconds
    if seconds is None:
        assert of.model is not None
        seconds = costs.STEP_SECONDS[of.model]
    stragglers, delays = (given.straggler_share, given.straggler_factor), (given.delay_share, given.delay_deviation)
    times = StepTimes.drawn(of.peers, seconds, sigma, stragglers, delays, config.run.seed)
    sites = [f"site {rank * net.sites // of.peers}" for rank in range(of.peers)] if net.sites > 1 else []
    announced = of.peers <= MANY if of.announcements is None else of.announcements
    needed = isinstance(config.mode, Server | Elastic) or config.sync.finish != "none"
    if not announced and needed:
        if of.announcements is False:
            raise UsageError("announcements = false is for gossip and waves without a finish: leave it out")
        announced = True
    schedule = build_schedule(config, of.peers, sites)
    hub = rank_of_hub(config.mode, names)
    return Plan(scenario, config, names, schedule, hub, times, not announced, parts)


def _check_traffic(scenario: Scenario, config: RunConfig) -> None:
    """Refuse what needs the values of a model."""
    of, has_servers, values = scenario.simulation, isinstance(config.mode, Server), config.values
    policy = policies.parse(values["policy"])
    assert of.model is not None
    known_word("model", of.model, costs.published())
    if scenario.compute.seconds is None and of.model not in costs.STEP_SECONDS:
        raise UsageError(f"the time of an iteration of {of.model} is not known: give seconds in [compute]")
    if policy.uses_drift and not has_servers:
        raise UsageError(f"{config.decides} measures drift, which traffic does not have: give another policy")
    if of.parameters is not None and has_servers:
        raise UsageError("servers hold the tensors of a model, and parameters has none: leave it out")
    coded = any(values[name] != "none" for name in ("codec", "push_codec", "pull_codec"))
    if coded and of.encoded is None:
        raise UsageError("a codec's ratio depends on values: give encoded, the size of what it sends as a share of raw")
    if not coded and of.encoded is not None:
        raise UsageError("encoded is for runs with a codec: give codec, push_codec or pull_codec, or leave it out")
    if has_servers and (of.deltas is not None or of.retrievals is not None):
        raise UsageError("deltas and retrievals are for exchanges between peers, not for servers: leave them out")
    by_deltas = of.retrievals is None and not has_servers and not isinstance(policy, Never | Tau | Random)
    if by_deltas and of.deltas is None:
        raise UsageError(f'{config.decides} decides on deltas: name a trace of them, such as deltas = "lenet"')
    if of.deltas is not None and not by_deltas:
        raise UsageError("deltas are for a policy that decides on them, such as adaptive or travel: leave them out")
    if of.retrievals is not None and max(of.retrievals) > config.run.iterations:
        most = f"an iteration has one retrieval at most, and there are {config.run.iterations}"
        raise UsageError(f"retrievals has {max(of.retrievals):g}: {most}")
    if of.retrievals is not None and config.is_given("policy"):
        raise UsageError("retrievals are given instead of a policy: leave one out")
    if part := next((number for number in of.retrievals or () if number % 1), None):
        raise UsageError(f"retrievals has {part:g}: give whole numbers")
    if len(set(of.retrievals or ())) > 1 and isinstance(config.mode, Waves):
        raise UsageError("retrievals differ, and all peers take part in a wave: give one number")
    if scenario.churn.state == "kept" or any(fault.state == "kept" for fault in scenario.faults):
        raise UsageError('state = "kept" is for real work, which has checkpoints: leave it out')


def network_of(net: NetworkSettings, peers: int, seed: int) -> Network:
    """Return the network of a scenario; ``seed`` draws which peers have slower links."""
    values = dict(PRESETS[net.preset])
    lossy = net.loss if net.loss is not None else values.pop("loss", 0.0)
    values.pop("loss", None)
    share = FULL_PACKET[0] / FULL_PACKET[1]
    up, down = (values["bandwidth"] if rate is None else parse_rate(rate) for rate in (net.up, net.down))
    for name, own in (("delay", net.latency), ("jitter", net.jitter)):
        if own is not None:
            values[name] = own
    links = dict.fromkeys(range(peers), (up * share, down * share)) if up != down else {}
    for rank in random.Random(f"network {seed}").sample(range(peers), round(peers * net.slow_share)):
        links[rank] = up * share / net.slow_factor, down * share / net.slow_factor
    return Network(
        bandwidth=up * share,
        delay=values["delay"],
        jitter=values.get("jitter", 0.0),
        links=links,
        sites=[rank * net.sites // peers for rank in range(peers)] if net.sites > 1 else (),
        far=net.site_latency,
        uplink=None if net.uplink is None else parse_rate(net.uplink) * share,
        uneven=net.uneven,
        per_message=net.per_message,
        lossy=lossy,
    )


# --- traffic --------------------------------------------------------------------------------------


def sizes_of(plan: Plan) -> Sizes:
    """Return the bytes of the model of a run of work ``traffic``."""
    of, config = plan.scenario.simulation, plan.config
    assert of.model is not None
    values = of.parameters or sum(count for _, count in costs.published_sizes(of.model))
    fragments = config.values["fragments"]
    raw = {WHOLE: values * FLOAT}
    if fragments > 1:
        raw.update({number: round(values * FLOAT / fragments) for number in range(1, fragments + 1)})
    return Sizes(raw, 1.0 if of.encoded is None else of.encoded)


def served_of(plan: Plan) -> tuple[ServerPlan, Sizes] | None:
    """Return the plan of a parameter server for work ``traffic``, and the bytes; None: the run has none."""
    config, of, mode = plan.config, plan.scenario.simulation, plan.config.mode
    ranks = server_ranks(config, plan.names)
    if ranks is None or not isinstance(mode, Server):
        return None
    assert of.model is not None
    tables = costs.multiply_adds(of.model)
    layouts = Layouts(
        [Table(cost.name, cost.elements) for cost in tables],
        plan.parts.placement or placement.placement_from(mode.placement),
        lambda table: ("float32", FLOAT),
        mode.bucket,
    )
    made = server_plan(config, mode, layouts, ranks, plan.size, config.task.lr, plan.parts)
    encoded = 1.0 if of.encoded is None else of.encoded
    pushed, pulled = (1.0 if codec == "none" else encoded for codec in (mode.push_codec, mode.pull_codec))
    segments = []
    for shard, (placed, cut) in enumerate(zip(made.layout.placed, made.layout.cut, strict=True)):
        for number, bucket in enumerate(cut):
            held = placed[bucket.first : bucket.stop]
            nbytes = sum(one.stop - one.start for one in held) * FLOAT
            cost = sum(tables[one.table].share * (one.stop - one.start) / tables[one.table].elements for one in held)
            first = min(one.table for one in held)
            sizes = nbytes, round(nbytes * pushed), round(nbytes * pulled)
            segments.append((first, Segment((shard, number), *sizes, cost)))
    ordered = [segment for _, segment in sorted(segments, key=lambda item: (item[0], item[1].place))]
    whole = sum(cost.elements for cost in tables) * FLOAT
    forward = FORWARD if plan.scenario.compute.forward is None else plan.scenario.compute.forward
    return made, Sizes({WHOLE: whole}, 1.0, ordered, mode.wait_free, forward)


def deltas_of(plan: Plan) -> Callable[[int], Callable[[int], float]]:
    """Return, by rank, the function that returns Δ_t, given t."""
    name = plan.scenario.simulation.deltas
    if name is None:
        return lambda rank: lambda step: 0.0
    trace = traces.load(name)
    return lambda rank: lambda step: trace.delta(rank, step)


def policy_of(plan: Plan, rank: int) -> Any:
    """Return a policy that fires as often as the scenario says; None: the configured one."""
    wanted = plan.scenario.simulation.retrievals
    if wanted is None:
        return None
    iterations, number = plan.config.run.iterations, wanted[rank % len(wanted)]

    def fires(observation: Observation) -> bool:
        steps = observation.step - 1, observation.step
        before, due = (math.floor(step * number / iterations + 0.5) for step in steps)
        return due > before

    return fires


def incarnation_of(plan: Plan, rank: int, number: int) -> int:
    """Return what distinguishes a process of a peer from its others."""
    return random.Random(f"incarnation {plan.config.run.seed} {rank} {number}").getrandbits(48)
