"""Facts about this machine: its devices, and the model that it would train."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from gossipx.assembly.devices import check_device
from gossipx.assembly.presets import effective_config
from gossipx.errors import UsageError, printable
from gossipx.launch.environment import ENV_CONFIG, ENV_DESCRIBE, ENV_DEVICE, ENV_PEERS, ENV_RANK
from gossipx.launch.hosts import PeerLine
from gossipx.launch.run.children import command_of
from gossipx.launch.start import check_script
from gossipx.settings import files
from gossipx.settings.sections import RunConfig
from gossipx.tools.doctor.verdicts import Verdict

_JOIN = 120.0  # seconds in which a script must reach gossipx.join: it may read data first


def check_devices(host: str, peers: Sequence[PeerLine], default: str) -> Iterator[Verdict]:
    """Yield verdicts on the devices of a host's lines: each must exist and not be shared."""
    for name, lines in Counter(peer.device or default for peer in peers).items():
        in_file = any(peer.device == name for peer in peers)
        try:
            check_device(name, "device=" if in_file else "--device")
        except UsageError as error:
            advice = f"correct {'device= in the hosts file' if in_file else '--device there'}"
            yield Verdict("fail", "devices", f"{host}: {error}", advice)
            continue
        if lines > 1 and name != "cpu":
            text = f"{name} on {host} is shared by {lines} lines"
            yield Verdict("warn", "devices", text, "give each line a device of its own")
        else:
            yield Verdict("ok", "devices", f"{name} on {host}")


def described_model(
    settings: RunConfig, peers: int, file: Path, first: PeerLine, script: list[str] | None
) -> tuple[str, str, str]:
    """Return a title of the model that peer ``first`` would train, its tensors by line, and why they are missing."""
    if script is None:
        return "", "", ""
    check_script(script)
    complete = effective_config(settings, peers, bool(script))
    title = script[0] if script else f"{complete.task.model} for {complete.task.task}"
    with tempfile.TemporaryDirectory() as folder:
        options, tensors, printed = (Path(folder, name) for name in ("config.toml", "tensors", "printed"))
        options.write_text(files.dump(complete), encoding="utf-8")
        environment = {
            "OMP_NUM_THREADS": str(settings.run.threads),
            **os.environ,
            ENV_CONFIG: str(options),
            ENV_PEERS: str(file.resolve()),
            ENV_RANK: str(first.rank),
            ENV_DEVICE: first.device or settings.run.device,
            ENV_DESCRIBE: str(tensors),
        }
        try:
            with printed.open("wb") as output:
                ended = subprocess.run(
                    command_of(script),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=_JOIN,
                    start_new_session=True,
                    check=False,
                )
        except subprocess.TimeoutExpired:
            return title, "", f"{title} did not reach gossipx.join within {_JOIN:g} s"
        if tensors.is_file():
            return title, tensors.read_text(encoding="utf-8"), ""
        last = printed.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        return title, "", printable(f"{title} ended without gossipx.join (exit code {ended.returncode}): {last}")
