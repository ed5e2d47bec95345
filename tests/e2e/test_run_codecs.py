"""Every codec by command line, alone and combined with its compression: between peers, and with servers."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from gossipx import codecs
from runs import folder, one_line

CODECS = [name for name in codecs.BUILT_IN if name != "none"]
WAYS = ("gossip", "server")
BRIEF = ("--iterations", "40", "--eval-interval", "0")


def options(way: str, spec: str) -> tuple[str, ...]:
    codec = codecs.parse(spec)
    if way == "server":
        return ("--servers", "0", "--push-codec", spec, "--pull-codec", "none" if codec.gradients_only else spec)
    return ("--policy", "tau:10", "--codec", spec)


@pytest.mark.slow  # 40 runs
@pytest.mark.parametrize(
    ("way", "spec"),
    [
        *product(WAYS, CODECS),
        *((WAYS[number % 2], f"{spec}+zstd") for number, spec in enumerate(CODECS)),
    ],
)
def test_every_codec(tmp_path: Path, way: str, spec: str) -> None:
    with folder(tmp_path, 3) as here:
        if way == "gossip" and codecs.parse(spec).gradients_only:
            assert spec in one_line(here.start_run(*BRIEF, *options(way, spec)).end(), 2)
            return
        run = here.run(*BRIEF, *options(way, spec))
    summary = run.summary
    assert codecs.describe(codecs.parse(spec)) in summary["codec"]
    assert (summary["lost"], sum(summary["failed"]), sum(summary["poisoned"])) == ([], 0, 0)
    model = sum(tensor.nbytes for tensor in run.model(0).values())
    # Transfers: a peer's pulls; a worker's model and the centre; gradients and table values.
    travelled = {"gossip": sum(summary["retrievals"]), "server": 2 * 2 * 40}
    received = sum(summary["bytes_received"])
    assert 0 < received < 0.8 * travelled[way] * model + 60_000
