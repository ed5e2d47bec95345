"""Requests of ``gossipx doctor`` to a peer of a run, which reveals its facts and nothing else."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from gossipx.errors import NotAuthorisedError, ProtocolError
from gossipx.transports import Address, handshake, tcp
from gossipx.transports.link import Links
from gossipx.wire import CheckupRequest, Hello, Welcome
from gossipx.wire.auth import FixedSecrets, Secret
from gossipx.wire.frames import VERSION

FACTS = {"role": "doctor", "gossipx": "1.0", "torch": "2.13.0+cpu", "python": "3.11.7", "protocol": 4, "model": ""}


SECRET = FixedSecrets((Secret(b"0123456789abcdef"),))


def asked(first: CheckupRequest, secret: FixedSecrets | None = None) -> tuple[Any, BaseException | None]:
    """Return the reply of a run's peer to the first request on a connection, and the error that the peer raised."""
    me, other = (Hello(rank, name, 2, "digest", "model") for rank, name in enumerate("ab"))
    links = Links("a", 2, 10.0)
    ended: list[BaseException | None] = []
    listener = tcp.listen(Address("127.0.0.1", 0))

    def serve() -> None:
        link = links.add(listener.accept())
        try:
            if secret is not None:
                handshake.challenge(link, secret, me, time_limit())
            handshake.admit(link, me, "ab", ["127.0.0.1"] * 2, Welcome(0, "a", "model"), {}, time_limit())
            ended.append(None)
        except Exception as error:
            ended.append(error)
        finally:
            links.drop(link)

    serving = threading.Thread(target=serve)
    serving.start()
    link = links.add(tcp.connect(listener.address, time_limit()))
    answer: Any
    try:
        if secret is not None:
            handshake.prove(link, secret, other, "a", time_limit())
        answer = link.request(first, 0, time_limit()).message
        link.request(other, 0, time_limit())  # afterwards it may still join
    except Exception as error:
        answer = error
    finally:
        links.drop(link)
    serving.join()
    listener.close()
    return answer, ended[0]


def time_limit() -> float:
    return time.monotonic() + 10


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_peer_of_a_run_reveals_its_facts_and_nothing_else(secret: FixedSecrets | None) -> None:
    answer, ended = asked(CheckupRequest("b", "facts"), secret)
    assert ended is None, "the connection is still good for a peer's Hello"
    assert answer.report["role"] == "run" and answer.report["model"] == "model" and answer.report["protocol"] == VERSION
    answer, ended = asked(CheckupRequest("b", "load", back=2**24), secret)
    assert isinstance(answer, Exception) and isinstance(ended, ProtocolError)


def test_a_stranger_learns_nothing() -> None:
    links = Links("a", 2, 10.0)
    listener = tcp.listen(Address("127.0.0.1", 0))
    refused: list[BaseException] = []

    def serve() -> None:
        link = links.add(listener.accept())
        try:
            handshake.challenge(link, SECRET, Hello(0, "a", 2, "", ""), time_limit())
        except NotAuthorisedError as error:
            refused.append(error)
        finally:
            links.drop(link)

    serving = threading.Thread(target=serve)
    serving.start()
    link = links.add(tcp.connect(listener.address, time_limit()))
    with pytest.raises(NotAuthorisedError, match="this run has a secret"):
        link.request(CheckupRequest("b", "facts"), 0, time_limit())
    links.drop(link)
    serving.join()
    listener.close()
    assert len(refused) == 1
