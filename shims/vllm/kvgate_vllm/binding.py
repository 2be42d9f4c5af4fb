"""One request bound at the gateway: its lease, what of it is present, and the one bounded acquire before a load.

The scheduler's thread starts things and looks at the results; the waiting happens on the client's loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from kvgate.client import GatewayRefused, GatewayUnavailable
from kvgate.contract.record import Record
from kvgate.protocol.messages import Acquire, Acquired, Bind, Bound, Explain, Explained, Extend, Extended, Release
from kvgate.protocol.rotation_messages import LookPrevious, PreviousLooked
from kvgate.protocol.variant_messages import BindVariant, ModelOpened, OpenModel, VariantBound
from kvgate_vllm.session import CALL_S, REPLY_S, AdapterBinding, Open, Session, ask

if TYPE_CHECKING:
    from kvgate_vllm.state import Adapter

LOGGER: Final = logging.getLogger("vllm.kvgate")
T = TypeVar("T")

MAX_ACQUIRES: Final = 4
"""Acquires of one lookup: a new one is needed only when vLLM's local hit shrank below what was acquired."""
ACQUIRE_MARGIN_S: Final = 1.0
FRESH_S: Final = 0.05
"""So long what the bind found is all that is asked for. A request that waits longer in the engine's queue may find more by then."""
LOST: Final = ("revoked", "unsealed")
"""Refusals that mean: the registration is gone, and with it every lease of this opening."""


@dataclass(frozen=True, slots=True)
class VariantBind:
    """What binds a request to one artifact. ``digests(key)``: the ``t`` of its chunks under another token key."""

    capability: bytes = field(repr=False)
    scope: str
    digests: Callable[[bytes], list[bytes]]


@dataclass(frozen=True, slots=True, repr=False)
class EarlierPrompt:
    """A prompt by the keys of an earlier secret: its salt, and the ``t`` of its chunks."""

    salt: bytes | None
    tokens: list[bytes]


@dataclass(frozen=True, slots=True)
class Acquisition:
    """One acquire under way or done."""

    first: int
    last: int
    reply: Future[int]


