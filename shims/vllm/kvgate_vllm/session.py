"""The scheduler's session with the gateway: the handle its workers got, the domain's keys, adapters, and the epoch of its leases."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final, cast

from kvgate.client import Call, GatewayClient, GatewayRefused, GatewayUnavailable
from kvgate.contract.artifacts import Artifact as ContractArtifact
from kvgate.contract.artifacts import ArtifactSet
from kvgate.contract.digests import DIGEST_BYTES
from kvgate.contract.record import Record
from kvgate.protocol.catalog import SINCE
from kvgate.protocol.messages import AdapterRegistered, Opened, OpenEngine, RegisterAdapter, Welcome
from kvgate.protocol.rotation_messages import OpenPrevious, PreviousOpened

LOGGER: Final = logging.getLogger("vllm.kvgate")

CALL_S: Final = 5.0
REPLY_S: Final = 30.0
"""Deadline of messages whose late answer still has to be dealt with (a lease to release): far beyond anyone's patience for it."""
OPEN_BACKOFF_FIRST_S: Final = 0.05
OPEN_BACKOFF_LAST_S: Final = 1.0
MAX_ADAPTERS: Final = 4096


def artifact_set(artifacts: Any) -> ArtifactSet:
    """The plugin's artifacts as the contract's record."""
    return ArtifactSet(
        artifacts=tuple(ContractArtifact(role=a.role, size_bytes=a.size_bytes, digest=a.digest) for a in artifacts)
    )


@dataclass(eq=False)
class AdapterBinding:
    """One adapter as the gateway knows it: the digest to bind with, and how many ranks have confirmed loading it."""

    digest: bytes
    confirmed: bool
    ranks: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class EarlierKeys:
    """The domain's keys under an earlier secret of the deployment, whose objects the gateway still reads."""

    token_key: bytes
    salt_key: bytes


@dataclass(frozen=True, slots=True)
class Open:
    """An opened engine. ``epoch`` grows with every opening: leases of an earlier one are void."""

    epoch: int
    handle: bytes
    keys: Opened
    earlier: tuple[EarlierKeys, ...] = ()


class Session:
    """Opens the engine at the gateway, and again after every reconnect and every new registration.

    Methods are called by the scheduler's thread; what ends in ``_on_loop`` runs on the client's loop.
    """

    def __init__(self, endpoint: str, credential: bytes | None, world_size: int) -> None:
        self.client = GatewayClient(endpoint, "scheduler", credential, on_connect=self._on_connect)
        self._world_size = world_size
        self._handle: bytes | None = None
        self._open: Open | None = None
        self._epoch = 0
        self._opening: asyncio.Task[None] | None = None
        self._adapters: OrderedDict[bytes, AdapterBinding] = OrderedDict()
        self._opened = threading.Event()
        self.domain: bytes | None = None

    def start(self) -> None:
        """Begin connecting."""
        self.client.start()

    def close(self) -> None:
        """End the connection; the gateway releases every lease of it."""
        self._open = None
        self.client.close()

    def current(self) -> Open | None:
        """The opened engine, None while requests cannot be bound."""
        return self._open if self.client.connected else None

    def set_handle(self, handle: bytes) -> None:
        """Workers registered (again): open their registration. Leases of the one before are void."""
        self._handle = handle
        self._open = None
        self.client.spawn(self._open_again())

    def reopen(self, seen: Open) -> None:
        """The gateway said that ``seen`` is no longer valid: ask again until it is, or until a new handle comes."""
        if self._open is seen:
            self._open = None
            self.client.spawn(self._open_again())

    def wait_open(self, timeout_s: float) -> bool:
        """Block until the engine is opened, at most ``timeout_s``: for the start of the engine only."""
        return self._opened.wait(timeout_s)

    def adapter(self, key: bytes) -> AdapterBinding | None:
        """The adapter of that plugin key, if it was registered since the engine was opened."""
        return self._adapters.get(key)

    def adapter_confirmed(self, digest: bytes, ranks: int) -> None:
        """``ranks`` more workers have confirmed that they loaded the adapter of this digest."""
        for binding in self._adapters.values():
            if binding.digest == digest:
                binding.ranks += ranks
                binding.confirmed = binding.confirmed or binding.ranks >= self._world_size

    async def register_adapter(self, opened: Open, key: bytes, artifacts: Any) -> AdapterBinding:
        """Make an adapter known to the gateway, once per opening. On the client's loop."""
        known = self._adapters.get(key)
        if known is not None:
            return known
        message = RegisterAdapter(handle=opened.handle, adapter=artifact_set(artifacts))
        reply = cast(AdapterRegistered, await self.client.request(message, CALL_S))
        binding = AdapterBinding(reply.adapter, reply.confirmed)
        if self._open is opened:
            self._adapters[key] = binding
            while len(self._adapters) > MAX_ADAPTERS:
                self._adapters.popitem(last=False)
        return binding

    async def _on_connect(self, _call: Call, _welcome: Welcome) -> None:
        self._open = None
        # Not awaited: workers may take long to come back, and the connection is fine meanwhile.
        self._restart_opening()

    async def _open_again(self) -> None:
        self._restart_opening()

    def _restart_opening(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        self._opening = asyncio.ensure_future(self._keep_opening())

    async def _keep_opening(self) -> None:
        """Ask until the registration is sealed; a revoked one stays closed until another handle comes."""
        backoff_s = OPEN_BACKOFF_FIRST_S
        while self._handle is not None:
            handle = self._handle
            try:
                keys = cast(Opened, await self.client.request(OpenEngine(handle=handle), CALL_S))
                earlier = await self._earlier_keys(handle)
            except GatewayRefused as error:
                if error.code not in ("unsealed", "busy", "deadline", "unavailable"):
                    LOGGER.warning("kvgate: the gateway does not open this engine: %s", error)
                    return
            except GatewayUnavailable:
                pass  # not connected (yet): the next connection starts this anew, the next round tries anyway
            else:
                self._epoch += 1
                self._adapters.clear()
                self.domain = keys.domain
                self._open = Open(self._epoch, handle, keys, earlier)
                self._opened.set()
                return
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, OPEN_BACKOFF_LAST_S)

    async def _earlier_keys(self, handle: bytes) -> tuple[EarlierKeys, ...]:
        welcome = self.client.welcome
        if welcome is None or welcome.wire < SINCE[OpenPrevious]:
            return ()
        try:
            reply = cast(PreviousOpened, await self.client.request(OpenPrevious(handle=handle), CALL_S))
        except GatewayRefused as error:
            if error.failure.field == "type":
                return ()  # a gateway that does not know the message
            raise
        token_keys, salt_keys = _pieces(reply.token_keys), _pieces(reply.salt_keys)
        return tuple(EarlierKeys(token_key, salt_key) for token_key, salt_key in zip(token_keys, salt_keys, strict=True))


def _pieces(data: bytes) -> list[bytes]:
    return [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]


async def ask(client: GatewayClient, message: Record) -> Record:
    """A request whose answer must be dealt with even when it is late."""
    return await client.request(message, REPLY_S)
