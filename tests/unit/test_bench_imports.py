"""All benchmarks can be imported: a name that was changed in gossipx must not wait until someone runs them."""

from __future__ import annotations

import pytest
from forks.client import TESTS, Piped

BENCHES = TESTS.parent / "bin" / "benches"
FOREIGN = "_hivemind"  # runs in an environment of its own, which contains hivemind


@pytest.mark.slow
def test_every_benchmark_can_be_imported() -> None:
    files = sorted(str(file) for file in BENCHES.glob("*.py") if file.stem != FOREIGN)
    assert str(BENCHES / "exchange.py") in files
    # By path, since codecs.py has the name of a module of the standard library.
    program = f"""
import runpy, sys
sys.path += {[str(BENCHES), str(TESTS)]!r}
for file in {files!r}:
    runpy.run_path(file, run_name="imported")
print("imported")
"""
    with Piped("-c", program) as process:
        assert process.stdout.read() == "imported\n"
