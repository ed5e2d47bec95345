"""The centre of elastic averaging, by itself. Its effect on the weights is tested in scenarios and papers."""

from __future__ import annotations

import pytest

from gossipx.hub import Centre
from gossipx.peer.membership import Requests
from gossipx.protocol.effects import Answer
from gossipx.protocol.events import Received
from gossipx.protocol.messages import BusyReply, CentreRequest, ElasticRequest, Request


@pytest.mark.parametrize("request_", [ElasticRequest(1, 1, 10, 30.0), CentreRequest(30.0)], ids=["exchange", "centre"])
def test_a_hub_that_has_not_started_is_busy(request_: Request) -> None:
    """A worker may train before the last message of the START barrier reaches the hub. Nothing has failed then."""
    centre = Centre(Requests(), 0.25)
    (answer,) = centre.requested(Received(1, "key", request_), 5.0)
    assert isinstance(answer, Answer) and answer.reply == BusyReply() and answer.deadline == 35.0
    centre.begin()
    assert len(centre.requested(Received(1, "key", request_), 6.0)) >= 1 and centre.exchanges == 0
