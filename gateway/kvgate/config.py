"""Configuration of the gateway: defaults, then a TOML file, then ``KVGATE_*`` variables, then flags; the last one given wins.

Every setting is one field of ``Config``. Its help text, environment variable, flag and type all come from here, so ``kvgate config``,
``kvgate serve --help`` and the error messages cannot disagree.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

MAX_CONFIG_BYTES: Final = 1 << 20
_SIZES: Final = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


class ConfigError(Exception):
    """A setting is wrong; the message names the setting, where it came from, and what is accepted."""


def default_state_dir() -> str:
    """``$XDG_RUNTIME_DIR/kvgate``, else ``/tmp/kvgate-<uid>``: private to the user, and short enough for a unix socket's name."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return str(Path(runtime) / "kvgate") if runtime else f"/tmp/kvgate-{os.getuid()}"


def default_data_dir() -> str:
    """``$XDG_DATA_HOME/kvgate``, else ``~/.local/share/kvgate``: survives a reboot."""
    data = os.environ.get("XDG_DATA_HOME")
    return str(Path(data) / "kvgate") if data else str(Path.home() / ".local" / "share" / "kvgate")


def default_endpoint() -> str:
    """Where clients look for the gateway: ``$KVGATE_ENDPOINT``, else the socket in the default state directory."""
    return os.environ.get("KVGATE_ENDPOINT") or str(
        Path(os.environ.get("KVGATE_STATE_DIR") or default_state_dir()) / "gateway.sock"
    )


def _setting(help_text: str, *, default: Any = dataclasses.MISSING, factory: Any = dataclasses.MISSING) -> Any:
    kwargs: dict[str, Any] = {"metadata": {"help": help_text}}
    if factory is not dataclasses.MISSING:
        kwargs["default_factory"] = factory
    else:
        kwargs["default"] = default
    return dataclasses.field(**kwargs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of ``kvgate serve``."""

    state_dir: str = _setting("run-time files: sockets, lock, run record; mode 0700", factory=default_state_dir)
    data_dir: str = _setting("what must survive: deployment secret, the default L2 folder; mode 0700", factory=default_data_dir)
    secret_file: str = _setting("deployment secret, mode 0600; empty: <data_dir>/secret, made on first start", default="")
    admin_tcp: str = _setting("HOST:PORT for the admin HTTP besides its unix socket; empty: none", default="")
    backend: str = _setting("storage: lmcache, memory, or auto (lmcache where it is installed)", default="auto")
    pool_bytes: int = _setting("size of the L1 pool in shared memory; takes KiB, MiB, GiB", default=1 << 30)
    l2: str = _setting('LMCache L2 adapters as a JSON list; empty: [{"type":"fs"}] in <data_dir>/l2', default="")
    chunk_tokens: int = _setting("tokens in one chunk", default=256)
    codec: str = _setting("how payloads are stored: raw", default="raw")
    domain: str = _setting("isolation domain of clients without a credential", default="default")
    credentials_file: str = _setting("JSON object: SHA-256 of a credential (hex) -> domain name; empty: none", default="")
    numerics_classes: str = _setting("comma-separated names of engine classes declared equivalent", default="")
    max_sessions: int = _setting("connections at a time", default=256)
    max_requests_per_session: int = _setting("requests in progress on one connection", default=256)
    max_leases: int = _setting("bound requests at a time", default=65_536)
    max_known_chunks: int = _setting("chunks in the presence index; the oldest are forgotten first", default=1_000_000)
    probe_s: float = _setting("longest existence probe of L2 for one request", default=0.5)
    storage_s: float = _setting("deadline of one storage call", default=5.0)
    adapter_wait_s: float = _setting("how long a load or store waits for all ranks to confirm an adapter", default=2.0)
    drain_s: float = _setting("how long a stop waits for L2 writes under way", default=10.0)
    log_level: str = _setting("debug, info, warning or error", default="info")
    log_format: str = _setting("json or console", default="console")

    @property
    def socket_path(self) -> Path:
        """The control socket."""
        return Path(self.state_dir) / "gateway.sock"

    @property
    def admin_path(self) -> Path:
        """The admin HTTP socket."""
        return Path(self.state_dir) / "admin.sock"

    @property
    def secret_path(self) -> Path:
        """Where the deployment secret lies."""
        return Path(self.secret_file) if self.secret_file else Path(self.data_dir) / "secret"

    def l2_adapters(self) -> tuple[Mapping[str, Any], ...]:
        """The L2 adapter descriptions, as LMCache takes them."""
        if not self.l2:
            return ({"type": "fs", "base_path": str(Path(self.data_dir) / "l2")},)
        return tuple(_parse_l2(self.l2))

    def numerics_class_names(self) -> frozenset[str]:
        """The declared classes."""
        return frozenset(name.strip() for name in self.numerics_classes.split(",") if name.strip())


_POSITIVE: Final = (
    "pool_bytes",
    "chunk_tokens",
    "max_sessions",
    "max_requests_per_session",
    "max_leases",
    "max_known_chunks",
    "probe_s",
    "storage_s",
    "adapter_wait_s",
)
_CHOICES: Final = {
    "backend": ("auto", "lmcache", "memory"),
    "codec": ("raw",),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("json", "console"),
}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A configuration and, for each setting, where its value came from."""

    config: Config
    origins: Mapping[str, str]


def load(file: str | None, environ: Mapping[str, str], flags: Mapping[str, str | None]) -> Loaded:
    """Merge all sources; raises ``ConfigError``."""
    fields = {field.name: field for field in dataclasses.fields(Config)}
    values: dict[str, Any] = {}
    origins = dict.fromkeys(fields, "default")
    sources: list[tuple[str, Mapping[str, Any]]] = []
    path = file or environ.get("KVGATE_CONFIG")
    if path:
        sources.append((f"file {path}", _read_toml(path)))
    sources.append(("environment", _from_environment(fields, environ)))
    sources.append(("flag", {name: value for name, value in flags.items() if value is not None}))
    for origin, mapping in sources:
        for name, raw in mapping.items():
            if name not in fields:
                raise ConfigError(f"{name} ({origin}): unknown setting; `kvgate config` lists them all")
            values[name] = _convert(name, str(fields[name].type), raw, origin)
            origins[name] = origin
    config = Config(**values)
    _check(config, origins)
    return Loaded(config, origins)


def _from_environment(fields: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[key] for name in fields if (key := f"KVGATE_{name.upper()}") in environ}


def _read_toml(path: str) -> Mapping[str, Any]:
    try:
        file = Path(path)
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"configuration file {path}: larger than {MAX_CONFIG_BYTES} bytes")
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path}: not valid TOML: {error}") from error


