"""The script that ``gossipx run`` starts for bin/bench evidence: the shared training in a joined peer.

Usage: _evidence_gossipx.py FOLDER
"""

from __future__ import annotations

import sys

from _evidence_task import Assignment

import gossipx


def main() -> None:
    run = Assignment.read(sys.argv[1])
    model, optimizer = run.prepare()
    with gossipx.join(model, optimizer) as peer:
        run.train(peer.rank, model, optimizer, before_reading=peer.sync)


if __name__ == "__main__":
    main()
