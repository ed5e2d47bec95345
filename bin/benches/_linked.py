"""A script for ``gossipx run`` that trains on real images and reports the mean time of a step.

Usage: _linked.py MODEL STEPS FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional

import gossipx
from gossipx.tasks.data import Batches, load
from gossipx.tasks.models import build_model

SKIPPED = 4
"""Steps to skip: the first pull transfers the whole model, and much is initialised."""


def main() -> None:
    name, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.manual_seed(0)
    data = load("fashion-mnist")[0]
    model = build_model(name, classes=data.classes, channels=data.images.shape[1], pixels=data.images.shape[-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    with gossipx.join(model, optimizer) as peer:
        batches = Batches(data, 32, peer.rank)
        for step in range(steps + SKIPPED):
            if step == SKIPPED:
                began = time.monotonic()
            images, labels = next(batches)
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        took = time.monotonic() - began
    (folder / f"{peer.rank}.json").write_text(json.dumps(took / steps))


if __name__ == "__main__":
    main()
