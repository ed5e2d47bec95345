"""Arguments of ``tc`` and ``nft``: token buckets for a rate, netem for a delay, and rules that hide a host."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

MEASURED = ((10e6, 32, 50), (100e6, 128, 50), (1e9, 256, 20))
"""Rate in bit/s, burst in KiB and maximum wait in ms of buckets that yield 98 to 100 % of the rate.

Smaller bursts yield less (64 KiB at 1 Gbit/s: 60 to 82 %), larger ones let short transfers pass unshaped.
"""
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
MTU = 1500


@dataclass(frozen=True)
class TokenBucket:
    """Shapes the outgoing traffic of a device.

    Attributes:
        rate: bit/s of whole Ethernet frames; TCP's payload is 95.6 % of them.
        burst: bytes that may pass at once.
        latency: maximum milliseconds that a frame may wait; frames that would wait longer are dropped.
    """

    rate: int
    burst: int
    latency: float

    @classmethod
    def of(cls, rate: str) -> TokenBucket:
        """Return the bucket for a rate such as ``10mbit`` or ``2.5gbit``, in tc's notation.

        Burst and latency are interpolated between the measured ones, on a logarithmic scale; above 1 Gbit/s the burst
        grows with the rate.

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
        """Return the arguments for ``tc qdisc add ...``."""
        return ["tbf", "rate", f"{self.rate}bit", "burst", f"{self.burst}b", "latency", f"{self.latency}ms"]

    def __str__(self) -> str:
        return f"token buckets of {self.burst / 1024:.0f} KiB, {self.latency:g} ms"


def netem(bucket: TokenBucket, delay_ms: float) -> list[str]:
    """Return arguments for ``tc qdisc add ...``, with room for 1.5 times the frames in flight at the bucket's rate."""
    under_way = bucket.rate / 8 * delay_ms / 1e3 / MTU
    return ["netem", "limit", str(1000 + round(1.5 * under_way)), "delay", f"{delay_ms}ms"]


HIDING = """
table inet hiding {
  chain received {
    type filter hook input priority 0;
    iif != "lo" tcp flags & (syn | ack) == syn drop
  }
}
"""
"""nftables' rules that drop each packet that would open a TCP connection from another host."""
