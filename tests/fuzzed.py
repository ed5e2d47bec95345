"""Fuzz targets: the readers of everything that comes from a file or from another peer.

``bin/fuzz`` runs them with atheris, which follows the readers' branches. A target takes any bytes: its reader must
return, or raise an error of gossipx in one line. What was found is in ``tests/unit/test_fuzz_finds.py``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LONGEST = 4096
"""Bytes of an input; readers refuse longer files by their size."""
SLOW = 10
"""Seconds after which an input counts as one that hangs its reader, also on an overloaded machine."""
MEGABYTES = 3000
"""Memory of the process, torch's included, above which an input counts as one that exhausts it."""


class Target(NamedTuple):
    """A reader: what it does with an input, and examples to start from."""

    take: Callable[[bytes], object]
    examples: Callable[[], Iterator[bytes]]


@functools.cache
def _place() -> Path:
    return Path(tempfile.mkdtemp(prefix="gossipx-fuzz-"))


def of_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Return a target that reads a file of this name."""

    def take(data: bytes) -> None:
        file = _place() / name
        file.write_bytes(data)
        refused(read, file)

    return take


def refused(read: Callable[..., object], *given: object) -> None:
    """Call a reader, whose error, if any, must be gossipx's and in one line."""
    from gossipx.errors import GossipxError

    try:
        read(*given)
    except GossipxError as error:
        assert "\n" not in str(error) and len(str(error)) < LONGEST + 1_000, str(error)[:200]


def _files(*patterns: str) -> Iterator[bytes]:
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            yield path.read_bytes()[:LONGEST]


def _hosts() -> Target:
    from gossipx.launch.hosts import read_hosts

    lines = b"localhost slots=2\nnode-1:29400 device=cuda:0 name=a # c\n[::1]:29500 nat\n10.0.0.1\n"
    return Target(of_file("hosts.txt", read_hosts), lambda: iter([lines, b"a slots=4", b"node[1-3]\nuser@host:4,b"]))


def _solver() -> Target:
    from gossipx.solver import prototxt

    text = b'net: "lenet"\nlr_policy: "step"\nstepvalue: [1, 2]\nsolver_mode: CPU\ntest_state { level: 1 stage: "a" }\n'
    return Target(of_file("solver.prototxt", prototxt.read_solver), lambda: iter([text]))


def _topology(ending: str) -> Target:
    from gossipx.topology import topology_from

    def read(path: Path) -> None:
        topology_from(str(path), 8)

    return Target(of_file(f"graph.{ending}", read), lambda: _files(f"topologies/*.{ending}"))


def _settings() -> Target:
    from gossipx.settings import files

    text = b'[run]\niterations = 10\n[sync]\npolicy = "tau:5"\ncodec = "3lc"\n[exchange]\npeer_timeout = 5.0\n'
    return Target(of_file("config.toml", lambda path: files.resolve(files.load(path))), lambda: iter([text]))


def _scenario() -> Target:
    from gossipx.settings import scenario

    def read(path: Path) -> object:
        return scenario.load(path, {})

    return Target(of_file("scenario.toml", read), lambda: _files("gossipx/launch/simulation/scenarios/*.toml"))


def _trace() -> Target:
    from gossipx.sim import traces

    return Target(of_file("trace.csv", traces.load), lambda: iter([b"iteration,a,b\n1,0.5,0.25\n2,1,1e-3\n"]))


def _summary() -> Target:
    import dataclasses
    import json

    from gossipx.cli.results import _lines
    from gossipx.figures import PER_PEER
    from gossipx.metrics import summary
    from gossipx.metrics.compare import compare

    def read(path: Path) -> None:
        rows = compare([summary.read(path)])
        [cell(row) for _, cell in _lines(rows) for row in rows]

    of_type = {"str": "x", "Whole": 2, "Number": 0.5, "list[str]": ["a"]}
    fields = {field.name: of_type.get(str(field.type)) for field in dataclasses.fields(summary.Summary)}
    fields |= {key: [1, None] for key in PER_PEER}
    return Target(of_file("summary.json", read), lambda: iter([json.dumps(fields).encode()]))


