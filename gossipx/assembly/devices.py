"""Whether this machine has what a run wants of it."""

from __future__ import annotations

from pathlib import Path

from gossipx.config.settings import ExchangeSettings
from gossipx.errors import UsageError


def check_device(name: str, option: str, file: Path | None = None, line: int | None = None) -> None:
    """Look whether this machine has a device, without opening it.

    Args:
        option: how it was named, for the message; ``file`` and ``line``: where.

    Raises:
        UsageError: it is none, or is not here.
    """
    if name == "cpu":
        return
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"{option} '{name}' is no device: cpu, cuda:0, mps or the like", file, line) from None
    if device.type == "cpu":
        return
    kind = getattr(torch, device.type, None)
    there = kind.device_count() if kind is not None and hasattr(kind, "device_count") else 0
    if (device.index or 0) >= there:
        raise UsageError(
            f"{option} '{name}': {there} devices of type {device.type} are here; cpu always is", file, line
        )


def check_transport(exchange: ExchangeSettings, device: str | None) -> None:
    """Look whether models can travel so, here.

    Args:
        device: of the model; None: a script will say.

    Raises:
        UsageError: they cannot.
    """
    transport = exchange.transport
    if transport == "gloo" or transport == "nccl":
        import torch

        from gossipx.transports import process_group

        process_group.check(transport, None if device is None else torch.device(device))
