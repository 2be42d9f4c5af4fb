"""``python -m kvgate.transfer.process``: started by the daemon and by nobody else, with one end of a socket pair.

It has no other connection, opens no file but the pool and workers' pages, and leaves nothing behind. It ends when the daemon asks, when
the socket closes, and (by the kernel's hand) when the daemon dies.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys

import structlog

from kvgate.transfer.records import CPU_DEVICE
from kvgate.transfer.wire import WIRE, Code, frame

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set up, say so, serve."""
    parser = argparse.ArgumentParser(prog="kvgate.transfer.process", description=__doc__)
    parser.add_argument("--owner", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--stage-bytes", type=int, default=0)
    parser.add_argument("--busy-share", type=float, default=0.0)
    options = parser.parse_args()
    _end_with(options.parent)
    # These reach the whole group: the daemon decides when this ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )
    with socket.socket(fileno=options.socket) as connection:
        connection.setblocking(True)
        try:
            # Imported here: nothing of torch is needed to say that it is not there.
            from kvgate.transfer.process.devices import CpuDevice, CudaDevice
            from kvgate.transfer.process.engine import Engine, Options
            from kvgate.transfer.process.serve import Server

            device = CpuDevice() if options.device == CPU_DEVICE else CudaDevice()
            engine = Engine(device, Options(options.threads, options.stage_bytes, options.busy_share))
            server = Server(connection, engine, device.enter)
        except (ImportError, RuntimeError) as error:
            text = f"the transfer process cannot use the device: {type(error).__name__}: {error}"
            connection.sendall(frame([0, int(Code.UNAVAILABLE), [WIRE, os.getpid(), text]]))
            sys.exit(1)
        connection.sendall(frame([0, int(Code.OK), [WIRE, os.getpid(), ""]]))
        server.run()


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, and end now if that has happened already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        sys.exit(0)


if __name__ == "__main__":
    main()
