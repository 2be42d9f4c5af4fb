"""The connector in a vLLM worker: registers what was loaded, restores and stores pages, and never lets a fault reach the engine.

Methods are called on the worker's step thread unless their comment says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from kvgate.client import Call, GatewayClient, GatewayRefused, GatewayUnavailable
from kvgate.contract.artifacts import ArtifactSet
from kvgate.contract.errors import ContractError
from kvgate.protocol.catalog import SINCE
from kvgate.protocol.messages import ConfirmAdapter, Registered, Revoke, Welcome
from kvgate.protocol.page_messages import KeepWrites
from kvgate_kernels import GeometryError
from kvgate_vllm.describe import describe_engine
from kvgate_vllm.jobs import Job, JobThread
from kvgate_vllm.metadata import AdapterRef, ChunkOp, LoadOp, LoadResult, StepMetadata, StoreOp, WorkerReport
from kvgate_vllm.registration import Uncacheable, WorkerForm, worker_form
from kvgate_vllm.session import artifact_set
from kvgate_vllm.settings import ConnectorSettings
from kvgate_vllm.state import EngineState, WeightsReport
from kvgate_vllm.step_order import Mark
from kvgate_vllm.ways import AnyTransfers, Ways

if TYPE_CHECKING:
    import torch

LOGGER: Final = logging.getLogger("vllm.kvgate")
CALL_S: Final = 5.0
MAX_LOAD_OPS: Final = 4096
MAX_CONFIRMED: Final = 4096
KEEPS_WRITES: Final = SINCE[KeepWrites]
"""Wire version in which a worker says which reservations it still holds."""
ATTACH_START_S: Final = 20.0
"""How much longer the engine's start waits where the gateway is mapping its pages already."""
REGISTER_PAUSE_S: Final = 5.0
RANK_PAUSE_S: Final = 1.0
"""How often a worker asks again whose rank another process has. That of a killed engine may take a moment to end."""
PAGES_GO_S: Final = 30.0
"""How long an engine that frees its pages waits for the copies under way."""


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """A registration at the gateway, and how this worker moves its pages. ``connection``: valid on that one only."""

    connection: int
    handle: bytes
    transfers: AnyTransfers


