"""The builder of a peer's role, of real and of simulated peers."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

from gossipx import mixing, policies
from gossipx.hub import ElasticExchange
from gossipx.peer import PeerRole
from gossipx.peer.exchange import Exchange, PeerContext
from gossipx.peer.pulls import PullExchange
from gossipx.policies import Policy
from gossipx.protocol.fields import JoinedPeer
from gossipx.server.mode import ServerMode
from gossipx.server.plan import ServerPlan
from gossipx.settings.modes import Elastic, Pushes
from gossipx.settings.sections import RunConfig
from gossipx.sync import SyncManager
from gossipx.topology import weights
from gossipx.topology.schedules import Schedule
from gossipx.transports.pace import parse_rate

SLOWEST = 1.25e6
"""Bytes/s (10 Mbit/s) of the slowest supported network; it sets the timeout of the first model that a peer requests."""
MODEL_SLACK = 2.0
"""Factor on that timeout, since a link may be shared."""


def build_role(
    config: RunConfig,
    rank: int,
    size: int,
    schedule: Schedule,
    *,
    model_bytes: int,
    incarnation: int,
    why_closed: str,
    policy: Policy | None = None,
    hub: int | None = None,
    server_plan: ServerPlan | None = None,
    joined: Sequence[JoinedPeer] = (),
    sync_manager: Callable[[Policy, int], SyncManager] = SyncManager,
) -> PeerRole:
    """Return the role of a peer.

    Args:
        size: the number of peers that begin the run.
        schedule: the exchange schedule.
        model_bytes: size of the model.
        incarnation: distinguishes this process from an earlier one of the same rank.
        why_closed: why no peer can join the run while it is in progress; empty: one can.
        policy: a custom policy; None: the configured one.
        hub: the rank of the hub; None: the run has none.
        server_plan: the plan of the parameter server; None: the run has none.
        joined: the peers that have joined the run while it was in progress.
        sync_manager: makes the SyncManager, given the policy and a seed: a script may have its own, and a simulated
            peer its own policy.
    """
    values = config.values
    # Workers of a parameter server push and pull in every iteration: no policy decides.
    policy = policies.parse("never") if server_plan else policy or policies.parse(values["policy"])
    # Each peer has its own random numbers; only the split of the data is the same on all.
    rng = random.Random(f"peer {config.run.seed} {rank}")
    # A peer that joins later has no place in the graph, so it mixes all models by the same share.
    shares = (
        {}
        if rank >= size
        else weights.shares(values["weights"], schedule, rank, pushed=isinstance(config.mode, Pushes))
    )
    return PeerRole(
        rank=rank,
        size=size,
        sync=sync_manager(policy, rng.getrandbits(64)),
        topology=schedule.topology,
        rng=rng,
        incarnation=incarnation,
        mixing=mixing.mixing_from(values["mixing"]),
        settings=config,
        schedule=schedule,
        shares=shares,
        exchange_of=_exchange_of(config, hub, server_plan),
        joined=joined,
        model_timeout=MODEL_SLACK * model_bytes / min(SLOWEST, max_rate(config) or SLOWEST),
        why_closed=why_closed,
    )


def max_rate(config: RunConfig) -> float | None:
    """Return the maximum rate at which models are sent over a network, in bytes/s; None: no limit."""
    given = config.exchange.max_rate
    return None if given is None else parse_rate(given)


def _exchange_of(
    config: RunConfig, hub: int | None, server_plan: ServerPlan | None
) -> Callable[[PeerContext, PullExchange], Exchange] | None:
    """Return the factory of the exchange of a run with a hub or servers; None: the run has neither."""
    if server_plan is not None:
        return functools.partial(ServerMode, plan=server_plan)
    if hub is None:
        return None
    assert isinstance(config.mode, Elastic)
    return functools.partial(ElasticExchange, settings=config.mode, hub=hub)
