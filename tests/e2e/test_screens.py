"""Pages as people see them: the report of ``gossipx compare --html`` in headless Chromium.

A page that is blank, or that lacks its curves, passes all other tests.
"""

from __future__ import annotations

import collections
import shutil
import subprocess
from pathlib import Path

import pytest
from resuming import BRIEF

from gossipx.metrics.plot import COLOURS
from runs import LONG, Folder

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="pages are drawn by Chromium: apt install chromium"),
]


def screenshot(page: str, target: Path, *options: str) -> collections.Counter[tuple[int, ...]]:
    """Draw a page without access to other hosts, and return the number of pixels of each colour."""
    image = pytest.importorskip("PIL.Image", reason="Pillow reads the picture")
    alone = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={target.parent / 'profile'}")
    alone = (*alone, "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    shape = ("--hide-scrollbars", "--force-device-scale-factor=1", f"--screenshot={target}", *options)
    subprocess.run([str(CHROMIUM), *alone, *shape, page], check=True, capture_output=True, timeout=LONG)
    with image.open(target) as opened:
        return collections.Counter(zip(*[iter(opened.convert("RGB").tobytes())] * 3, strict=True))


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def test_the_report_shows_curves_and_tables_without_a_network(two: Folder) -> None:
    for policy in ("tau:5", "adaptive"):
        name = policy.partition(":")[0]
        two.run("--policy", policy, "--iterations", "120", *BRIEF, "--eval-interval", "20", name=name)
    report = two.path / "report.html"
    two.gossipx("compare", "--logdir", two.path, "tau", "adaptive", "--html", report).end(code=0)
    pixels = screenshot(f"file://{report}", two.path / "report.png", "--window-size=1200,1700")
    first, second = (rgb(colour) for colour in COLOURS[:2])
    assert pixels[first] > 500 and pixels[second] > 500, "a line of each run"
    dark = sum(count for colour, count in pixels.items() if max(colour) < 90)
    assert dark > 5000, "text"
