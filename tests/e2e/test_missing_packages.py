"""Processes that cannot import some packages, as after ``pip install gossipx`` without any extra."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gossipx.codecs import BUILT_IN
from runs import TEN_LINES, Folder, Process

# Packages of extras; and networkx, which only torch's own dependencies guarantee.
MISSING = ("numba", "llvmlite", "networkx", "zstandard", "matplotlib", "cryptography", "accelerate", "transformers")
HIDDEN = f"""
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in {MISSING} else find(name, *rest)
"""
WANTED = "codec 'int8' needs numba: pip install '.[codecs]' in your clone of gossipx, or use one without, such as fp16"
LOOP = """
from importlib.util import find_spec

with peer:
    train(peer, model, optimizer, 10)
tell(peer, missing=find_spec("numba") is find_spec("networkx") is None)
"""
CODECS = """
import json
import torch
from gossipx import codecs
from gossipx.errors import UsageError

refused, wrong, x = {}, [], torch.linspace(-1, 1, 64)
for name in codecs.BUILT_IN:
    try:
        codec = codecs.parse({"localsteps": "localsteps:1"}.get(name, name))
    except UsageError as error:
        refused[name] = str(error)
        continue
    frame, _ = codec.encode(x, codec.init(x))
    if codecs.decode(frame).shape != x.shape:
        wrong.append(name)
try:
    codecs.ternary.compress(x, 1.0)
except UsageError as error:
    refused["compress"] = str(error)
print(json.dumps([refused, wrong]))
"""


@pytest.fixture(autouse=True)
def _hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each new interpreter find none of the packages."""
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(HIDDEN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "start"), os.environ.get("PYTHONPATH", "")]))


def test_the_default_run_needs_no_package_of_an_extra(two: Folder, tmp_path: Path) -> None:
    two.run(two.script(TEN_LINES + LOOP), tmp_path, fresh=True)
    assert two.told(0)["missing"] and two.told(1)["missing"]


def test_compiled_codecs_are_refused_and_the_others_work(two: Folder, tmp_path: Path) -> None:
    ended = Process(["-c", CODECS], tmp_path, fresh=True).end()
    assert ended.code == 0, ended.shown
    refused, wrong = json.loads(ended.output)
    assert wrong == []
    needs = {name for name, kind in BUILT_IN.items() if kind.needs_numba}
    assert set(refused) == {*needs, "compress"} and {"3lc", "int8", "topk"} <= needs
    assert refused.pop("int8") == WANTED
    assert all("pip install '.[codecs]'" in line and "\n" not in line for line in refused.values())
