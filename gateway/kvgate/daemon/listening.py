"""Listening sockets that stay polite when the process runs out of file descriptors, and the limit on these itself."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import structlog

log = structlog.get_logger(__name__)

ACCEPTS_A_TURN: Final = 1
"""To be given to asyncio as ``backlog``: so many connections it takes at once. Without a free descriptor it fails as often, logs a
traceback each time, and tries again from as many timers a second later, which add up."""
WAITING_CONNECTIONS: Final = 128
LOG_EVERY_S: Final = 10.0
MAX_DESCRIPTORS: Final = 1 << 16
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_descriptor_limit() -> int:
    """Let this process, and those it starts, open as many files as it may; returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def let_wait(server: asyncio.Server) -> None:
    """Let the usual number of connections wait in the kernel, for a server made with ``backlog=ACCEPTS_A_TURN``."""
    for listening in server.sockets:
        with socket.socket(fileno=os.dup(listening.fileno())) as same:
            same.listen(WAITING_CONNECTIONS)


def log_briefly(loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
    """From now on ``loop`` logs an accept that failed for want of a descriptor in one line, and not more often than necessary."""
    logged_s = -LOG_EVERY_S

    def handle(one: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal logged_s
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR and "socket" in context):
            one.default_exception_handler(context)
        elif clock() - logged_s >= LOG_EVERY_S:
            logged_s = clock()
            log.error("accept.failed", error=errno.errorcode[error.errno], remedy="raise the limit on open files (ulimit -n)")

    loop.set_exception_handler(handle)
