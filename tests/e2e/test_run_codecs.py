"""Every codec from the command line, alone and squeezed: of models with peers and around a hub, and with servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossipx import codecs
from runs import folder, one_line

GIVEN = {"threshold": "threshold:value=0.001", "moniqua": "moniqua:theta=0.5"}
"""Specs of codecs that a name alone does not make, or not of use for models so far apart."""
CODECS = [GIVEN.get(name, name) for name in codecs.BUILT_IN if name != "none"]
BRIEF = ("--iterations", "40", "--eval-interval", "0")


def options(way: str, spec: str) -> tuple[str, ...]:
    codec = codecs.parse(spec)
    if way == "server":
        return ("--servers", "0", "--push-codec", spec, "--pull-codec", "none" if codec.gradients_only else spec)
    alone = ("--references", "0") if codec.near else ()
    return ("--policy", "tau:10", "--codec", spec, *alone, *(("--hub", "0") if way == "hub" else ()))


def is_refused(way: str, spec: str) -> bool:
    """What is for gradients alone is for no models; what is decoded near one's own is for peers alone."""
    codec = codecs.parse(spec)
    return codec.near if way == "server" else codec.gradients_only or (codec.near and way == "hub")


@pytest.mark.slow  # 108 runs, five minutes on two cores
@pytest.mark.parametrize("squeezed", ["", "+zstd"])
@pytest.mark.parametrize("way", ["gossip", "hub", "server"])
@pytest.mark.parametrize("plain", CODECS)
def test_every_codec(tmp_path: Path, plain: str, way: str, squeezed: str) -> None:
    spec = plain + squeezed
    with folder(tmp_path, 3) as here:
        if is_refused(way, spec):
            assert spec in one_line(here.start_run(*BRIEF, *options(way, spec)).end(), 2)
            return
        run = here.run(*BRIEF, *options(way, spec))
    summary = run.summary
    assert codecs.describe(codecs.parse(spec)) in summary["codec"]
    assert (summary["lost"], sum(summary["failed"]), sum(summary["poisoned"])) == ([], 0, 0)
    model = sum(tensor.nbytes for tensor in run.model(0).values())
    # Models that have travelled: a peer's pulls; a worker's there and back; gradients there and values back.
    travelled = {"gossip": sum(summary["retrievals"]), "hub": 2 * sum(summary["retrievals"][1:]), "server": 2 * 2 * 40}
    received = sum(summary["bytes_received"])
    assert 0 < received < 0.8 * travelled[way] * model + 60_000
