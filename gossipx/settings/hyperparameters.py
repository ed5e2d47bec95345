"""The settings by which runs are compared in TensorBoard and other services."""

from __future__ import annotations

from gossipx.settings.sections import RunConfig


def hyperparameters(settings: RunConfig, peers: int) -> dict[str, str | float]:
    """Return the hyperparameters by which runs are compared.

    Args:
        settings: settings of the run.
        peers: number of peers.
    """
    sync, server = settings.sync, settings.server
    exchange = "server" if settings.has_servers else "hub" if settings.hub.hub is not None else None
    codec = f"push {server.push_codec}, pull {server.pull_codec}" if settings.has_servers else sync.codec
    found: dict[str, str | float | None] = {
        "policy": settings.server.sync if settings.has_servers else sync.policy,
        "exchange": exchange or (sync.exchange if sync.exchange == "waves" else sync.mode),
        "codec": codec,
        "outer": None if exchange else sync.outer,
        "topology": None if exchange else sync.topology,
        "seed": settings.run.seed,
        "peers": peers,
        "learning rate": settings.task.base_lr,
    }
    return {name: value for name, value in found.items() if value is not None}
