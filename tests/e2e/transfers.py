"""Programs that send bytes between the hosts of an emulated network, and say how fast."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from emulated import Host
from emulated.shaping import TokenBucket

from runs import LONG

FRAME = 1514 / 1448
"""Bytes of an Ethernet frame to those of TCP's payload in it: a link's rate is of frames."""


def python(host: Host, text: str, *arguments: object) -> subprocess.Popen[str]:
    """Run a program on a host."""
    command = [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)]
    return host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str]) -> Any:
    """The next line of JSON that a program prints."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def result(process: subprocess.Popen[str]) -> Any:
    """The JSON that a program prints, whose end is waited for."""
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 0
    return json.loads(output)


RECEIVER = """
    import hashlib, json, selectors, socket, sys, time
    buffer = bytearray(1 << 20)
    senders, count = map(int, sys.argv[1:])
    with socket.create_server(("0.0.0.0", 5000)) as server, selectors.DefaultSelector() as ready:
        print("true", flush=True)
        connections = [server.accept()[0] for _ in range(senders)]
        began = time.monotonic()
        for connection in connections:
            ready.register(connection, selectors.EVENT_READ)
            connection.send(b"!")
        got, parts = 0, []
        while got < count and ready.get_map():
            for key, _ in ready.select():
                length = key.fileobj.recv_into(buffer)
                if not length:
                    ready.unregister(key.fileobj)
                parts.append(buffer[:length])
                got += length
        seconds = time.monotonic() - began
        print(json.dumps({"seconds": seconds, "got": got, "digest": hashlib.sha256(b"".join(parts)).hexdigest()}))
"""
"""Gives a number of senders the word, and receives ``count`` bytes from all together, or to their end."""


SENDER = """
    import random, socket, sys
    to, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    data = random.Random(seed).randbytes(count)
    with socket.create_connection((to, 5000)) as connection:
        connection.recv(1)
        try:
            connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has what it counts
"""


def transfer(to: Host, senders: Sequence[Host], count: int) -> Any:
    """Return the receiver's report on ``count`` bytes from all senders together, each ready to send as many."""
    receiver = python(to, RECEIVER, len(senders), count)
    assert ask(receiver)
    for seed, sender in enumerate(senders):
        python(sender, SENDER, to.address, count, seed)
    told = result(receiver)
    assert told["got"] >= count
    return told


def share_of_rate(told: Any, bucket: TokenBucket) -> float:
    """Return the fraction of a link's rate that a transfer reached. The full bucket at first adds to it."""
    return (told["got"] * FRAME - bucket.burst) * 8 / told["seconds"] / bucket.rate


def gets_the_rate(bucket: TokenBucket, transferred: Callable[[], Any], tries: int = 3) -> bool:
    """Return whether one of ``tries`` transfers gets 90 % of the rate, and check that none gets more."""
    for _ in range(tries):
        share = share_of_rate(transferred(), bucket)
        assert share <= 1.01
        if share >= 0.9:
            return True
    return False
