"""What ``tc`` and ``nft`` are told: token buckets for a rate, and who makes delay and loss."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

MEASURED = ((10e6, 32, 50), (100e6, 128, 50), (1e9, 256, 20))
"""Rate in bit/s, burst in KiB, longest wait in ms of buckets that give 98 to 100 % of the rate.

Smaller bursts give less (64 KiB at 1 Gbit/s: 60 to 82 %), larger ones let a short transfer through unshaped.
"""
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
MTU = 1500


@dataclass(frozen=True)
class TokenBucket:
    """Shapes what leaves a device.

    Attributes:
        rate: bit/s, of whole Ethernet frames: TCP's payload is 95.6 % of them.
        burst: bytes that may pass at once.
        latency: milliseconds that a frame may wait for its turn; what would wait longer is dropped.
    """

    rate: int
    burst: int
    latency: float

    @classmethod
    def of(cls, rate: str) -> TokenBucket:
        """The bucket for ``10mbit``, ``2.5gbit``, as tc writes rates.

        Burst and latency lie between those measured, on a logarithmic scale; above 1 Gbit/s the burst grows with the
        rate.

        Raises:
            ValueError: not such a rate.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
        if match is None or not float(match[1]):
            raise ValueError(f"'{rate}' is not a rate such as 500kbit, 100mbit or 2.5gbit")
        bits = float(match[1]) * UNITS[match[2]]
        rates, bursts, latencies = zip(*MEASURED, strict=True)
        at, places = math.log(bits), np.log(rates)
        burst = math.exp(np.interp(at, places, np.log(bursts))) * 1024 * max(1.0, bits / rates[-1])
        return cls(round(bits), round(burst), round(float(np.interp(at, places, latencies)), 1))

    def arguments(self) -> list[str]:
        """For ``tc qdisc add ...``."""
        return ["tbf", "rate", f"{self.rate}bit", "burst", f"{self.burst}b", "latency", f"{self.latency}ms"]

    def __str__(self) -> str:
        return f"token buckets of {self.burst / 1024:.0f} KiB, {self.latency:g} ms"


@dataclass(frozen=True)
class Ways:
    """Who delays frames and who loses them.

    Attributes:
        delay: ``netem``, ``switch``, or None: nobody.
        loss: ``nft``, ``netem``, ``switch``, or None.
    """

    delay: str | None
    loss: str | None

    @classmethod
    def choose(cls, delay: float, loss: float, has_netem: bool, has_nft: bool) -> Ways:
        """netem delays where the kernel has it. nftables loses where it is there, else what delays or could."""
        line = "netem" if has_netem else "switch"
        return cls(line if delay else None, ("nft" if has_nft else line) if loss else None)

    @property
    def has_switch(self) -> bool:
        """Whether frames go through the switch in user space, and not through a bridge."""
        return "switch" in (self.delay, self.loss)

    @property
    def has_netem(self) -> bool:
        """Whether the ports have netem."""
        return "netem" in (self.delay, self.loss)


def netem(ways: Ways, bucket: TokenBucket, delay_ms: float, loss: float) -> list[str]:
    """For ``tc qdisc add ...``: room for all that is on its way at the bucket's rate, and half as much again."""
    under_way = bucket.rate / 8 * delay_ms / 1e3 / MTU
    arguments = ["netem", "limit", str(1000 + round(1.5 * under_way))]
    if ways.delay == "netem":
        arguments += ["delay", f"{delay_ms}ms"]
    if ways.loss == "netem":
        arguments += ["loss", f"{loss:%}"]
    return arguments


def nft_rules(loss: float) -> str:
    """A ruleset that drops and counts a share of the frames that come in by eth0."""
    drop = f"numgen random mod 1000000 < {round(loss * 1e6)} counter drop"
    return f'table inet emulated {{ chain input {{ type filter hook input priority 0; iifname "eth0" {drop}; }}; }}\n'
