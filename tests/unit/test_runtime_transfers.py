"""Replies that cannot be decoded: training continues, and the request is retried."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch
from table_sides import Side, side

from gossipx import codecs
from gossipx.codecs.changes import FULL
from gossipx.protocol.effects import RequestedBucket, Send
from gossipx.protocol.events import Event, Failed, Fault, Replied
from gossipx.protocol.server_messages import TablesReply, TablesRequest
from gossipx.runtime.driver.clock import DriverClock
from gossipx.runtime.driver.outbox import Outbox
from gossipx.runtime.driver.tables import TableWork
from gossipx.tables.coding import Coding


class Comm:
    """A CommManager stub that stores requests, for the test to answer."""

    def __init__(self) -> None:
        self.sent: queue.Queue[tuple[Any, Any, Any]] = queue.Queue()

    def request(self, to: int, request: Any, deadline: float, payload: Any, done: Any, upload: Any) -> Any:
        self.sent.put((request, payload, done))
        return lambda: None


def damaged(content: bytearray) -> bytearray:
    content[-1] ^= 1
    return content


@pytest.mark.parametrize("damage", [False, True])
def test_tables_that_cannot_be_decoded_count_as_a_failed_request(damage: bool) -> None:
    tables = [torch.randn(20, 30, generator=torch.Generator().manual_seed(1))]
    here: Side = side(tables, servers=1, coding=Coding(pull=codecs.parse("3lc"), shapes=((20, 30),)))
    here.pull()
    here.update([torch.ones(20, 30)])
    here.push()
    events: list[Event] = []
    notes: list[str] = []
    failures: list[Exception] = []
    outbox = Outbox(0, DriverClock(), events.append, lambda _, text: notes.append(text), failures.append)
    work = TableWork(0, DriverClock(), outbox, events.append, reply=lambda *_: None)
    comm = Comm()
    outbox.comm, work.store = comm, here.table_store  # type: ignore[assignment]
    try:
        send = Send(7, 1, TablesRequest(0, 0, 1, 1, 0.0, 5.0), 1e9)
        work.expect(send)
        work.send(send)
        told, sink, done = comm.sent.get(timeout=30)
        base = here.client.base((0, 0))
        assert told.base == base != FULL
        given = here.table_store.encode(RequestedBucket(0, 0, base=base))
        content, before = bytearray(given.source.view), here.client._buckets[0, 0].apply.view.tobytes()
        reply = TablesReply(0, given.parts, base=given.base)
        sink.fit(reply).take(0, memoryview(damaged(content) if damage else content))
        done(reply)
    finally:
        outbox.close()
        work.close()
    assert not failures
    assert here.client._buckets[0, 0].apply.view.tobytes() == before  # until the role decides what happens next
    if damage:
        assert events == [Failed(7, Fault.PROTOCOL)]
        assert "pulled tables cannot be decoded, the pull is retried: a codec's frame does not match" in notes[0]
        assert here.client.base((0, 0)) == FULL  # the next ones are sent in full
    else:
        assert events == [Replied(7, reply)] and not notes
        work.fetched(7)
        assert here.client._buckets[0, 0].apply.view.tobytes() != before
