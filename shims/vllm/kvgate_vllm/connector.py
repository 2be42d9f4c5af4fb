"""``KVGateConnector``: vLLM's connector interface, each half in its own class.

    --kv-transfer-config '{"kv_connector": "KVGateConnector", "kv_connector_module_path": "kvgate_vllm.connector",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

``kv_connector_extra_config`` takes the settings of ``kvgate_vllm.settings``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from kvgate_vllm.capture import QueryCapture
from kvgate_vllm.metadata import CaptureOp, Handshake, StepMetadata
from kvgate_vllm.mixed_steps import come_out_wrong
from kvgate_vllm.plugin import attach_scheduler, attach_worker
from kvgate_vllm.scheduler_side import SchedulerSide
from kvgate_vllm.session import Session
from kvgate_vllm.settings import ConnectorSettings, SettingsError, loads_in_background, steps_in_flight
from kvgate_vllm.state import LOGGER
from kvgate_vllm.variants import local_variant, parameters_of

if TYPE_CHECKING:
    from kvgate_vllm.worker_side import WorkerSide


class KVGateConnector(KVConnectorBase_V1):
    """Restores and stores KV through a kvgate gateway. A cache: whatever happens to the gateway, requests complete."""

    def __new__(cls, _vllm_config: Any, _role: KVConnectorRole, kv_cache_config: Any) -> KVGateConnector:
        """Make the connector for this kind of engine."""
        without_kv = kv_cache_config is not None and not kv_cache_config.kv_cache_groups
        made: KVGateConnector = super().__new__(_WithoutKV if without_kv else cls)
        return made

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = self._kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise SettingsError('kv_load_failure_policy: must be "recompute": a failed load must not fail its request')
        self._settings = ConnectorSettings.of(transfer.kv_connector_extra_config or {})
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._block_pool: Any = None
        self._saved: StepMetadata | None = None
        self._capture: QueryCapture | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._scheduler_side(vllm_config)
        else:
            # Here, not above: the scheduler's process of a multi-process engine needs neither kernels nor describe.
            from kvgate_vllm.worker_side import WorkerSide

            self._worker = WorkerSide(vllm_config, kv_cache_config, attach_worker(vllm_config), self._settings)
            if self._settings.capture_queries:
                self._capture = QueryCapture(Path(self._settings.capture_queries), vllm_config, self._captures)

    def _scheduler_side(self, vllm_config: Any) -> SchedulerSide:
        settings, transfer = self._settings, self._kv_transfer_config
        state = attach_scheduler(vllm_config)
        parallel = vllm_config.parallel_config
        world_size = int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
        self._session = Session(settings.socket_path(), settings.credential(), world_size)
        state.set_scope_provider(scope_provider(self._session))
        if steps_in_flight(vllm_config) and not settings.async_load:
            LOGGER.warning("kvgate: async_load is on: this engine runs steps ahead, where a load inside a step is not safe")
        side = SchedulerSide(
            self._session,
            state,
            settings,
            block_tokens=int(vllm_config.cache_config.block_size),
            world_size=world_size,
            in_background=loads_in_background(settings.async_load, vllm_config),
            in_step_allowed=not steps_in_flight(vllm_config),
            may_load=bool(transfer.is_kv_consumer),
            may_store=bool(transfer.is_kv_producer),
            evict=self._evict,
            mixed_wrong=come_out_wrong(vllm_config),
        )
        state.set_failed_requests(side.failed_requests)
        self._session.start()
        return side

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a later miss, nothing more."""
        return False

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler method in a worker"
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "a worker method in the scheduler"
        return self._worker

    def _step(self) -> StepMetadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMetadata)
        return meta

    def _captures(self) -> list[CaptureOp]:
        return self._step().captures if self.has_connector_metadata() else []

    def _save_step(self) -> None:
        meta = self._connector_metadata
        if isinstance(meta, StepMetadata) and meta is not self._saved:
            self._saved = meta
            self._working.save(meta)

    def _evict(self, block_ids: set[int]) -> None:
        if self._block_pool is not None and block_ids:
            self._block_pool.evict_blocks(block_ids)

    # Scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The blocks behind vLLM's own prefix cache (every vLLM since 0.26 hands them over)."""
        self._block_pool = gpu_block_pool

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """The workers' handle; ranks that agree have the same."""
        self._take_handles(list(metadata.values()))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """The same, of all pipeline stages."""
        self._take_handles(list(metadata.values()))

    def _take_handles(self, handshakes: list[Any]) -> None:
        handles = {one.handle for one in handshakes if isinstance(one, Handshake) and one.handle is not None}
        if handles:
            # Ranks that disagree have different handles; neither ever seals, so either will do.
            self._session.set_handle(min(handles))
            self._session.wait_open(self._settings.register_ms / 1000)

    def on_new_request(self, request: Any) -> None:
        """See ``SchedulerSide.new_request``."""
        self._scheduling.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See ``SchedulerSide.matched_tokens``."""
        return self._scheduling.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See ``SchedulerSide.allocated``."""
        if num_external_tokens:
            self._scheduling.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """See ``SchedulerSide.build``."""
        return self._scheduling.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """See ``SchedulerSide.report``."""
        self._scheduling.report(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See ``SchedulerSide.finished``."""
        return self._scheduling.finished(request, block_ids)

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See ``WorkerSide.register_kv_caches``."""
        self._working.register_kv_caches(kv_caches)
        if self._capture is not None:
            from vllm.model_executor.models.utils import extract_layer_index

            self._capture.install(sorted(kv_caches, key=extract_layer_index))

    def get_handshake_metadata(self) -> Handshake:
        """See ``WorkerSide.handshake``."""
        return Handshake(self._working.handshake())

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """See ``WorkerSide.handle_preemptions``."""
        self._working.handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See ``WorkerSide.start_loads``."""
        self._working.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a load inside a step is complete before its first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: only chunks of earlier, confirmed steps are stored."""

    def wait_for_save(self) -> None:
        """See ``WorkerSide.save``."""
        if self._capture is not None:
            self._capture.finish_step()
        self._save_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See ``WorkerSide.finished``."""
        self._save_step()  # vLLM 0.26 does not call wait_for_save in a step without a forward pass
        saved, received = self._working.finished()
        return saved or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See ``WorkerSide.failed_blocks``."""
        return self._working.failed_blocks()

    def build_connector_worker_meta(self) -> Any:
        """See ``WorkerSide.report``."""
        return self._working.report()

    # Both

    def shutdown(self) -> None:
        """End threads and connection."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()


class _WithoutKV(KVGateConnector, SupportsHMA):
    """For an engine without any KV cache, such as one of an encoder-only embedding model: there is nothing to do, and nothing to fail.

    vLLM hands the end of a request to other connectors for exactly one KV group, and ends the engine core where there is none.
    """

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """See ``SchedulerSide.finished``."""
        return self.request_finished(request, [block for group in block_ids for block in group])


def scope_provider(session: Session) -> Any:
    """Domain and variant of a request, for vLLM's own prefix cache; ``ValueError`` for one that is not to be cached."""

    def scope(request: Any) -> tuple[bytes, bytes]:
        if "kvgate" in parameters_of(request):
            raise ValueError("the request repeats what an answer reported")
        return session.domain or b"no gateway yet", local_variant(request)

    return scope
