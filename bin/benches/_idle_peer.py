"""A second peer in a separate process, which joins and does not train: it only serves pulls of its model."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from _remote import SECONDS, end_with_parent
from _trained import Trained


class IdlePeer:
    """The second of two peers, for the duration of a ``with`` block; it joins asynchronously.

    Args:
        model: a key of MODELS.
        hosts: the hosts file.
        settings: the run's settings.
    """

    def __init__(self, model: str, hosts: Path, settings: dict[str, Any]):
        command = [sys.executable, __file__, model, str(hosts), json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def __enter__(self) -> IdlePeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(SECONDS)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    model, hosts, settings = sys.argv[1:]
    peer = Trained(model, 1).join(Path(hosts), rank=1, **json.loads(settings))
    sys.stdin.read()
    peer.close()