class WorkerSide:
    """One worker."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, state: EngineState, settings: ConnectorSettings) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._state = state
        self._settings = settings
        self._lock = threading.Lock()
        self._form: WorkerForm | None = None
        self._registration: Registration | None = None
        self._announced: Registration | None = None
        self._said_on = 0
        """The connection on which the log was told last that this worker is registered."""
        self._registered = threading.Event()
        self._confirmed: dict[bytes, ArtifactSet] = {}
        self._confirmed_on = 0
        self._report = WorkerReport()
        self._failed_blocks: set[int] = set()
        self._received: set[str] = set()
        self._draining: set[str] = set()
        self._unsaved: list[StoreOp] = []
        self._load_jobs = JobThread("kvgate-load", MAX_LOAD_OPS)
        self._save_jobs = JobThread("kvgate-save", settings.save_queue_ops)
        self._client = GatewayClient(settings.socket_path(), "worker", settings.credential(), on_connect=self._on_connect)
        self._ways = Ways(self._client, settings)
        self._client.start()
        state.on_weights_changed.append(self._weights_changed)
        state.on_pages_going.append(self._pages_going)

    # Registration

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The pages exist: describe the engine, and wait a little for the gateway."""
        from vllm.model_executor.models.utils import extract_layer_index

        try:
            description = describe_engine(self._vllm_config, self._kv_cache_config)
            transfer_config = self._vllm_config.kv_transfer_config
            form = worker_form(description, str(transfer_config.engine_id), self._settings.numerics_class)
            tensors = [kv_caches[name] for name in sorted(form.geometry.groups[0].layer_names, key=extract_layer_index)]
            self._ways.take(form, tensors)
        except (Uncacheable, GeometryError, RuntimeError) as error:
            self._state.log_once(str(error))
            return
        except KeyError:
            self._state.log_once("the engine's layers are not those of its KV cache")
            return
        with self._lock:
            self._form = form
        if self._client.connected:
            self._client.spawn(self._register_again())
        in_time = self._registered.wait(self._settings.register_ms / 1000)
        if not in_time and self._ways.attaching:
            # There is a gateway, and it is starting a transfer process: not for ever, but what is served before is computed.
            in_time = self._registered.wait(ATTACH_START_S)
        if not in_time:
            LOGGER.warning("kvgate: not registered with a gateway yet; running without it until then")

    def handshake(self) -> bytes | None:
        """The handle for the scheduler, if there is one already."""
        registration = self._registration
        self._announced = registration
        self._state.engine_core_knows()  # of the first load
        return registration.handle if registration else None

    async def _on_connect(self, call: Call, welcome: Welcome) -> None:
        """On the client's loop, on every connection."""
        self._registration = None
        await self._register(call, welcome)

    async def _register_again(self) -> None:
        welcome = self._client.welcome
        if welcome is None:
            return
        try:
            await self._register(self._client.request, welcome)
        except GatewayRefused as error:
            self._state.log_once(f"the gateway refused the registration: {error}")
        except GatewayUnavailable:
            pass  # the next connection registers

    async def _register(self, call: Call, welcome: Welcome) -> None:
        """Register what is loaded now. Raises what ``call`` raises; an engine that caches nothing registers nothing."""
        form, connection = self._form, self._client.connection
        if form is None:
            return
        try:
            weights = self._state.weights()
            report = form.report(weights, welcome)
            self._ways.check(form, welcome)
            reply = cast(Registered, await call(report, CALL_S))
            if welcome.wire >= KEEPS_WRITES:
                await call(KeepWrites(reservations=self._ways.held_writes()), CALL_S)
            transfers = await self._ways.transfers(call, form, welcome)
        except (GatewayRefused, GatewayUnavailable) as error:
            taken = isinstance(error, GatewayRefused) and error.failure.field == "engine"
            if self._ways.must_lend or taken:
                self._client.spawn(self._register_later(connection, RANK_PAUSE_S if taken else REGISTER_PAUSE_S))
            raise
        except (Uncacheable, ContractError, GeometryError) as error:
            self._state.log_once(str(error))
            self._registered.set()
            return
        previous = self._announced.transfers if self._announced else None
        await self._confirm_again(call, connection)
        with self._lock:
            current = self._state.weights().generation == weights.generation
            if current:
                self._registration = Registration(connection, reply.handle, transfers)
        if not current:
            # The weights changed meanwhile. Their callback found nothing to revoke yet.
            await call(Revoke(handle=reply.handle), CALL_S)
            return
        self._registered.set()
        back = self._said_on not in (0, connection)
        self._said_on = connection
        LOGGER.info("kvgate: %sregistered; %s", "the gateway is back: " if back else "", self._ways.who_copies)
        if previous is not None and welcome.wire < KEEPS_WRITES:
            previous.abort_unsettled(welcome.boot)

    async def _register_later(self, connection: int, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        if self._client.connection == connection and self._registration is None:
            await self._register_again()

    def _weights_changed(self, report: WeightsReport) -> None:
        """In the thread that changes the weights: before the first write, and again once a loader has hashed files anew."""
        if report.reason is None:
            self._client.spawn(self._register_again())
            return
        with self._lock:
            registration, self._registration = self._registration, None
        if registration is not None:
            try:
                # Waited for: nothing computed with the new weights may be committed under the old registration.
                self._client.call(Revoke(handle=registration.handle), CALL_S)
            except (GatewayRefused, GatewayUnavailable) as error:
                LOGGER.warning("kvgate: the registration could not be revoked: %s", error)

    def _pages_going(self) -> None:
        """Before the engine frees its pages (sleep): no copy touches them when this returns."""
        if not (self._save_jobs.drain(PAGES_GO_S) and self._load_jobs.drain(PAGES_GO_S)):
            LOGGER.error("kvgate: copies did not end before the engine's pages went")

    # Adapters

    def _adapter_ready(self, adapter: AdapterRef | None, registration: Registration) -> bool:
        """Whether this worker really has the adapter that the scheduler bound, and the gateway knows it."""
        if adapter is None:
            return True
        loaded = self._state.loaded_adapter(adapter.int_id)
        if loaded is not None and loaded.digest != adapter.digest:
            LOGGER.error("kvgate: an adapter was loaded from other bytes than its request was bound to; not cached")
            return False
        with self._lock:
            if self._confirmed_on != registration.connection:
                self._confirmed, self._confirmed_on = {}, registration.connection
            if adapter.digest in self._confirmed:
                return True
        if loaded is None:
            return False
        artifacts = artifact_set(loaded.artifacts)
        try:
            self._client.call(ConfirmAdapter(adapter=artifacts), CALL_S)
        except (GatewayRefused, GatewayUnavailable) as error:
            LOGGER.warning("kvgate: an adapter was not confirmed: %s", error)
            return False
        self._note_confirmed(adapter.digest, artifacts)
        return True

    async def _confirm_again(self, call: Call, connection: int) -> None:
        """The gateway forgets confirmations with the connection; what was loaded is loaded still."""
        with self._lock:
            confirmed, self._confirmed, self._confirmed_on = dict(self._confirmed), {}, connection
        for digest, artifacts in confirmed.items():
            await call(ConfirmAdapter(adapter=artifacts), CALL_S)
            self._note_confirmed(digest, artifacts)

    def _note_confirmed(self, digest: bytes, artifacts: ArtifactSet) -> None:
        with self._lock:
            self._confirmed[digest] = artifacts
            while len(self._confirmed) > MAX_CONFIRMED:
                self._confirmed.pop(next(iter(self._confirmed)))
            self._report.adapters[artifacts.digest()] = 1

    # Steps

    def handle_preemptions(self, meta: StepMetadata) -> None:
        """Before pages are reused: no save reads them any more when this returns."""
        if meta.preempted:
            self._save_jobs.cancel(meta.preempted)

    def start_loads(self, meta: StepMetadata) -> None:
        """Begin this step's loads; those inside the step are complete when this returns."""
        self._unsaved.extend(meta.stores)
        # Steps that are queued on the device may still use the blocks that these loads write.
        mark = self._ways.mark() if meta.loads else None
        for op in meta.loads:
            if not op.asynchronous:
                self._load(op, mark)
            elif not self._load_jobs.submit(Job(op.request_id, lambda _job, op=op: self._load(op, mark))):  # type: ignore[misc]
                self._loaded(op, set(op.chunks))

    def save(self, meta: StepMetadata) -> None:
        """Store this step's chunks, or hand them to the background."""
        stores, self._unsaved = self._unsaved, []
        mark = self._ways.mark() if stores else None
        for op in stores:
            if not self._settings.async_save:
                self._store(op, None, mark)
            elif not self._save_jobs.submit(Job(op.request_id, lambda job, op=op: self._store(op, job, mark))):  # type: ignore[misc]
                LOGGER.debug("kvgate: a store was skipped: the queue is full")
                self._stored(op)
        self._draining.update(meta.draining)

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose saves, and whose background loads, have ended since the last call."""
        unsaved = {op.request_id for op in self._unsaved}
        saved = {request for request in self._draining if request not in unsaved and not self._save_jobs.busy(request)}
        self._draining -= saved
        with self._lock:
            received, self._received = self._received, set()
        return saved, received

    def failed_blocks(self) -> set[int]:
        """Blocks whose load failed since the last call. Asked after ``finished``, so never later than their request."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
            return failed

    def report(self) -> WorkerReport | None:
        """What the scheduler has to hear, or None."""
        registration = self._registration
        with self._lock:
            report, self._report = self._report, WorkerReport()
        report.weights_changed = self._state.take_news()
        if registration is not None and registration is not self._announced:
            self._announced = registration
            report.handle = registration.handle
        return report or None

    def shutdown(self) -> None:
        """The engine stops: finish what is queued within the drain time, then let go."""
        self._load_jobs.close(0.0)
        self._save_jobs.close(self._settings.drain_ms / 1000)
        if self._weights_changed in self._state.on_weights_changed:
            self._state.on_weights_changed.remove(self._weights_changed)
        if self._pages_going in self._state.on_pages_going:
            self._state.on_pages_going.remove(self._pages_going)
        registration = self._registration
        if registration is not None:
            registration.transfers.close()
        self._client.close()
        self._ways.close()

    # Transfers: on the step thread, or on one of the two background threads

    def _usable(self, op: ChunkOp) -> Registration | None:
        registration = self._registration
        if registration is None or not self._adapter_ready(op.adapter, registration):
            return None
        return registration

    def _load(self, op: LoadOp, mark: Mark | None) -> None:
        failed = set(op.chunks)
        try:
            registration = self._usable(op)
            if registration is not None:
                failed = registration.transfers.load(op, mark)
                if self._registration is not registration:
                    failed = set(op.chunks)  # weights changed, or the gateway was lost, during the copy
        except Exception:
            # A cache must never fail a request: whatever this was, the tokens are computed instead.
            LOGGER.exception("kvgate: a load failed")
        self._loaded(op, failed)

    def _loaded(self, op: LoadOp, failed: set[int]) -> None:
        form = self._form
        block_tokens = form.pages.block_tokens if form else 1
        with self._lock:
            for chunk in failed:
                self._failed_blocks.update(op.blocks_to_load(chunk, block_tokens))
            self._report.loads[op.number] = LoadResult(1, min(failed, default=None))
            if op.asynchronous:
                self._received.add(op.request_id)

    def _store(self, op: StoreOp, job: Job | None, mark: Mark | None) -> None:
        try:
            registration = self._usable(op)
            if registration is not None and not (job is not None and job.cancelled):
                registration.transfers.store(op, job, mark)
        except Exception:
            # The same: what can't be stored is a later miss.
            LOGGER.exception("kvgate: a store failed")
        finally:
            self._stored(op)

    def _stored(self, op: StoreOp) -> None:
        with self._lock:
            self._report.stores[op.number] = 1
