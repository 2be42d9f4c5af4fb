"""One run of a device's transfer process: started with one end of a socket pair, asked, killed when it hangs, buried."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import dataclass
from typing import Any

import structlog

from kvgate.transfer import GateShut, MoveRefused, SlotsInDoubt, TransferUnavailable
from kvgate.transfer.connection import Answer, Connection, ConnectionBroken
from kvgate.transfer.records import CPU_DEVICE
from kvgate.transfer.remains import remove_cuda_files
from kvgate.transfer.wire import MODULE, WIRE, Code, Op, WireError

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """How a process is started. threads: host threads of the kernels, 0 for all cores it may use.

    stage_bytes: GPU memory for payloads on their way, in each direction and for each worker; 0 for the kernels' own choice.
    busy_share: the most of a busy GPU's time that moves which nobody waits for take from the engines; 0 likewise.
    """

    python: str
    owner: str
    start_timeout_s: float
    threads: int = 0
    stage_bytes: int = 0
    busy_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Patience:
    """grace_s, grace_s_per_gb: how long after its deadline a move that has begun may still end before the process is killed.

    exit_s: how long a killed process may take to go before its slots are said to be in doubt.
    """

    grace_s: float
    exit_s: float
    grace_s_per_gb: float = 1.0


class Child:
    """A process that serves. ``gone`` is done when it has ended and nothing of it runs any more, its exit code the result."""

    def __init__(self, process: asyncio.subprocess.Process, connection: Connection, patience: Patience) -> None:
        """Use ``launch``."""
        self._process = process
        self.connection = connection
        self._patience = patience
        self.gone: asyncio.Task[int] = asyncio.create_task(_end_of(process))

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @classmethod
    async def launch(cls, device: str, settings: ChildSettings, patience: Patience) -> Child:
        """Start the process and wait for its first word. Raises ``TransferUnavailable`` with the cause, nothing left behind."""
        child = None
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                child = await cls._spawn(device, settings, patience)
                code, body = await child.connection.first
            wire, pid, error = body
            if code != Code.OK:
                raise TransferUnavailable(str(error))
            if wire != WIRE or pid != child.pid:
                raise TransferUnavailable("the transfer process is of another kvgate than this daemon: reinstall both together")
        except BaseException as error:  # a cancelled start must not leave a process either
            if child is not None:
                await child.bury()
            if isinstance(error, TimeoutError):
                text = f"the transfer process was not ready after {settings.start_timeout_s:g} s"
                raise TransferUnavailable(text) from error
            if isinstance(error, ConnectionBroken):
                raise TransferUnavailable("the transfer process ended before it was ready; see its log") from error
            if isinstance(error, OSError | ValueError | TypeError):
                raise TransferUnavailable(f"the transfer process does not start: {type(error).__name__}") from error
            raise
        return child

    @classmethod
    async def _spawn(cls, device: str, settings: ChildSettings, patience: Patience) -> Child:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            arguments = [
                "--owner",
                settings.owner,
                "--device",
                device,
                "--socket",
                str(theirs.fileno()),
                "--parent",
                str(os.getpid()),
            ]
            arguments += ["--threads", str(settings.threads), "--stage-bytes", str(settings.stage_bytes)]
            arguments += ["--busy-share", str(settings.busy_share)]
            process = await asyncio.create_subprocess_exec(
                settings.python,
                "-m",
                MODULE,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                # The process sees its own device and no other, so that it is number 0 there.
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "" if device == CPU_DEVICE else device},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            ours.setblocking(False)
            _, connection = await asyncio.get_running_loop().create_unix_connection(Connection, sock=ours)
        except BaseException:
            ours.close()  # the process ends when its socket does
            raise
        return cls(process, connection, patience)

    async def ask(self, op: Op, body: object, deadline_s: float) -> Any:
        """The answer to a request that moves nothing. One that is not answered by the deadline means that the process hangs.

        Raises ``Answer``, ``TransferUnavailable``.
        """
        try:
            _, future = self.connection.request(op, body, deadline_s)
            return await asyncio.wait_for(future, deadline_s)
        except TimeoutError:
            self._hangs(op)
            raise TransferUnavailable("the transfer process did not answer in time") from None
        except ConnectionBroken as error:
            raise TransferUnavailable(str(error)) from None

    async def move(self, op: Op, body: object, moved_bytes: int, deadline_s: float) -> Any:
        """The answer to PACK or UNPACK of ``moved_bytes``.

        However it ends, nothing is moved any more, but where it raises ``SlotsInDoubt``.
        """
        try:
            request_id, future = self.connection.request(op, body, deadline_s)
        except ConnectionBroken as error:
            raise TransferUnavailable(str(error)) from None
        except WireError as error:
            raise MoveRefused(str(error)) from None
        try:
            await asyncio.wait([future], timeout=deadline_s)
            if not future.done():
                # If it waits behind others it is taken back; if it has begun it gets a little longer.
                self.connection.post(Op.CANCEL, request_id)
                grace_s = self._patience.grace_s + self._patience.grace_s_per_gb * moved_bytes / 1e9
                await asyncio.wait([future], timeout=grace_s)
            if not future.done():
                self._hangs(op)
            return await self._settled(future)
        except Answer as answer:
            if answer.code in (Code.REFUSED, Code.SHUT):
                raise (GateShut if answer.code == Code.SHUT else MoveRefused)(str(answer)) from None
            raise TransferUnavailable(str(answer)) from None

    async def _settled(self, future: asyncio.Future[Any]) -> Any:
        """The answer, or ``TransferUnavailable`` once the process can touch nothing any more."""
        try:
            return await future
        except ConnectionBroken as error:
            self.kill()
            await asyncio.wait([self.gone], timeout=self._patience.exit_s)
            if not self.gone.done():
                raise SlotsInDoubt(_quiet(self.gone)) from None
            raise TransferUnavailable(str(error)) from None

    def _hangs(self, op: Op) -> None:
        _log.error("transfer.hangs", pid=self.pid, call=op.name.lower())
        self.kill()

    def kill(self) -> None:
        """SIGKILL, and break the connection. ``gone`` tells when it has worked."""
        self.connection.close()
        if self._process.returncode is not None:
            return
        try:
            # Not process.kill(): that polls, and can take the exit status from under asyncio's own wait.
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended meanwhile
        finally:
            os.close(pidfd)

    async def bury(self) -> bool:
        """Kill it and wait for its end; False where it does not end in time."""
        self.kill()
        await asyncio.wait([self.gone], timeout=self._patience.exit_s)
        if not self.gone.done():
            _log.error("transfer.does_not_end", pid=self.pid)
        return self.gone.done()


async def _end_of(process: asyncio.subprocess.Process) -> int:
    """Its exit code, when it is gone and nothing is left of it."""
    code = await process.wait()
    await asyncio.to_thread(remove_cuda_files, process.pid, os.geteuid())
    return code


def _quiet(gone: asyncio.Task[int]) -> asyncio.Future[None]:
    """``gone`` without its result, which cannot be cancelled from outside."""
    told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(_: asyncio.Task[int]) -> None:
        if not told.done():
            told.set_result(None)

    gone.add_done_callback(tell)
    return told
