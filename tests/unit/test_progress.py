"""The live table of ``gossipx run``, and its plain lines."""

from __future__ import annotations

import json
import os
import sys

import click
import pytest
from launches import NAMES, Capture
from rich.table import Table

from gossipx.cli.output import print_tables
from gossipx.errors import UsageError
from gossipx.launch.environment import ENV_PROGRESS, start_reporting
from gossipx.launch.run import display as progress_module
from gossipx.launch.run.display import Display, PeerStatus


def test_plain_lines_are_printed_when_something_has_changed(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "LINES_EVERY", 0.0)
    standings = {0: PeerStatus("anna", iterations=10), 1: PeerStatus("berta", iterations=10)}
    with Display("mine", standings) as display:
        display.refresh()
        display.refresh()
        standings[0] = PeerStatus("anna", "train", 5, 10, 0.25, test_loss=1.75)
        standings[1] = PeerStatus("berta", "train", 5, 10, 0.25, 0.5, 3, 1_000_000)
        display.refresh()
        display.refresh()
    assert capsys.readouterr().out.splitlines() == [
        "anna starting  berta starting",
        "anna train 5/10 loss 0.250 test loss 1.750 pulls 0  berta train 5/10 loss 0.250 test acc 0.500 pulls 3",
    ]


@pytest.mark.parametrize(
    ("columns", "absent"),
    [
        (120, set()),
        (80, {"bar"}),
        (60, {"bar", "MB", "retrievals"}),
        (40, {"bar", "MB", "retrievals", "test", "it/s", "loss"}),
    ],
)
def test_a_narrow_terminal_lacks_whole_columns_and_no_digits(
    columns: int, absent: set[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(columns), "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    statuses = {rank: PeerStatus(name, "train", iterations=3000) for rank, name in enumerate(NAMES)}
    figures = {"loss": 0.5, "test_loss": 0.75, "retrievals": 300, "bytes": 10**8}
    for status in statuses.values():
        status.update({"step": 2400, **figures}, 10.0)
        status.update({"step": 2500, **figures}, 12.0)
    with Display("mine", statuses):
        pass
    printed = click.unstyle(capsys.readouterr().out)
    shown = {
        "bar": "\N{BOX DRAWINGS HEAVY HORIZONTAL}",
        "iteration": "2500/3000",
        "loss": " 0.500",
        "test": "loss 0.750",
        "it/s": " 50",
        "retrievals": " 300",
        "MB": "100.0",
    }
    assert {name for name, figure in shown.items() if figure not in printed} == absent
    assert {name for name in shown if name != "bar" and name not in printed.split()} == absent - {"bar"}
    assert all(name in printed for name in NAMES)
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed


def test_the_rate_is_that_of_the_last_seconds_and_gives_the_time_left() -> None:
    """Events that arrive together have none."""
    status = PeerStatus("anna", iterations=1000)
    assert status.rate is None
    for second in range(31):  # 10 iterations per second, then 2
        status.update({"state": "train", "step": min(second, 15) * 10 + max(second - 15, 0) * 2}, float(second))
    assert status.rate == 2.0
    assert status.left(30.0) == (1000 - 180) / 2
    status.update({"state": "finish"}, 31.0)
    assert status.rate is None
    at_once = PeerStatus("berta", iterations=1000)
    for step in (0, 50, 100):
        at_once.update({"state": "train", "step": step}, 7.0 + step * 1e-6)
    assert at_once.rate is None and at_once.left(7.0) is None
    at_once.update({"step": 200}, 9.0)
    assert at_once.rate == pytest.approx(100.0)


def test_plain_lines_say_how_long_the_run_has_trained_and_how_long_it_will(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: 104.0)
    status = PeerStatus("anna", iterations=500)
    for second, step in ((102.0, 80), (104.0, 100)):
        status.update({"state": "train", "step": step}, second)
    with Display("mine", {0: status}) as display:
        display.began = 30.0
        display.refresh()
    assert capsys.readouterr().out == "anna train 100/500 10 it/s pulls 0  1:14 elapsed, about 0:40 left\n"


def test_plain_lines_of_progress_are_not_more_than_one_can_read(capsys: Capture) -> None:
    standings = {0: PeerStatus("anna")}
    with Display("mine", standings) as display:
        display.refresh()
        standings[0].state = "train"
        display.refresh()
    assert capsys.readouterr().out == "anna starting\n"


def test_a_process_reports_to_its_parent_on_the_given_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv(ENV_PROGRESS, str(writing))
    try:
        told = start_reporting()
        assert told.due
        told.tell(state="train", step=1)
        error = UsageError("no such thing", "hosts.txt", 3)
        with pytest.raises(SystemExit) as ended:
            sys.excepthook(UsageError, error, None)
        assert ended.value.code == 2
    finally:
        os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        assert [json.loads(line) for line in pipe] == [
            {"state": "train", "step": 1},
            {"error": "hosts.txt:3: no such thing", "exit": 2},
        ]


def test_names_are_neither_markup_nor_emoji(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the live table and in that of a command."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    names = ["[fd00:100::7]:29400", "[/b]"]
    with Display("[red]mine", {rank: PeerStatus(name) for rank, name in enumerate(names)}):
        pass
    live = click.unstyle(capsys.readouterr().out)
    table = Table("[red]mine")
    for name in names:
        table.add_row(name)
    print_tables(table)
    plain = click.unstyle(capsys.readouterr().out)
    assert all(shown in printed for shown in ("[red]mine", *names) for printed in (live, plain))
