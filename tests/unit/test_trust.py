"""Trust: when strangers are logged, and when a peer takes itself for a stranger. The clock is simulated."""

from __future__ import annotations

import logging

import pytest

from gossipx.errors import NotAuthorisedError, StrangerError
from gossipx.figures import Counters
from gossipx.transports import handshake
from gossipx.transports.handshake import Trust

REFUSED = NotAuthorisedError("not authorised: why")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(handshake, "time", made)
    return made


def test_a_peer_turned_away_by_all_others_is_an_outcast_at_once(clock: Clock) -> None:
    own = Trust(2, 30.0, Counters())
    assert not own.is_outcast
    own.record_rejection(1, REFUSED)
    own.record_rejection(1, REFUSED)
    assert not own.is_outcast
    own.record_rejection(2, REFUSED)
    assert own.is_outcast


def test_a_peer_turned_away_by_some_waits_for_others_until_half_of_peer_timeout(clock: Clock) -> None:
    own, nobody_there = Trust(5, 30.0, Counters()), Trust(5, 30.0, Counters())
    own.record_rejection(1, REFUSED)
    clock.now += 15
    assert not own.is_outcast
    clock.now += 0.1
    assert own.is_outcast
    assert not nobody_there.is_outcast


def test_a_peer_admitted_by_one_is_no_outcast(clock: Clock) -> None:
    own = Trust(2, 30.0, Counters())
    own.record_admission()
    own.record_rejection(1, REFUSED)
    own.record_rejection(2, REFUSED)
    clock.now += 60
    assert not own.is_outcast


def test_strangers_are_logged_once_a_minute_and_all_counted(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "gossipx")
    own = Trust(2, 30.0, Counters())
    for _ in range(5):
        own.record_stranger("192.0.2.1:7", REFUSED)
    clock.now += 60
    own.record_stranger("192.0.2.1:8", REFUSED)
    assert [record.getMessage() for record in caplog.records] == [
        "a connection from 192.0.2.1:7: not authorised: why",
        "a connection from 192.0.2.1:8: not authorised: why (4 more turned away before)",
    ]
    assert own._counts["strangers"] == 6


def test_a_peer_without_others_knows_whether_one_was_refused(clock: Clock) -> None:
    own = Trust(2, 30.0, Counters())
    own.record_stranger("192.0.2.1:7", StrangerError("not authorised: it gave no certificate"))
    assert own.doubt is None  # a port scanner could cause it
    own.record_stranger("192.0.2.1:7", REFUSED)
    assert own.doubt is REFUSED
    assert not own.is_outcast
    own.record_admission()
    assert own.doubt is None
