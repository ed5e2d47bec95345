"""Checks that this machine has the device and the transport that a run needs."""

from __future__ import annotations

from pathlib import Path

from gossipx.errors import UsageError
from gossipx.settings.sections import ExchangeSettings


def check_device(name: str, option: str, file: Path | None = None, line: int | None = None) -> None:
    """Check that this machine has a device, without opening it.

    Args:
        name: the device, such as ``cuda:0``.
        option: the option that named it, for the message.
        file, line: where it was named, for the message.

    Raises:
        UsageError: the name is not a device, or this machine does not have it.
    """
    if name == "cpu":
        return
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"{option} '{name}' is not a device: use cpu, cuda:0, mps or the like", file, line) from None
    if device.type == "cpu":
        return
    kind = getattr(torch, device.type, None)
    count = kind.device_count() if kind is not None and hasattr(kind, "device_count") else 0
    if (device.index or 0) >= count:
        raise UsageError(
            f"{option} '{name}': this machine has {count} devices of type {device.type}; cpu always works", file, line
        )


def check_transport(exchange: ExchangeSettings, device: str | None) -> None:
    """Check that this machine supports the transport of models.

    Args:
        exchange: the settings that name the transport.
        device: the model's device; None: a script chooses it later.

    Raises:
        UsageError: the transport is not available.
    """
    transport = exchange.transport
    if transport == "gloo" or transport == "nccl":
        import torch

        from gossipx.transports import process_group

        process_group.check(transport, None if device is None else torch.device(device))
