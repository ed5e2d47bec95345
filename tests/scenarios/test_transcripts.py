"""The transcripts of docs/architecture.md: roles run in virtual time, and the page has what they were told and decided.

A line is ``RANK  EVENT -> EFFECTS``. ``GOSSIPX_REWRITE=1`` in the environment writes them to the page.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import served
import toy
from transcripts import LoggedWorld

from gossipx.peer import PeerRole
from gossipx.protocol import events
from gossipx.protocol.effects import Answer, Effect, ReportEntry, Resume, Send
from gossipx.protocol.server_messages import TablesReply
from gossipx.sim import SimPeer

HOUSE = Path(__file__).parents[2]
PAGE = HOUSE / "docs" / "architecture.md"
TRANSCRIPT = re.compile(r"<!-- transcript: (\w+) -->\n```text\n(.*?)```\n", re.DOTALL)
SHOWN = {
    events.Received: ("sender", "request"),
    events.Replied: ("reply",),
    events.StepDone: ("step",),
    events.Restored: ("step",),
    Send: ("to", "request"),
    Answer: ("reply",),
}
"""Fields that a line shows: ranks, iterations, and the classes of messages."""
Line = tuple[int, events.Event, list[Effect]]


def shown(one: Any) -> str:
    """Return an event or an effect with the fields that a line shows."""
    values = [getattr(one, field) for field in SHOWN.get(type(one), ())]
    inner = [str(value) if isinstance(value, int) else type(value).__name__ for value in values]
    return f"{type(one).__name__}({', '.join(inner)})" if inner else type(one).__name__


def text(lines: list[Line]) -> str:
    """Return the transcript, without replies that were sent and need nothing more."""
    kept = [line for line in lines if line[2] or not isinstance(line[1], events.Answered)]
    rows = [(f"{rank}  {shown(event)}", ", ".join(map(shown, effects))) for rank, event, effects in kept]
    width = max(len(row[0]) for row in rows)
    return "".join(f"{told:{width}} -> {decided}".rstrip(" ->") + "\n" for told, decided in rows)


def between(lines: list[Line], first: Callable[[Line], bool], last: Callable[[Line], bool]) -> list[Line]:
    """Return the lines from the first one of a kind to the next one of another kind."""
    begin = next(number for number, line in enumerate(lines) if first(line))
    end = next(number for number, line in enumerate(lines[begin:], begin) if last(line))
    return lines[begin : end + 1]


def is_step(line: Line, step: int) -> bool:
    return line[0] == 0 and isinstance(line[1], events.StepDone) and line[1].step == step


def has_mixed(line: Line) -> bool:
    return line[0] == 0 and isinstance(line[1], events.Mixed)


def has_values(line: Line) -> bool:
    return isinstance(line[1], events.Replied) and isinstance(line[1].reply, TablesReply)


def of_two(**options: Any) -> LoggedWorld:
    """Return a world of two peers, of which only the first one begins exchanges."""
    return toy.world(2, starters=[0], policy="tau:2", iterations=4, **options)


def step(lines: list[Line]) -> list[Line]:
    of_two().run(100.0)
    return between(lines, lambda line: is_step(line, 2), has_mixed)


def wave(lines: list[Line]) -> list[Line]:
    of_two(exchange="waves").run(100.0)
    return between(
        lines, lambda line: is_step(line, 2), lambda line: line[0] == 1 and isinstance(line[1], events.Mixed)
    )


def server(lines: list[Line]) -> list[Line]:
    """One worker, whose iteration pushes one bucket to the only server and gets its table back."""
    served.world(2, iterations=2, servers_only=True, bucket=10_000).run(100.0)
    return between(lines, lambda line: isinstance(line[1], events.GradientsReady), has_values)


def join(lines: list[Line]) -> list[Line]:
    of_two().run(100.0)
    return between(
        lines, lambda line: isinstance(line[1], events.JoinRun), lambda line: line[0] == 0 and Resume() in line[2]
    )


def admission(lines: list[Line]) -> list[Line]:
    made = of_two()

    def newcomer(entry: ReportEntry) -> SimPeer:
        assert entry.rank is not None
        return toy.make(entry.rank, 2, entry=entry, policy="never", iterations=4)

    made.join("late", (1, 0), newcomer, 1.5)
    made.run(100.0)
    return between(
        lines, lambda line: isinstance(line[1], events.AskEntry), lambda line: line[0] == 2 and Resume() in line[2]
    )


def resume(lines: list[Line]) -> list[Line]:
    """Peer 0 has a checkpoint of iteration 2, and peer 1 has none."""
    made = LoggedWorld(0)
    for rank, done in enumerate((2, None)):
        toy.resume(made, rank, 2, done, policy="never", iterations=4)
    made.run(100.0)
    return between(
        lines, lambda line: isinstance(line[1], events.Restored), lambda line: line[0] == 0 and Resume() in line[2]
    )


RUNS = {run.__name__: run for run in (step, wave, server, join, admission, resume)}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Line]]:
    """All events that roles are told, with their effects."""
    lines: list[Line] = []
    handle = PeerRole.handle

    def recorded(role: PeerRole, event: events.Event, now: float) -> list[Effect]:
        effects = handle(role, event, now)
        lines.append((role.rank, event, effects))
        return effects

    monkeypatch.setattr(PeerRole, "handle", recorded)
    yield lines


@pytest.mark.parametrize("name", RUNS)
def test_the_page_has_what_the_roles_decide(name: str, told: list[Line]) -> None:
    found = text(RUNS[name](told))
    page = PAGE.read_text(encoding="utf-8")
    if os.environ.get("GOSSIPX_REWRITE"):
        new = f"<!-- transcript: {name} -->\n```text\n{found}```\n"
        PAGE.write_text(TRANSCRIPT.sub(lambda each: new if each[1] == name else each[0], page), encoding="utf-8")
    else:
        assert dict(TRANSCRIPT.findall(page))[name] == found


def test_every_transcript_of_the_page_has_a_run() -> None:
    assert [name for name, _ in TRANSCRIPT.findall(PAGE.read_text(encoding="utf-8"))] == list(RUNS)


def test_every_module_of_a_walk_is_there() -> None:
    """The left column of the other text fences names modules or packages of gossipx, some without those around them."""
    walks = re.findall(r"(?<!-->\n)```text\n(.*?)```\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    columns = re.findall(r"^[\w/]+(?:, [\w/]+)*", "".join(walks), re.MULTILINE)
    modules = {name for column in columns for name in column.split(", ")}
    there = [path.relative_to(HOUSE / "gossipx").with_suffix("").as_posix() for path in HOUSE.glob("gossipx/**/*")]
    assert modules and not [name for name in modules if not any(f"/{path}".endswith(f"/{name}") for path in there)]
