"""A connector that stores nothing: it switches the plugin on and keeps what the plugin tells it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvgate_vllm.plugin import attach_scheduler, attach_worker
from kvgate_vllm.state import EngineState, LoadedAdapter, WeightsReport


class _Nothing(KVConnectorMetadata):
    """No work for the workers."""


class KVGateConnector(KVConnectorBase_V1, SupportsHMA):
    """Has the name by which the plugin knows that it is wanted. ``last`` is the newest scheduler-side instance."""

    last: KVGateConnector | None = None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.requests: list[Any] = []
        """Every request that arrived, newest last (scheduler role)."""
        self.state: EngineState
        if role == KVConnectorRole.SCHEDULER:
            self.state = attach_scheduler(vllm_config)
            self.state.set_scope_provider(self.scope)
            KVGateConnector.last = self
        else:
            self.state = attach_worker(vllm_config)
        self._events: Path | None = None
        if folder := self._kv_transfer_config.get_from_extra_config("events_dir", None):
            self._events = Path(folder) / f"{role.name.lower()}-{os.getpid()}.jsonl"
            self._tell(self.state.weights())
            self.state.on_weights_changed.append(self._tell)
            self.state.on_adapter_loaded.append(self._tell)

    def _tell(self, event: WeightsReport | LoadedAdapter) -> None:
        """Write down what the plugin said, for tests whose engine runs in other processes."""
        assert self._events is not None
        line = {
            "kind": type(event).__name__,
            "files": sorted(f"{artifact.role} {artifact.digest.hex()}" for artifact in event.artifacts),
            "reason": event.reason,
        }
        with self._events.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def scope(self, request: Any) -> tuple[bytes, bytes]:
        """Domain and variant as the test wrote them into the request."""
        given = request.kv_transfer_params or {}
        return str(given.get("domain", "d0")).encode(), str(given.get("variant", "ordinary")).encode()

    def on_new_request(self, request: Any) -> None:
        """Keep the request."""
        self.requests.append(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing is ever found outside."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing to load."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing to do."""
        return _Nothing()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may go at once."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loading."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saving."""
