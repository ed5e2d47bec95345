"""The settings of elastic SGD: a hub holds the centre, and the workers exchange their models with it."""

from __future__ import annotations

from collections.abc import Sequence

from gossipx.errors import UsageError
from gossipx.hub import ElasticSettings
from gossipx.settings.modes import Elastic
from gossipx.settings.sections import RunConfig
from gossipx.specs import rank_of

EASGD_BETA = 0.9
"""β of EASGD (Zhang et al.), which sets α = β/p for p workers."""


def elastic_settings(config: RunConfig, names: Sequence[str]) -> ElasticSettings | None:
    """Return the settings of elastic SGD; None if the run has no hub.

    Args:
        names: the names of all peers, by rank.

    Raises:
        UsageError: the hub is not a peer, nobody trains, or the centre would move past a worker's model.
    """
    hub = config.mode
    if not isinstance(hub, Elastic):
        return None
    rank = rank_of(hub.hub, "--hub", names)
    workers = len(names) - hub.hub_only
    if not workers:
        raise UsageError("--hub-only leaves no peer that trains: give more peers, or leave it out")
    alpha = EASGD_BETA / workers if hub.alpha is None else hub.alpha
    beta = workers * alpha if hub.beta is None else hub.beta
    if beta > workers:
        raise UsageError(f"--beta {beta:g} moves the centre past a worker's model: at most {workers}, 1 per worker")
    return ElasticSettings(rank, alpha, beta / workers, not hub.hub_only, hub.hub_lost)
