"""How workers and a hub go together."""

from __future__ import annotations

from collections.abc import Sequence

from gossipx.config.settings import HubSettings, RunConfig
from gossipx.errors import UsageError
from gossipx.hub import ElasticSettings
from gossipx.specs import rank_of

EASGD_BETA = 0.9
"""β of Zhang et al., whose α is β/p."""


def elastic_settings(config: RunConfig, names: Sequence[str]) -> ElasticSettings | None:
    """How workers and the hub go together; None: there is no hub.

    Args:
        names: of all peers, by rank.

    Raises:
        UsageError: a hub that is no peer, or settings that do not go with one.
    """
    hub, usual = config.hub, HubSettings()
    if hub.hub is None:
        for name in ("hub_only", "alpha", "beta", "hub_lost"):
            if getattr(hub, name) != getattr(usual, name):
                raise UsageError(f"--{name.replace('_', '-')} is of a hub: name it by --hub, or leave this out")
        return None
    rank = rank_of(hub.hub, "--hub", names)
    workers = len(names) - hub.hub_only
    if not workers:
        raise UsageError("--hub-only leaves no peer that trains: give more peers, or leave it out")
    alpha = EASGD_BETA / workers if hub.alpha is None else hub.alpha
    beta = workers * alpha if hub.beta is None else hub.beta
    if beta > workers:
        raise UsageError(f"--beta {beta:g} moves the centre past a worker's model: at most {workers}, one a worker")
    return ElasticSettings(rank, alpha, beta / workers, not hub.hub_only, hub.hub_lost)
