"""The fingerprint of the model that a run would train: a process of its own builds it, up to ``gossipx.join``."""

from __future__ import annotations

import os
import selectors
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from gossipx.config import files, security
from gossipx.config.settings import RunConfig
from gossipx.errors import GossipxError, UsageError
from gossipx.launch.children import Child, command_of, script_exists
from gossipx.launch.environment import ENV_CONFIG, ENV_DESCRIBE, ENV_DEVICE, ENV_PEERS, ENV_PROGRESS, ENV_RANK
from gossipx.launch.hosts import PeerLine
from gossipx.tools.doctor.probe import fit

WITHIN = 120.0  # seconds in which a script must reach its gossipx.join: it may have data to read first


def look(
    settings: RunConfig, peers: int, file: Path, first: PeerLine, script: list[str] | None
) -> tuple[str, bytes, str]:
    """Return what peer ``first`` would train, in words; the description of that model; and why there is none."""
    if script is None:
        return "", b"", ""
    from gossipx.assembly.settings import effective_config

    complete = effective_config(settings, peers, bool(script))
    complete = replace(complete, exchange=security.absolute(complete.exchange))
    what = script[0] if script else f"{complete.task.model} for {complete.task.task}"
    if not script_exists(script):
        raise UsageError("no such script", file=script[0])
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as options:
        options.write(files.dump(complete))
        options.flush()
        environment = {
            "OMP_NUM_THREADS": str(settings.run.threads),
            **os.environ,
            ENV_CONFIG: options.name,
            ENV_PEERS: str(file.resolve()),
            ENV_RANK: str(first.rank),
            ENV_DEVICE: first.device or settings.run.device,
            ENV_DESCRIBE: "1",
        }
        try:
            return what, _manifest(command_of(script), environment), ""
        except GossipxError as error:
            return what, b"", fit(f"{what} {error}")


def _manifest(command: list[str], environment: dict[str, str]) -> bytes:
    """Return the description of the model, one line per tensor; GossipxError if there is none."""
    told: dict[str, Any] = {}
    printed = [""]
    child = Child(command, environment, ENV_PROGRESS, on_line=printed.append, on_event=told.update)
    until = time.monotonic() + WITHIN
    with selectors.DefaultSelector() as selector:
        try:
            child.register(selector)
            while child.process.poll() is None and time.monotonic() < until:
                for key, _ in selector.select(0.1):
                    if key.fd in selector.get_map():
                        key.data()
            child.drain(selector)
        finally:
            child.signal(signal.SIGKILL)
            child.process.wait()
    if "manifest" in told:
        return str(told["manifest"]).encode()
    if child.process.returncode == -signal.SIGKILL:
        raise GossipxError(f"did not reach gossipx.join within {WITHIN:g} s")
    last = told.get("error", printed[-1].strip())
    raise GossipxError(f"ended without gossipx.join ({child.how_it_ended()}): {last}")
