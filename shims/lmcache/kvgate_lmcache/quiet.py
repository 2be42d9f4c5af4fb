"""Keeps LMCache's own log texts out of our log: they hold object keys, folders and tracebacks.

What is left of a record is its level and where in LMCache it came from; the counters in ``status`` say the rest.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Any

import structlog

_QUIETED = ("lmcache", "asyncio")


def quiet_lmcache() -> None:
    """Call before the first import of LMCache. Sets its log level, turns its usage tracking off, and strips its records."""
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        del os.environ[name]  # hosting is decided here, not by what the daemon's shell happened to export
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    os.environ["LMCACHE_DISABLE_BANNER"] = "1"
    os.environ["LMCACHE_LOG_LEVEL"] = "WARNING"
    logging.setLogRecordFactory(_stripped(logging.getLogRecordFactory()))
    threading.excepthook = _log_thread_death


def log_to_stderr() -> None:
    """One JSON object per line on standard error, which the daemon's own log collects."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _stripped(make: Any) -> Any:
    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record: logging.LogRecord = make(*args, **kwargs)
        if record.name.split(".", 1)[0] in _QUIETED:
            kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else "message"
            record.msg = f"{kind} at {record.filename}:{record.lineno}, text withheld"
            record.args = None
            record.exc_info = None
            record.stack_info = None
        return record

    return factory


def _log_thread_death(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else "unknown"
    structlog.get_logger(__name__).error("thread_died", thread=name, error=args.exc_type.__name__)