class Binding:
    """A bind, and the lease that came of it. Valid while ``session`` still has the same opening."""

    def __init__(
        self,
        session: Session,
        opened: Open,
        adapter: Adapter | None,
        salt: bytes | None,
        tokens: list[bytes],
        variant: VariantBind | None = None,
        earlier: tuple[EarlierPrompt, ...] = (),
    ) -> None:
        """``earlier``: the same prompt by the keys of each of ``opened.earlier``, or none."""
        self._earlier = earlier
        self._session = session
        self.opened = opened
        self._released = False
        self.lease: bytes | None = None
        self.adapter: AdapterBinding | None = None
        self.known = 0
        self.present = 0
        self.probing = False
        self._bound_at = 0.0
        self.explaining = False
        self.reference = ""
        self.missed: list[str] | None = None
        self.refused: str | None = None
        """The field that the gateway refused the bind for; None: it did not."""
        self._variant = variant
        self._extending = False
        self._extend_failed = False
        self._acquires: list[Acquisition] = []
        self.done: Future[None] = self._begin(adapter, salt, tokens)

    @property
    def lost(self) -> bool:
        """Bind failed, or the lease is of an earlier opening."""
        failed = self.done.done() and self.lease is None
        return failed or self._session.current() is not self.opened

    @property
    def may_hit(self) -> bool:
        """Whether the gateway knows, or is finding out about, any chunk of this request."""
        return self.probing or self.present > 0

    @property
    def worth_asking(self) -> int:
        """How many chunks from the first an acquire may find: those that the bind found, while that is new."""
        if self.probing or time.monotonic() - self._bound_at > FRESH_S:
            return self.known
        return self.present

    def acquire(self, first: int, last: int, deadline_s: float) -> Acquisition | None:
        """The acquire that covers ``first``, started if there is none. None: no more are allowed."""
        for acquisition in self._acquires:
            if acquisition.first <= first:
                return acquisition
        if self.lease is None or len(self._acquires) >= MAX_ACQUIRES:
            return None
        message = Acquire(lease=self.lease, first=first, last=last, deadline_ms=max(1, int(deadline_s * 1000)))
        made = Acquisition(first, last, Future())
        self._acquires.append(made)
        reply = self._session.client.submit(message, deadline_s + ACQUIRE_MARGIN_S)
        reply.add_done_callback(partial(self._acquired, made))
        return made

    def forget_acquires(self, stored: int) -> None:
        """The request was preempted: the next lookup acquires anew, what the request itself has ``stored`` meanwhile too."""
        self._acquires.clear()
        self.present = max(self.present, min(stored, self.known))

    def explain(self, *, again: bool = False) -> None:
        """Ask why this request missed, without waiting: ``missed`` has the reasons once the answer is here. Once, unless ``again``."""
        if self.lease is not None and (again or not self.explaining):
            self.explaining = True
            self._session.client.spawn(_logged(self._explain(Explain(lease=self.lease))))

    def extend(self, tokens: list[bytes]) -> bool:
        """Tell the gateway the ``t`` of the chunks from ``known`` on; ``known`` grows with its answer. False: it refused before."""
        if self.lease is None or self._extend_failed or self.lost:
            return False
        if not self._extending:
            self._extending = True
            message = Extend(lease=self.lease, first=self.known, tokens=b"".join(tokens))
            self._session.client.spawn(_logged(self._extend(message)))
        return True

    def release(self) -> None:
        """Give the lease back, now or as soon as it is known. Once."""
        if not self._released:
            self._released = True
            if self.lease is not None:
                self._session.client.submit(Release(lease=self.lease), CALL_S)

    def _begin(self, adapter: Adapter | None, salt: bytes | None, tokens: list[bytes]) -> Future[None]:
        """Bind. Where one message will do, this thread sends it: it is on its way before the client's loop wakes up."""
        known = None if adapter is None else self._session.adapter(adapter.digest)
        if (adapter is not None and known is None) or self._variant is not None or self._earlier:
            return self._session.client.spawn(_logged(self._bind(adapter, salt, tokens)))
        self.adapter = known
        done: Future[None] = Future()
        reply = self._session.client.submit(self._ordinary(salt, tokens), REPLY_S)
        reply.add_done_callback(partial(self._bound, done, len(tokens)))
        return done

    def _bound(self, done: Future[None], known: int, reply: Future[Record]) -> None:
        try:
            bound = cast(Bound, reply.result(0))
            self._note_bound(bound, known)
            self._take(bound.lease)
        except (GatewayRefused, GatewayUnavailable) as error:
            self._note_refused(error)
        finally:
            done.set_result(None)

    async def _bind(self, adapter: Adapter | None, salt: bytes | None, tokens: list[bytes]) -> None:
        try:
            if adapter is not None:
                self.adapter = await self._session.register_adapter(self.opened, adapter.digest, adapter.artifacts)
            message = await self._message(salt, tokens)
            bound = cast("Bound | VariantBound", await ask(self._session.client, message))
        except (GatewayRefused, GatewayUnavailable) as error:
            self._note_refused(error)
            return
        self._note_bound(bound, len(tokens))
        await self._look_earlier(bound.lease)
        self._take(bound.lease)

    def _note_bound(self, bound: Bound | VariantBound, known: int) -> None:
        self.present, self.probing, self.known = bound.present, bound.probing, known
        self._bound_at = time.monotonic()
        self.reference = bound.reference

    def _take(self, lease: bytes) -> None:
        """The lease may be used, or given back where it came too late."""
        self.lease = lease
        if self._released:
            self._session.client.submit(Release(lease=lease), CALL_S)

    def _note_refused(self, error: GatewayRefused | GatewayUnavailable) -> None:
        if isinstance(error, GatewayRefused):
            self.refused = error.failure.field
        self._note(error)

    async def _look_earlier(self, lease: bytes) -> None:
        """Have the gateway look for what is not here where earlier secrets put it."""
        for number, prompt in enumerate(self._earlier):
            if self.present >= self.known or self._released:
                return
            message = LookPrevious(lease=lease, secret=number, salt=prompt.salt, tokens=b"".join(prompt.tokens))
            try:
                looked = cast(PreviousLooked, await ask(self._session.client, message))
            except (GatewayRefused, GatewayUnavailable) as error:
                self._note(error)
                return
            self.present, self.probing = max(self.present, looked.present), self.probing or looked.probing

    async def _message(self, salt: bytes | None, tokens: list[bytes]) -> Record:
        adapter = self.adapter.digest if self.adapter else None
        if self._variant is None:
            return self._ordinary(salt, tokens)
        if self._variant.scope == "global":
            opened = await ask(self._session.client, OpenModel(handle=self.opened.handle, model=None))
            shared = cast(ModelOpened, opened).shared_token_key
            # Without a shared key the gateway allows no such artifact, and refuses this one.
            tokens = tokens if shared is None else self._variant.digests(shared)
        return BindVariant(
            handle=self.opened.handle,
            adapter=adapter,
            salt=salt,
            capability=self._variant.capability,
            tokens=b"".join(tokens),
        )

    def _ordinary(self, salt: bytes | None, tokens: list[bytes]) -> Bind:
        return Bind(
            handle=self.opened.handle,
            adapter=self.adapter.digest if self.adapter else None,
            salt=salt,
            scope="prefix",
            scope_key=None,
            manifest=None,
            tokens=b"".join(tokens),
        )

    def _acquired(self, made: Acquisition, reply: Future[Record]) -> None:
        end = made.first
        try:
            end = cast(Acquired, reply.result(0)).end
        except (GatewayRefused, GatewayUnavailable) as error:
            self._note(error)
        finally:
            made.reply.set_result(end)

    async def _explain(self, message: Explain) -> None:
        try:
            self.missed = list(cast(Explained, await self._session.client.request(message, CALL_S)).reasons)
        except (GatewayRefused, GatewayUnavailable) as error:
            self._note(error)

    async def _extend(self, message: Extend) -> None:
        try:
            self.known = cast(Extended, await self._session.client.request(message, CALL_S)).chunks
        except (GatewayRefused, GatewayUnavailable) as error:
            self._extend_failed = True
            self._note(error)
        finally:
            self._extending = False

    def _note(self, error: GatewayRefused | GatewayUnavailable) -> None:
        LOGGER.debug("kvgate: %s", error)
        if isinstance(error, GatewayRefused) and error.code in LOST:
            self._session.reopen(self.opened)


async def _logged(work: Coroutine[Any, Any, T]) -> T:
    """Nobody waits for these with a traceback in hand: a fault must be seen where it happens."""
    try:
        return await work
    except Exception:
        LOGGER.exception("kvgate: a lookup failed")
        raise
