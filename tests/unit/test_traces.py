"""Traces of deltas: those that come with gossipx, and files."""

from __future__ import annotations

import configparser
from importlib import resources
from pathlib import Path

import pytest

from gossipx.errors import UsageError
from gossipx.sim import traces
from gossipx.tasks.presets import PRESETS

ROOT = Path(__file__).parents[2]


def test_shipped_traces_are_files_of_the_package_which_a_wheel_has() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    patterns = setup["options.package_data"]["gossipx"].split()
    packaged = {path for pattern in patterns for path in (ROOT / "gossipx").glob(pattern)}
    assert traces.names() == [*RECORDED]
    for name in RECORDED:
        file = ROOT / "gossipx" / "sim" / "traces" / f"{name}.csv"
        assert file in packaged and len(file.read_bytes()) < 150_000


RECORDED = {"lenet": (3000, [37, 38, 38, 37]), "transformer": (800, [12, 10, 10, 13])}
"""The iterations and retrievals of the recorded runs."""


@pytest.mark.parametrize("name", RECORDED)
def test_a_shipped_trace_is_of_four_peers_and_names_its_command(name: str) -> None:
    trace, (iterations, _) = traces.load(name), RECORDED[name]
    assert [len(deltas) for deltas in trace.deltas] == [iterations] * 4
    assert all(delta > 0 for deltas in trace.deltas for delta in deltas)
    assert len({tuple(deltas) for deltas in trace.deltas}) == 4, "peers with data of their own"
    comments = [line for line in (resources.files(traces) / f"{name}.csv").read_text().splitlines() if line[0] == "#"]
    assert any("gossipx run --peers hosts.txt" in line and f"--iterations {iterations}" in line for line in comments)


@pytest.mark.parametrize("name", RECORDED)
def test_travel_with_the_presets_distance_pulls_as_often_as_in_the_recorded_run(name: str) -> None:
    distance = float(PRESETS[name].policies["travel"].partition("=")[2])
    for deltas, retrievals in zip(traces.load(name).deltas, RECORDED[name][1], strict=True):
        pulls, travelled = 0, 0.0
        for delta in deltas:
            travelled += delta
            if travelled > distance:
                pulls, travelled = pulls + 1, 0.0
        assert abs(pulls - retrievals) <= 1, "a pull takes time, which a trace does not have"


def test_a_file(tmp_path: Path) -> None:
    """It has a delta for more peers and iterations than were recorded, too."""
    path = tmp_path / "mine.csv"
    path.write_text("\ufeff# recorded by hand\niteration,a,b\n\n1,0.5,1e-3\n# later\n2,0.25,0\n", encoding="utf-8")
    trace = traces.load(path)
    assert trace == traces.load(str(path)) == traces.Trace([[0.5, 0.25], [0.001, 0.0]])
    assert [trace.delta(rank, 1) for rank in range(5)] == [0.5, 0.001, 0.5, 0.001, 0.5]
    assert [trace.delta(0, step) for step in (1, 2, 3, 1000)] == [0.5, 0.25, 0.25, 0.25]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "mine.csv: a trace has a header, 'iteration' and the name of each peer between commas, and a line per"),
        (b"# only\niteration,a\n", "mine.csv: a trace has a header"),
        (b"step,a\n1,0.5\n", "mine.csv: a trace has a header"),
        (b"iteration\n1\n", "mine.csv: a trace has a header"),
        (b"iteration,a,b\n1,0.5\n", "mine.csv: each iteration of a trace has a delta of at least 0"),
        (b"iteration,a,b\n1,0.5,1\n2,1\n", "mine.csv: not a trace: the number of columns changed from 3 to 2 at row 2"),
        (b"iteration,a\n1,0.5\n\n3,0.5\n", "mine.csv: the iterations of a trace count from 1 without gaps"),
        (b"iteration,a\n1,long\n", "mine.csv: not a trace: could not convert string 'long' to float64"),
        (b"iteration,a\n1,-0.5\n", "mine.csv: each iteration of a trace has a delta of at"),
        (b"iteration,a\n1,nan\n", "a delta of at least 0 for each peer"),
        (b"iteration,a\n1,inf\n", "a delta of at least 0 for each peer"),
        (b"\xff\xfe\x00", "mine.csv: cannot read the trace: not UTF-8 text"),
    ],
)
def test_a_malformed_file_is_refused_in_one_line(tmp_path: Path, text: bytes, told: str) -> None:
    (tmp_path / "mine.csv").write_bytes(text)
    with pytest.raises(UsageError) as raised:
        traces.load(tmp_path / "mine.csv")
    message = str(raised.value)
    assert message.startswith(str(tmp_path)) and told in message and "\n" not in message


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.csv: no such trace file"):
        traces.load(tmp_path / "absent.csv")
    told = r"unknown trace 'lenett' .did you mean 'lenet'.*: give a file, or one of lenet, t"
    with pytest.raises(UsageError, match=told):
        traces.load("lenett")
