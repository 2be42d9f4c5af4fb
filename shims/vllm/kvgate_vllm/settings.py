"""The connector's settings: ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``, checked by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvgate.config import default_endpoint

MAX_CREDENTIAL_BYTES: Final = 1024
PLUGIN_KEYS: Final = ("adapter_snapshot_dir", "adapter_snapshot_max_bytes", "adapter_snapshot_max_count", "adapter_max_bytes")
"""Read by the plugin, not here."""


TRANSFERS: Final = ("auto", "worker", "gateway")


class SettingsError(ValueError):
    """A setting is wrong; the message names it and says what is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """All settings, with their defaults. Each deadline bounds what a request can lose to the gateway; after it the request is a miss.

    endpoint: unix socket of the gateway. credential_file: file whose content names the isolation domain; none: the gateway's default.
    transfer: who copies between pages and the gateway's pool: "worker", "gateway", or "auto": the gateway on CUDA where pages can be
    shared, else the worker. attach_ms: patience for the gateway to map the pages.
    async_load: restore in the background while the engine runs other requests; some engines force it (``loads_in_background``).
    async_save: store in the background. numerics_class: an engine class declared equivalent at the gateway; none: strict.
    bind_ms, acquire_ms: patience for the lookup, and for bringing chunks to memory. load_ms, store_ms: for each message of a
    transfer. register_ms: how long the start of the engine waits for the gateway. grace_ms: how long one step may wait for a lookup
    that is nearly done instead of asking again in the next step. save_queue_ops: background stores waiting at a time; more are
    skipped. drain_ms: how long a stop waits for them. report: tell the client of a request how many tokens were restored
    (``kv_transfer_params``). capture_queries: private folder for the queries that requests ask to capture (``kvgate_vllm.capture``);
    none: nothing is captured.
    """

    endpoint: str = ""
    credential_file: str = ""
    transfer: str = "auto"
    async_load: bool = True
    async_save: bool = True
    numerics_class: str = ""
    bind_ms: float = 50.0
    acquire_ms: float = 1000.0
    load_ms: float = 5000.0
    store_ms: float = 5000.0
    register_ms: float = 3000.0
    grace_ms: float = 1.0
    save_queue_ops: int = 64
    drain_ms: float = 5000.0
    attach_ms: float = 120_000.0
    report: bool = True
    capture_queries: str = ""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """Settings from the extra config; raises ``SettingsError``."""
        fields = cls.__dataclass_fields__
        values: dict[str, Any] = {}
        for name, value in extra.items():
            if name in PLUGIN_KEYS:
                continue
            if name not in fields:
                raise SettingsError(
                    f"kv_connector_extra_config.{name}: unknown; known are {', '.join(sorted((*fields, *PLUGIN_KEYS)))}"
                )
            values[name] = _checked(name, value, fields[name].default)
        return cls(**values)

    def socket_path(self) -> str:
        """The endpoint, or where a gateway of this user listens by default."""
        return self.endpoint or default_endpoint()

    def credential(self) -> bytes | None:
        """The credential file's content without the line end; None without a file. Raises ``SettingsError``."""
        if not self.credential_file:
            return None
        try:
            with Path(self.credential_file).open("rb") as file:
                content = file.read(MAX_CREDENTIAL_BYTES + 2).rstrip(b"\r\n")
        except OSError as error:
            raise SettingsError(f"kv_connector_extra_config.credential_file: {error.strerror}") from error
        if not 1 <= len(content) <= MAX_CREDENTIAL_BYTES:
            raise SettingsError(f"kv_connector_extra_config.credential_file: must hold 1 to {MAX_CREDENTIAL_BYTES} bytes")
        return content


def _checked(name: str, value: Any, default: Any) -> Any:
    where = f"kv_connector_extra_config.{name}"
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise SettingsError(f"{where}: must be true or false")
    elif isinstance(default, str):
        if not isinstance(value, str):
            raise SettingsError(f"{where}: must be text")
        if name == "transfer" and value not in TRANSFERS:
            raise SettingsError(f"{where}: must be one of {', '.join(TRANSFERS)}")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 3_600_000:
        raise SettingsError(f"{where}: must be a number above zero, at most 3600000")
    elif isinstance(default, int) and not isinstance(value, int):
        raise SettingsError(f"{where}: must be a whole number")
    return value


def steps_in_flight(vllm_config: Any) -> bool:
    """Whether the engine plans a step before it has heard how the one before went: asynchronous scheduling, or pipeline stages."""
    return bool(vllm_config.scheduler_config.async_scheduling or vllm_config.parallel_config.pipeline_parallel_size > 1)


def loads_in_background(wanted: bool, vllm_config: Any) -> bool:
    """Whether loads run between steps, whatever was asked for.

    With steps in flight vLLM has scheduled a request's next step before it hears that a load inside the last one failed, and keeps
    that step's token, computed on wrong KV. A load between steps ends before its request is scheduled at all.
    """
    return wanted or steps_in_flight(vllm_config)