def _admission() -> Target:
    from gossipx.peer.joining.admission import Admission
    from gossipx.protocol.fields import JoinedPeer

    of = Admission(2, "[run]\n", (("a", "10.0.0.1", 1),), (JoinedPeer(2, "b", "host", 29_400, 0),), (1,))
    return Target(lambda data: refused(lambda: Admission.decoded(data).peers()), lambda: iter([of.encoded()]))


def _checkpoint() -> Target:
    """A manifest, sealed with its own hash, and a part in the form in which it is sent."""
    import json

    import torch

    from gossipx.checkpoint import HASH, MANIFEST, CheckpointPart, Store, _digest, from_bytes, to_bytes
    from gossipx.errors import MALFORMED

    root = _place() / "checkpoints"
    Store(root).save(7, {"model": CheckpointPart({"w": torch.ones(2)}, {"step": 7})})
    manifest = root / "00000007" / MANIFEST
    whole = manifest.read_bytes()

    def take(data: bytes) -> None:
        with contextlib.suppress(ValueError):
            from_bytes(memoryview(data))
        with contextlib.suppress(*MALFORMED):
            found = json.loads(data)
            found.pop(HASH, None)
            data = json.dumps({**found, HASH: _digest(found)}).encode()
        manifest.write_bytes(data)
        Store(root).load()
        Store(root).find_complete()

    tree = {"a": [1, 2.5, None], "b": {"t": torch.zeros(2)}, "c": (True, "x")}
    return Target(take, lambda: iter([whole, to_bytes(tree)]))


def _frames() -> Target:
    """Frames as they arrive, and the metadata of each kind of message."""
    from test_frames import drawn, survives

    from gossipx.wire.frames import KINDS, message_of, metadata_of

    kinds = list(KINDS.values())

    def take(data: bytes) -> None:
        survives(data, 7)
        if data:
            refused(message_of, kinds[data[0] % len(kinds)], data[1:])

    def examples() -> Iterator[bytes]:
        for number, kind in enumerate(kinds):
            for message in drawn(kind)[:2]:
                yield bytes([number]) + metadata_of(message)

    return Target(take, examples)


def _codecs() -> Target:
    """Frames of codecs, sealed with a valid checksum; no value around the decoded vector may change."""
    from encoded import SPECS
    from test_codec_frames import a_frame, sealed, survives

    return Target(lambda data: survives(sealed(data)), lambda: (a_frame(spec, 90) for spec in SPECS))


TARGETS: dict[str, Callable[[], Target]] = {
    "hosts": _hosts,
    "solver": _solver,
    "edges": functools.partial(_topology, "edges"),
    "toml": functools.partial(_topology, "toml"),
    "settings": _settings,
    "scenario": _scenario,
    "trace": _trace,
    "summary": _summary,
    "admission": _admission,
    "checkpoint": _checkpoint,
    "frames": _frames,
    "codecs": _codecs,
}
"""Targets by name, made when they are used: their imports are followed by atheris."""


def main(name: str, seconds: int) -> None:
    """Run a target for some seconds; the process ends with an exit code that is not 0 if it finds something."""
    import atheris

    logging.getLogger("gossipx").setLevel(logging.ERROR)  # a warning for each damaged checkpoint hides what is found
    sys.path.insert(0, str(ROOT / "tests" / "unit"))
    compiled = [f"gossipx.codecs.loops{name}" for name in ("", "_sparse")]  # by numba
    with atheris.instrument_imports(include=["gossipx"], exclude=compiled):
        target = TARGETS[name]()
        examples = list(target.examples())
        for example in examples:
            target.take(example)  # imports what it needs, which takes seconds
    corpus = _place() / "corpus"
    corpus.mkdir()
    for number, example in enumerate(examples):
        (corpus / f"{number}").write_bytes(example)
    limits = [f"-max_total_time={seconds}", f"-timeout={SLOW}", f"-rss_limit_mb={MEGABYTES}", f"-max_len={LONGEST}"]
    options = ["-verbosity=0", "-print_final_stats=1", f"-artifact_prefix={ROOT / '.fuzz' / name}-"]
    atheris.Setup([name, str(corpus), *limits, *options], target.take)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