def _convert(name: str, kind: str, raw: Any, origin: str) -> Any:
    where = f"{name} ({origin})"
    if name == "l2" and isinstance(raw, list):
        return json.dumps(raw)
    if kind == "str":
        if not isinstance(raw, str):
            raise ConfigError(f"{where}: must be text")
        return raw
    if isinstance(raw, bool):
        raise ConfigError(f"{where}: must be a number")
    try:
        return _size(raw) if kind == "int" else float(raw)
    except (TypeError, ValueError):
        accepted = "a whole number, for bytes also KiB, MiB or GiB" if kind == "int" else "a number of seconds"
        raise ConfigError(f"{where}: must be {accepted}") from None


def _size(raw: Any) -> int:
    if isinstance(raw, int):
        return raw
    text = str(raw).strip().upper()
    digits = text.rstrip("KMGTIB ")
    return int(digits) * _SIZES[text[len(digits) :].strip()] if text[len(digits) :].strip() in _SIZES else int(text)


def _check(config: Config, origins: Mapping[str, str]) -> None:
    for name in _POSITIVE:
        if not getattr(config, name) > 0:
            raise ConfigError(f"{name} ({origins[name]}): must be above zero")
    for name, words in _CHOICES.items():
        if getattr(config, name) not in words:
            raise ConfigError(f"{name} ({origins[name]}): must be one of {', '.join(words)}")
    if not config.domain:
        raise ConfigError(f"domain ({origins['domain']}): must not be empty")
    if config.pool_bytes < 1 << 20:
        raise ConfigError(f"pool_bytes ({origins['pool_bytes']}): must be at least 1 MiB")
    if len(str(config.socket_path).encode()) > 100:
        raise ConfigError(f"state_dir ({origins['state_dir']}): too long for a unix socket; choose a path under 80 bytes")
    if config.admin_tcp and not config.admin_tcp.rpartition(":")[2].isdigit():
        raise ConfigError(f"admin_tcp ({origins['admin_tcp']}): must be HOST:PORT")
    config.l2_adapters()


def _parse_l2(text: str) -> list[dict[str, Any]]:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"l2: not valid JSON: {error}") from error
    if not isinstance(parsed, list) or not all(isinstance(item, dict) and isinstance(item.get("type"), str) for item in parsed):
        raise ConfigError(
            'l2: must be a list of adapters, each an object with a "type", e.g. [{"type":"fs","base_path":"/data/kv"}]'
        )
    return parsed
