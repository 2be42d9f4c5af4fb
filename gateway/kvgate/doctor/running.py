"""Checks of a gateway that runs: whether it answers, whether it is of this build, and what its storage says."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
from pathlib import Path
from typing import Any, Final

import aiohttp

from kvgate import __version__
from kvgate.contract.errors import ContractError
from kvgate.doctor.findings import Report, Subject, command
from kvgate.doctor.remains import gateway_pid
from kvgate.protocol.framing import HEADER, frame_bytes, frame_length, parse_frame
from kvgate.protocol.messages import Failure, Hello, Welcome
from kvgate.protocol.versions import SCHEMA_VERSIONS, WIRE_VERSIONS, Range

_ANSWER_S: Final = 5.0


class NoGateway(Exception):
    """What answers is something else than a gateway."""


def check_gateway(subject: Subject, report: Report) -> None:
    """A running gateway answers on both sockets, is of this build, and is ready."""
    config = subject.config
    state_dir = Path(config.state_dir)
    pid = gateway_pid(state_dir)
    again = f"{command('kill', '-TERM', pid)} && {command('kvgate', 'serve', '--state-dir', state_dir)}"
    if not pid:
        report.ok("none runs on this state directory")
        return
    try:
        status = asyncio.run(_status(config.admin_path))
        welcome = _hello(config.socket_path)
    except (aiohttp.ClientError, OSError, ValueError, ContractError, NoGateway) as error:
        report.fail(
            f"process {pid} does not answer ({type(error).__name__})", again + f"   # kill -KILL {pid} if it does not end"
        )
        return
    if isinstance(welcome, Failure):
        report.fail(f"the gateway refuses this build ({welcome.code}): {welcome.problem}", again)
        return
    builds = {str(build).removeprefix("kvgate ") for build in (status.get("build"), welcome.build)}
    if builds != {__version__}:
        report.fail(f"kvgate {', '.join(sorted(builds))} runs, {__version__} is installed: upgrade the older", again)
        return
    if status.get("ready") != "yes":
        report.fail(f"it runs and is not ready: {status.get('ready')}", command("kvgate", "status", "--state-dir", state_dir))
        return
    report.ok(f"process {pid}, kvgate {__version__}, ready")
    _look_at_storage(status.get("storage"), state_dir, report)
    _look_at_transfer(status.get("transfer"), report)


def _look_at_storage(storage: Any, state_dir: Path, report: Report) -> None:
    counts = storage if isinstance(storage, dict) else {}
    ask = command("kvgate", "status", "--state-dir", state_dir)
    if counts.get("problem"):
        report.fail(f"its storage does not answer: {counts['problem']}", ask)
    if away := counts.get("l2_adapters_away"):
        report.warn(f"{away} of its {counts.get('l2_adapters')} L2 adapters are away", "kvgate doctor --only l2")
    failed = int(counts.get("l2_store_failed_objects", 0)) + int(counts.get("l2_store_lost_objects", 0))
    if failed:
        report.warn(f"{failed} objects did not reach L2 since its start", "kvgate doctor --only disk --only l2")


def _look_at_transfer(transfer: Any, report: Report) -> None:
    for device, counts in (transfer if isinstance(transfer, dict) else {}).items():
        if isinstance(counts, dict) and counts.get("problem"):
            report.warn(f"nothing is moved on {device}: {counts['problem']}", "kvgate doctor --only kernels --only memory")


async def _status(path: Path) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(path)), timeout=timeout) as session,
        session.get("http://kvgate/status") as reply,
    ):
        answer = await reply.json()
    if not isinstance(answer, dict):
        raise NoGateway
    return answer


def _hello(path: Path) -> Welcome | Failure:
    wire, schema = Range.of(WIRE_VERSIONS), Range.of(SCHEMA_VERSIONS)
    hello = Hello(
        role="client",
        build=__version__,
        wire_lowest=wire.lowest,
        wire_highest=wire.highest,
        schema_lowest=schema.lowest,
        schema_highest=schema.highest,
        credential=None,
    )
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect(str(path))
        connection.sendall(frame_bytes(1, hello))
        with connection.makefile("rb") as stream:
            header = stream.read(HEADER.size)
            if len(header) != HEADER.size:
                raise ConnectionResetError
            message = parse_frame(stream.read(frame_length(header))).message()
    if not isinstance(message, Welcome | Failure):
        raise NoGateway
    return message


def check_admin_tcp(subject: Subject, report: Report) -> None:
    """The address of the admin HTTP is free, or this gateway's; and not open to the network."""
    config = subject.config
    if not config.admin_tcp:
        report.ok("none configured")
        return
    host, _, port = config.admin_tcp.rpartition(":")
    host = host.strip("[]")
    if not gateway_pid(Path(config.state_dir)):
        try:
            found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
            with socket.socket(found[0], found[1]) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(found[4])
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else "no such host"
            users = f"ss -ltnp 'sport = :{port}'" if error.errno == errno.EADDRINUSE else "ip -br address"
            report.fail(f"{config.admin_tcp}: {why}", f"{users}   # then choose another with --admin-tcp HOST:PORT")
            return
    if re.fullmatch(r"localhost|127(\.\d+){3}|::1", host) is None:
        found_open = f"{config.admin_tcp} is open to the network, and asks nobody who they are"
        report.warn(found_open, command("kvgate", "serve", "--admin-tcp", f"127.0.0.1:{port}"))
    else:
        report.ok(config.admin_tcp)
