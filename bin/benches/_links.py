"""Seconds per step by codec over emulated links, for a server and workers of ``gossipx run`` on separate hosts."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _bench.cached_runs import CachedRuns, Job
from _cluster import WORKERS
from emulated import EmulatedNetwork
from emulated.runs import train

RATES = {"10mbit": 12, "100mbit": 40, "1000mbit": 100}
"""Links, and steps of a run: an even number, because a codec that sends every second step alternates in length."""
MODEL = "resnet20"
TITLE = f"{MODEL}, {WORKERS} workers and a server, bsp, links shaped by tc"


def jobs(specs: Sequence[str], rounds: int) -> list[Job]:
    """Return the jobs: each round runs all codecs on all links in turn."""
    return [
        {"link": rate, "model": MODEL, "spec": spec, "round": number}
        for number in range(rounds)
        for rate in RATES
        for spec in specs
    ]


def run(job: Job) -> dict[str, Any]:
    """Run a job, and return ``seconds`` per step, the mean of the slowest worker."""
    codec = ("--push-codec", job["spec"], "--pull-codec", job["spec"])
    options = ("--servers", "0", "--servers-only", "--sync", "bsp", *codec, "--seed", str(job["round"]))
    with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(WORKERS + 1, job["link"]) as net:
        script = (Path(__file__).with_name("_scripts.py"), "timed", job["model"], str(RATES[job["link"]]), scratch)
        train(net, Path(scratch), "run", *options, *script)
        return {"seconds": max(json.loads(file.read_text()) for file in Path(scratch).glob("*.json"))}


def medians(rate: str, specs: Sequence[str], rounds: int, kept: CachedRuns) -> dict[str, float]:
    """Return the median seconds per step by codec."""
    made = [job for job in jobs(specs, rounds) if job["link"] == rate]
    return {spec: statistics.median(kept[job]["seconds"] for job in made if job["spec"] == spec) for spec in specs}
