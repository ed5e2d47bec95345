"""A switch in user space that delays frames, for kernels without netem.

It replaces the bridge: it opens a packet socket on each port, in the ports' namespace. The token buckets stay on the
ports and at the peers' ends, so a frame is shaped, delayed, and shaped again, as on a long line between two short ones.
It uses packet sockets instead of TAP devices, so that the same veth pairs are used with and without a delay. Segments
that the kernel keeps together (up to 64 KB) pass as one frame, marked in its header; this makes 1 Gbit/s possible,
since the cost per frame does not depend on its size.

Usage: ``switch.py SECONDS PORT...``. For each line on standard input it prints the counts so far as a line of
JSON; it ends at the end of standard input.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
import time
from collections import deque

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33  # asm-generic/socket.h
ANY_PROTOCOL = 0x0003  # linux/if_ether.h
VNET_HEADER = 10  # bytes of struct virtio_net_hdr before each frame: checksum and segmentation still to be done
LARGEST = VNET_HEADER + 14 + 65536
QUEUE = 64 << 20  # bytes of a port's queues in the kernel: half a second at 1 Gbit/s
BURST = 64  # frames read from one port before the next port


class Switch:
    """The ports, and the frames on their way between them.

    Args:
        ports: names of devices. A frame to an unknown address is sent to all other ports.
        delay: seconds from one port to another.

    Attributes:
        counts: frames passed, and dropped because a port's queue was full.
    """

    def __init__(self, ports: list[str], delay: float):
        self._ports = [_open(name) for name in ports]
        self._delay = delay
        self._port_of: dict[bytes, socket.socket] = {}  # by MAC address of the frames received there
        self._in_flight: deque[tuple[float, socket.socket, bytes]] = deque()  # constant delay, so first in, first out
        self.counts = {"passed": 0, "overflowed": 0}

    def serve(self) -> None:
        """Pass frames on until standard input ends."""
        readable = [sys.stdin, *self._ports]
        while True:
            wait = max(0.0, self._in_flight[0][0] - time.monotonic()) if self._in_flight else None
            ready, _, _ = select.select(readable, [], [], wait)  # epoll's timeout has a resolution of milliseconds only
            for one in ready:
                if isinstance(one, socket.socket):
                    self._take(one)
                elif sys.stdin.readline():
                    print(json.dumps(self.counts), flush=True)
                else:
                    return
            self._deliver()

    def _take(self, port: socket.socket) -> None:
        due = time.monotonic() + self._delay
        with contextlib.suppress(BlockingIOError):
            for _ in range(BURST):
                frame = port.recv(LARGEST)
                to, sender = frame[VNET_HEADER : VNET_HEADER + 6], frame[VNET_HEADER + 6 : VNET_HEADER + 12]
                self._port_of[sender] = port
                known = self._port_of.get(to)
                for other in self._ports if known is None else (known,):
                    if other is not port:
                        self._in_flight.append((due, other, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._in_flight and self._in_flight[0][0] <= now:
            _, port, frame = self._in_flight.popleft()
            try:
                port.send(frame)
                self.counts["passed"] += 1
            except OSError:  # no room in the port's token bucket or socket
                self.counts["overflowed"] += 1


def _open(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, QUEUE)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, QUEUE)
    port.setblocking(False)
    port.bind((name, ANY_PROTOCOL))
    return port


if __name__ == "__main__":
    seconds, *names = sys.argv[1:]
    Switch(names, float(seconds)).serve()
