"""The storage process: `python -m kvgate_lmcache.storage_process --start-id <id>`, started by the daemon and by nobody else.

It reads its settings from standard input, answers one ready line on standard output, takes one connection on a unix socket
that disappears with it, and ends with the daemon: on a stop request, when the connection closes, or when the daemon dies.
Whatever ends it (short of a kill -9), its pool goes with it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import shutil
import signal
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import structlog

from kvgate.storage.lmcache_settings import (
    MAX_LINE_BYTES,
    TMP_PREFIX,
    ProcessSettings,
    Ready,
    SettingsError,
)
from kvgate.storage.lmcache_wire import WIRE
from kvgate.storage.pool import ALIGN_BYTES, unlink_pool

from .build import adapter_configs, adapter_specs, build_manager, own_pool
from .clock import Deadline
from .internals import HostingError, Internals, check_version
from .quiet import own_streams, quiet_lmcache

_ACCEPT_S = 30.0
_ACCEPT_STEP_S = 0.2
_CLOSE_S = 5.0
_PR_SET_PDEATHSIG = 1

_log = structlog.get_logger("kvgate_lmcache.storage_process")


def main() -> None:
    """Read settings, serve until the end, clean up."""
    parser = argparse.ArgumentParser(prog="kvgate_lmcache.storage_process", description=__doc__)
    parser.add_argument("--start-id", required=True, help="names this start; the daemon sends the rest")
    start_id = parser.parse_args().start_id
    os.umask(0o077)
    answers = own_streams()
    try:
        settings = ProcessSettings.from_line(sys.stdin.buffer.readline(MAX_LINE_BYTES + 1))
        if settings.start_id != start_id:
            raise SettingsError("settings of another start")
    except (SettingsError, TypeError) as error:
        _answer(answers, Ready(WIRE, 0, 0, f"storage process: {error}"))
        sys.exit(2)
    stop = threading.Event()
    _end_with_parent(settings, stop)
    try:
        (_run_bridge if settings.attach_url else _run)(settings, stop, answers)
    except HostingError as error:
        _answer(answers, Ready(WIRE, 0, 0, str(error)))
        _remove_traces(settings)
        sys.exit(1)


def _run(settings: ProcessSettings, stop: threading.Event, answers: BinaryIO) -> None:
    check_version()
    specs = adapter_specs(settings)
    quiet_lmcache()
    l2_configs = adapter_configs(specs)
    manager = build_manager(settings)
    internals = Internals(manager)
    pool_fd = own_pool(settings, internals)
    from .ops import StorageOps

    ops = StorageOps(manager, internals, settings.pool_bytes, l2_configs)
    gc.collect()
    gc.freeze()  # torch's and LMCache's modules need no look at every collection
    connection = _accept(settings, stop, answers, Ready(WIRE, settings.pool_bytes, ALIGN_BYTES, ""))
    if connection is not None and not stop.is_set():
        from .server import Server

        server = Server(connection, ops, stop)
        server.start()
        stop.wait()
        if not server.drained:
            ops.drain(Deadline(settings.orphan_drain_s))
    _close(manager)
    os.close(pool_fd)
    _remove_traces(settings)
    # LMCache's threads are daemons and some wait without a time limit: no interpreter shutdown through them.
    sys.stderr.flush()
    os._exit(0)


def _run_bridge(settings: ProcessSettings, stop: threading.Event, answers: BinaryIO) -> None:
    check_version()
    quiet_lmcache()
    from .bridge import Bridge

    bridge = Bridge(settings, stop)
    connection = _accept(settings, stop, answers, bridge.open())
    if connection is not None:
        bridge.run(connection)
    _remove_traces(settings)
    sys.stderr.flush()
    os._exit(0)  # LMCache's client waits for its server without a time limit


def _end_with_parent(settings: ProcessSettings, stop: threading.Event) -> None:
    """SIGTERM is the order to stop, and the kernel sends it when the daemon dies. Ctrl-C is the daemon's business."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != settings.parent_pid:
        sys.exit(0)  # it died before the line above


def _accept(settings: ProcessSettings, stop: threading.Event, answers: BinaryIO, ready: Ready) -> socket.socket | None:
    """Listen, say so, and take the daemon's connection; the socket's name is gone before anyone else could use it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(settings.socket_path)
        except OSError as error:
            raise HostingError(f"cannot listen on the private socket: {error.strerror}") from error
        listener.listen(1)
        listener.settimeout(_ACCEPT_STEP_S)
        _answer(answers, ready)
        connection = _first_connection(listener, stop)
        Path(settings.socket_path).unlink(missing_ok=True)
    if connection is None:
        return None
    peer_pid, peer_uid, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    if peer_uid != os.geteuid() or peer_pid != settings.parent_pid:
        _log.error("connection_of_a_stranger_refused")
        connection.close()
        return None
    connection.setblocking(True)
    return connection


def _first_connection(listener: socket.socket, stop: threading.Event) -> socket.socket | None:
    patience = Deadline(_ACCEPT_S)
    while not stop.is_set() and not patience.passed():
        try:
            return listener.accept()[0]
        except TimeoutError:
            continue
    _log.error("daemon_did_not_connect")
    return None


def _close(manager: Any) -> None:
    """Close LMCache, but not for ever: an adapter whose server hangs must not keep the process."""
    closer = threading.Thread(target=manager.close, name="close", daemon=True)
    closer.start()
    closer.join(_CLOSE_S)
    if closer.is_alive():
        _log.warning("lmcache_did_not_close")


def _remove_traces(settings: ProcessSettings) -> None:
    unlink_pool(settings.pool_name)
    Path(settings.socket_path).unlink(missing_ok=True)
    for spec in settings.l2_adapters:
        if isinstance(folder := spec.get("base_path"), str):
            shutil.rmtree(Path(folder) / (TMP_PREFIX + settings.start_id), ignore_errors=True)


def _answer(answers: BinaryIO, ready: Ready) -> None:
    with contextlib.suppress(BrokenPipeError):  # the daemon has gone; the signal says so too
        answers.write(ready.to_line())
        answers.flush()


if __name__ == "__main__":
    main()
