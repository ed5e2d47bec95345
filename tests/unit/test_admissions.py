"""The admission of newcomers between two processes: what is told, and who is turned away."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gossipx.assembly.graph import build_schedule
from gossipx.errors import ProtocolError
from gossipx.peer.joining.admission import Admission, settings_of_run, why_closed
from gossipx.protocol.fields import JoinedPeer
from gossipx.settings import files
from gossipx.wire import Hello, Open, auth
from gossipx.wire.agreement import objection

OWN = JoinedPeer(2, "late", "10.0.0.3", 29400, 0)
GRANTED = Admission(2, "[run]\n", (("a", "10.0.0.1", 29400), ("b", "10.0.0.2", 29400)), (OWN,), (1,))


def test_an_admission_is_read_as_it_was_written() -> None:
    read = Admission.decoded(GRANTED.encoded())
    assert read == GRANTED and read.own == OWN
    assert [name for name, _, _ in read.peers()] == ["a", "b", "late"]


def test_a_rank_that_nobody_has_told_of_has_a_place_in_the_list() -> None:
    later = Admission(3, "", GRANTED.begun, (OWN._replace(rank=3),))
    assert [name for name, _, _ in later.peers()] == ["a", "b", "peer 2", "late"]


@pytest.mark.parametrize(
    "change",
    [
        {"joined": []},
        {"joined": [[1]]},
        {"rank": "x"},
        {"begun": [["a"]]},
        {"lost": 7},
        {"joined": [[10**9, "late", "host", 29_400, 0]], "rank": 10**9},  # all ranks up to it have a place in a list
        {"joined": [[-1, "late", "host", 29_400, 0]], "rank": -1},
        {"settings": None, "rank": None},
    ],
)
def test_a_malformed_admission_is_refused(change: dict[str, Any]) -> None:
    content = json.loads(GRANTED.encoded()) | change
    with pytest.raises(ProtocolError, match="malformed"):
        Admission.decoded(json.dumps(content).encode())
    with pytest.raises(ProtocolError, match="malformed"):
        Admission.decoded(b"[")


def test_settings_of_a_machine_are_not_told() -> None:
    given = {
        "policy": "tau:7",
        "name": "x",
        "peers": "hosts.txt",
        "secret_file": "s",
        "data_dir": "d",
        "bind": "0.0.0.0",
    }
    told = settings_of_run(files.resolve(given))
    assert "tau:7" in told and 'name = "x"' in told
    assert not [word for word in ("hosts.txt", "secret_file", "data_dir", "0.0.0.0") if word in told]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, ""),
        ({"exchange": "waves"}, ""),
        ({"mode": "push", "weights": "push-sum"}, ""),
        ({"schedule": "bandwidth-aware"}, ""),
        ({"hub": "0"}, "the run has a hub"),
        ({"servers": "0"}, "the run has servers"),
        ({"topology": "ring"}, "--topology ring has no place for a new peer"),
        ({"topology": "exponential"}, "--topology exponential has no place for a new peer"),
        ({"schedule": "static"}, "--schedule static is an order of the peers that began the run"),
        ({"schedule": "inner-outer"}, "--schedule inner-outer is an order"),
    ],
)
def test_which_runs_take_newcomers(given: dict[str, Any], told: str) -> None:
    config = files.resolve(given)
    reason = why_closed(config, build_schedule(config, 4))
    assert reason.startswith(told) and bool(reason) is bool(told)


def hello(rank: int, name: str, *joined: JoinedPeer, peers: str = "list", size: int = 2) -> Hello:
    return Hello(rank, name, size, peers, "model", {}, joined)


def test_the_digest_of_the_hosts_file_protects_runs_that_were_joined_too() -> None:
    """A newcomer names the peers that began the run; a process with another hosts file is no newcomer."""
    own, names = hello(0, "a"), ["a", "b"]
    assert objection(own, hello(2, "late", OWN), names) is None
    assert "hosts files" in str(objection(own, hello(2, "late", OWN, peers="another list"), names))
    assert "hosts files" in str(objection(own, hello(2, "c", size=3, peers="another list"), names))
    assert "late is not rank 2" in str(objection(own, hello(2, "late"), names))
    assert objection(own, hello(3, "late", OWN), names) == "late is not rank 3, as which it joined"
    claims = OWN._replace(rank=1, name="late")
    assert objection(own, hello(1, "late", claims), names) == "late is not rank 1, as which it joined"


def test_a_process_that_asks_names_no_peer_and_others_must() -> None:
    nonce = "0" * 64
    assert auth.misdirected(Open(nonce, auth.ANY, "late", auth.ANY), "a") is None
    assert auth.misdirected(Open(nonce, "list", "late", "b"), "a") is not None
