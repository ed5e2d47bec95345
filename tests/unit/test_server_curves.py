"""The curves of a server: figures are recorded at the iterations of its workers, and totals as means of an interval."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from gossipx.peer.server_role import Total
from gossipx.runtime.figures.reporting import Reporter


def test_a_total_is_recorded_as_the_mean_since_the_last_record() -> None:
    now: dict[str, Any] = {}
    recorded: list[tuple[str, float, int]] = []
    role = SimpleNamespace(server=SimpleNamespace(metrics=now))
    driver: Any = SimpleNamespace(role=role, arena=None, read=lambda look: look(role), now=time.monotonic)
    recorder: Any = SimpleNamespace(scalar=lambda *record: recorded.append(record))
    unused: Any = None
    place: Any = SimpleNamespace(progress=None)
    reporter = Reporter(unused, driver, unused, recorder, unused, place, "")
    for step, total, clock in ((5, (6, 3), 4), (7, (8, 4), 6), (10, (26, 7), 9), (20, (26, 7), 9), (30, (1, 1), 29)):
        now.update({"staleness": (step, Total(*total)), "clock": (step, clock)})
        reporter.record_server_metrics(every=5)
    assert [record for record in recorded if record[0] == "clock"] == [
        *(("clock", 4, 5), ("clock", 9, 10), ("clock", 9, 20), ("clock", 29, 30))
    ]
    # Nothing was applied from 10 to 20. At 30 the shard has moved here from another peer, and counts anew.
    assert [record for record in recorded if record[0] == "staleness"] == [("staleness", 2, 5), ("staleness", 5, 10)]
