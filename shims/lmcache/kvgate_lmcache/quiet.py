"""Keeps LMCache's own log texts out of our log: they hold object keys, folders and tracebacks.

What is left of a record is its level and where in LMCache it came from; the counters in ``status`` say the rest.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

import structlog

_QUIETED = ("lmcache", "asyncio")
_REPEAT_S = 60.0


def quiet_lmcache() -> None:
    """Call before the first import of LMCache: usage tracking off, no GPU, and only stripped log records."""
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    os.environ["LMCACHE_DISABLE_BANNER"] = "1"
    os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"
    # Nothing here needs a GPU, and LMCache would make a CUDA context only to pin the pool in this process.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Python's own tracker tidies the pool up after a kill -9, as the daemon does, and warns about it.
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker:UserWarning"
    logging.setLogRecordFactory(_Stripper(logging.getLogRecordFactory()))
    threading.excepthook = _log_thread_death


def own_streams() -> BinaryIO:
    """Take standard output and error for ourselves; the stream of answers to the daemon.

    LMCache's C++ parts print object keys to the one and could fill the other, which nobody reads after the ready line. They
    get /dev/null; our log (one JSON object per line) and Python's own messages go where standard error went.
    """
    answers = os.fdopen(os.dup(1), "wb")
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    return answers


class _Stripper:
    """Makes log records; those of LMCache without their text, and at most one a minute from each place in its code."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make
        self._next: dict[tuple[str, int], float] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        if record.name.split(".", 1)[0] not in _QUIETED:
            return record
        kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else "message"
        record.msg = f"{kind} at {record.filename}:{record.lineno}, text withheld"
        record.args = None
        record.exc_info = None
        record.stack_info = None
        place = (record.filename, record.lineno)
        if record.created < self._next.get(place, 0.0):
            record.levelno = logging.NOTSET  # below every handler's level: not emitted
        else:
            self._next[place] = record.created + _REPEAT_S
        return record


def _log_thread_death(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else "unknown"
    structlog.get_logger(__name__).error("thread_died", thread=name, error=args.exc_type.__name__)
