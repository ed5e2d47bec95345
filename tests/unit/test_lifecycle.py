"""The phases of a peer's life, as a machine; what happens in each is tested end to end."""

from __future__ import annotations

import pytest

from gossipx.runtime.ending.lifecycle import NEXT, Phase


def _reachable(start: Phase) -> set[Phase]:
    found: set[Phase] = set()
    new = {start}
    while new:
        found |= new
        new = {after for phase in new for after in NEXT[phase]} - found
    return found


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_leads_to_the_end_and_none_leads_back(phase: Phase) -> None:
    assert _reachable(phase) & {Phase.LEFT, Phase.CLOSED}
    assert all(phase not in _reachable(after) for after in NEXT[phase])


def test_a_peer_that_has_left_in_order_took_leave_before() -> None:
    """Only then a script that trains on is ended again."""
    assert [phase for phase in Phase if Phase.LEFT in NEXT[phase]] == [Phase.LEAVING]


def test_each_open_phase_may_end_by_a_request_to_leave() -> None:
    closed = {Phase.LEAVING, Phase.LEFT, Phase.CLOSED}
    assert all(Phase.LEAVING in NEXT[phase] for phase in set(Phase) - closed)
