"""The settings by which runs are compared in TensorBoard and other services."""

from __future__ import annotations

from gossipx.settings.modes import Elastic, Server
from gossipx.settings.sections import RunConfig


def hyperparameters(settings: RunConfig, peers: int) -> dict[str, str | float]:
    """Return the hyperparameters by which runs are compared.

    Args:
        settings: settings of the run.
        peers: number of peers.
    """
    mode, is_central = settings.mode, isinstance(settings.mode, Elastic | Server)
    found: dict[str, str | float | None] = {
        "policy": settings.decides,
        "exchange": "hub" if isinstance(mode, Elastic) else mode.chosen_by[1],
        "codec": f"push {mode.push_codec}, pull {mode.pull_codec}" if isinstance(mode, Server) else mode.codec,
        "outer": None if is_central else settings.values["outer"],
        "topology": None if is_central else settings.values["topology"],
        "seed": settings.run.seed,
        "peers": peers,
        "learning rate": settings.task.base_lr,
    }
    return {name: value for name, value in found.items() if value is not None}
