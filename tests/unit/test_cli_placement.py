"""The command ``gossipx placement``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from gossipx.cli import main
from gossipx.server.placement import BUILT_IN
from gossipx.tasks.models import MODELS, UNTRAINED


def gossipx(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="gossipx")


def test_the_command_needs_no_large_libraries() -> None:
    assert "placement" in gossipx("--help").stdout
    told = " ".join(gossipx("placement", "--help").stdout.split())
    assert all(model in told for model in ("googlenet (without auxiliary classifiers)", *UNTRAINED))
    code = (
        "import sys\nfrom gossipx.cli import main\n"
        "try: main(['placement', '--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'networkx', 'numpy', 'tensorboard'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("model", [*MODELS, *UNTRAINED])
def test_every_model(model: str) -> None:
    found = json.loads(gossipx("placement", model, "--json").stdout)
    facts = (MODELS | UNTRAINED)[model]
    assert (found["model"], found["servers"], found["elements"]) == (model, 4, facts.parameters)
    assert sum(one["tables"] for one in found["sizes"]) == found["tables"]
    assert sum(one["elements"] for one in found["sizes"]) == found["elements"]
    assert [one["placement"] for one in found["placements"]] == list(BUILT_IN)
    for one in found["placements"]:
        assert len(one["bytes"]) == 4 and sum(one["bytes"]) == 4 * facts.parameters
        assert one["variation"] >= 0 and one["partitions"] >= found["tables"]


def test_the_tables() -> None:
    lines = gossipx("placement", "resnet20", "--servers", "3").stdout.splitlines()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert lines[0].strip() == "resnet20: 59 tensors of 269,722 elements"
    small = 2 * (7 * 16 + 6 * 32 + 6 * 64) + 10  # two of each of 19 normalisations, and the last layer's biases
    assert cells[0] == ["10 to 99", "39", f"{small / 269_722:.1%}", "█" * 18], "most tensors, the longest bar"
    rows = {row[0]: row[1:] for row in cells}
    assert rows.keys() >= {"0", "1", "2", "variation", "partitions"}
    assert rows["0"][-1] == "0.360" and rows["partitions"] == ["59", "59", "177", "59", "59", "61"]
    large = [line for model in UNTRAINED for line in gossipx("placement", model).stdout.splitlines()]
    assert max(len(line) for line in [*lines, *large]) <= 80, "a terminal"


def test_one_strategy() -> None:
    found = json.loads(gossipx("placement", "lenet", "--placement", "sliced", "--servers", "1024", "--json").stdout)
    (one,) = found["placements"]
    assert one["placement"] == "sliced" and set(one["bytes"]) == {400, 404}
    assert "uniform" not in gossipx("placement", "lenet", "--placement", "sliced").stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("inception-v3",), "unknown model 'inception-v3' (did you mean 'inception-v4'?): one of alexnet, convnet,"),
        (("lenet", "--placement", "heuristics"), "unknown placement 'heuristics' (did you mean 'heuristic'?)"),
        (("lenet", "--servers", "0"), "'--servers': 0 is not in the range 1<=x<=1024"),
        (("lenet", "--servers", "1025"), "'--servers': 1025 is not in the range 1<=x<=1024"),
        ((), "Missing argument 'MODEL'"),
    ],
)
def test_wrong_usage_is_reported_in_one_line(arguments: tuple[str, ...], told: str) -> None:
    result = gossipx("placement", *arguments)
    assert result.exit_code == 2 and result.stdout == "" and told in result.stderr
    assert result.stderr.count("\n") == 1
