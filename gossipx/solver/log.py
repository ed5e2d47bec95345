"""Log lines in Caffe's format, that of glog, so that Caffe's log parser and plotting tools can read them."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO


class _Glog(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        micros = int(record.created % 1 * 1e6)
        place = f"{record.filename}:{record.lineno}]"
        return f"{record.levelname[0]}{moment}.{micros:06d} {record.process:5d} {place} {record.getMessage()}"


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # not generic before Python 3.11
    """Writes lines; when it cannot, it logs one warning, and later lines are tried again."""

    _has_warned = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - of logging
        error = sys.exc_info()[1]
        if not self._has_warned:
            self._has_warned = True
            name = getattr(self.stream, "name", "the solver's log")
            logging.getLogger("gossipx").warning("%s: lines of the log cannot be written (%s)", name, error)


def to_stream(stream: TextIO) -> logging.Logger:
    """Return a new logger to ``stream``, with lines ``I0210 13:39:22.381027 25210 solver.py:204] Iteration 100``."""
    log = logging.Logger("gossipx.solver")
    handler = _Handler(stream)
    handler.setFormatter(_Glog())
    log.addHandler(handler)
    return log
