"""Configuration of the gateway: defaults, then a TOML file, then ``KVGATE_*`` variables, then flags; the last one given wins.

Every setting is one field of ``Config``. Its help text, environment variable, flag and type all come from here, so ``kvgate config``,
``kvgate serve --help`` and the error messages cannot disagree.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tomllib
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

MAX_CONFIG_BYTES: Final = 1 << 20
_SIZES: Final = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


class ConfigError(Exception):
    """A setting is wrong; the message names the setting, where it came from, and what is accepted.

    ``setting`` is given instead of that by code that knows the value only: whoever loaded it adds the rest by ``located``.
    """

    def __init__(self, message: str, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting


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
    previous_secret_files: str = _setting(
        "comma-separated files of earlier deployment secrets, at most 4: what was stored under them is still read; empty: none",
        default="",
    )
    admin_tcp: str = _setting("HOST:PORT for the admin HTTP besides its unix socket; empty: none", default="")
    backend: str = _setting(
        "storage: lmcache, memory, attach (to a running lmcache server), or auto (lmcache where it is installed)",
        default="auto",
    )
    attach_url: str = _setting("backend attach: address of the lmcache server, e.g. tcp://127.0.0.1:5555", default="")
    pool_bytes: int = _setting("size of the L1 pool in shared memory; takes KiB, MiB, GiB", default=1 << 30)
    l2: str = _setting('LMCache L2 adapters as a JSON list; empty: [{"type":"fs"}] in <data_dir>/l2', default="")
    chunk_tokens: int = _setting("tokens in one chunk", default=256)
    codec: str = _setting(
        "how payloads are stored: raw (the cache's own bytes), or k16v8 (keys exact, values in 8 bits; 16-bit caches only)",
        default="raw",
    )
    domain: str = _setting("isolation domain of clients without a credential", default="default")
    credentials_file: str = _setting("JSON object: SHA-256 of a credential (hex) -> domain name; empty: none", default="")
    numerics_classes: str = _setting("comma-separated names of engine classes declared equivalent", default="")
    determined_transforms: str = _setting(
        "comma-separated algorithm@version of transforms whose results depend on the prefix alone: only they may be shared like it",
        default="",
    )
    cross_domain: bool = _setting(
        "true: results of those transforms may also be shared between isolation domains (scope global)", default=False
    )
    capability_ttl_s: int = _setting("longest life of a variant's capability", default=7 * 86_400)
    max_sessions: int = _setting("connections at a time", default=256)
    max_requests_per_session: int = _setting("requests in progress on one connection", default=256)
    max_leases: int = _setting("bound requests at a time", default=65_536)
    max_known_chunks: int = _setting("chunks in the presence index; the oldest are forgotten first", default=1_000_000)
    explain_chunks: int = _setting(
        "entries of the index from which misses are explained; the oldest go first", default=1_000_000
    )
    explain_misses: int = _setting(
        "requests that missed, kept in memory for `kvgate explain`; the oldest go first", default=4096
    )
    probe_s: float = _setting("longest existence probe of L2 for one request", default=0.5)
    storage_s: float = _setting("deadline of one storage call", default=5.0)
    adapter_wait_s: float = _setting("how long a load or store waits for all ranks to confirm an adapter", default=2.0)
    transfer: str = _setting(
        "who moves bytes between engines and the pool: any (as each engine is set), worker, or gateway (workers never see the pool)",
        default="any",
    )
    transfer_s: float = _setting("deadline of one move by a transfer process; one that takes longer is killed", default=30.0)
    attach_s: float = _setting(
        "deadline of attaching an engine's pages, the start of a transfer process included", default=120.0
    )
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

    def previous_secret_paths(self) -> tuple[Path, ...]:
        """Where earlier secrets lie, in the order given."""
        return tuple(Path(name) for part in self.previous_secret_files.split(",") if (name := part.strip()))

    def l2_adapters(self) -> tuple[Mapping[str, Any], ...]:
        """The L2 adapter descriptions, as LMCache takes them."""
        if not self.l2:
            return ({"type": "fs", "base_path": str(Path(self.data_dir) / "l2")},)
        return tuple(parse_l2(self.l2))

    def numerics_class_names(self) -> frozenset[str]:
        """The declared classes."""
        return _names(self.numerics_classes)

    def determined_transform_names(self) -> frozenset[str]:
        """The listed transforms, ``algorithm@version`` each."""
        return _names(self.determined_transforms)


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


# Smallest and largest accepted number of each numeric setting.
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "pool_bytes": (1 << 20, 1 << 46),
    "chunk_tokens": (1, 65_536),
    "max_sessions": (1, 1 << 20),
    "max_requests_per_session": (1, 1 << 20),
    "max_leases": (1, 1 << 24),
    "explain_chunks": (1, 1 << 30),
    "explain_misses": (1, 1 << 20),
    "max_known_chunks": (1, 1 << 32),
    "probe_s": (0.001, 3600),
    "storage_s": (0.001, 3600),
    "adapter_wait_s": (0.001, 3600),
    "transfer_s": (0.001, 3600),
    "attach_s": (0.001, 3600),
    "drain_s": (0, 3600),
    "capability_ttl_s": (1, 10 * 365 * 86_400),
}
_PATHS: Final = ("state_dir", "data_dir", "secret_file", "credentials_file")
_MAX_TEXT_CHARS: Final = 65_536
_MAX_DOMAIN_BYTES: Final = 4096
_MAX_PREVIOUS: Final = 4  # as the protocol has it; each costs a lookup of its own
_CLASS_NAME: Final = r"[a-z0-9][a-z0-9._-]{0,63}"  # as the contract's NumericsClass has it
_TRANSFORM: Final = (
    r"[a-z0-9][a-z0-9._-]{0,63}@[A-Za-z0-9][A-Za-z0-9._+-]{0,63}"  # as the contract's TransformManifest has them
)
_CHOICES: Final = {
    "backend": ("auto", "lmcache", "memory", "attach"),
    "codec": ("raw", "k16v8"),
    "transfer": ("any", "worker", "gateway"),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("json", "console"),
}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A configuration and, for each setting, where its value came from."""

    config: Config
    origins: Mapping[str, str]

    def located(self, error: ConfigError) -> str:
        """The message of ``error`` with the setting and its source in it."""
        return f"{error.setting} ({self.origins[error.setting]}): {error}" if error.setting else str(error)


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
        if not file.is_file():
            raise ConfigError(f"configuration file {path}: is not a file")
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"configuration file {path}: not valid TOML: {error}") from error


def _convert(name: str, kind: str, raw: Any, origin: str) -> Any:
    where = f"{name} ({origin})"
    if name == "l2" and isinstance(raw, list):
        try:
            return json.dumps(raw)
        except (TypeError, ValueError):
            raise ConfigError(f"{where}: holds something that JSON has no form for") from None
    if kind == "str":
        return _text(name, raw, where)
    if kind == "bool":
        return _yes_or_no(raw, where)
    accepted = "a whole number, for bytes also with KiB, MiB, GiB or TiB" if kind == "int" else "a number of seconds"
    try:
        if isinstance(raw, bool):
            raise TypeError
        return _size(raw) if kind == "int" else float(raw)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{where}: must be {accepted}") from None


def _text(name: str, raw: Any, where: str) -> str:
    if not isinstance(raw, str):
        raise ConfigError(f"{where}: must be text")
    if len(raw) > _MAX_TEXT_CHARS:
        raise ConfigError(f"{where}: must have at most {_MAX_TEXT_CHARS} characters")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in raw):
        raise ConfigError(f"{where}: must hold neither control characters nor broken Unicode")
    if name in _PATHS and raw:
        # Made absolute here, once: the endpoint is printed for processes with another working directory.
        try:
            return str(Path(raw).expanduser().absolute())
        except RuntimeError:
            raise ConfigError(f"{where}: names a user that does not exist") from None
    return raw


def _yes_or_no(raw: Any, where: str) -> bool:
    words = {"true": True, "yes": True, "false": False, "no": False}
    found = raw if isinstance(raw, bool) else words.get(str(raw).strip().lower())
    if found is None:
        raise ConfigError(f"{where}: must be true or false")
    return found


def _size(raw: Any) -> int:
    if isinstance(raw, int):
        return raw
    match = re.fullmatch(r"(-?[0-9]+) *(|KiB|MiB|GiB|TiB)", str(raw).strip(), re.IGNORECASE)
    if match is None:
        raise ValueError
    return int(match[1]) * _SIZES[match[2].upper()]


def _check(config: Config, origins: Mapping[str, str]) -> None:
    for name, (lowest, highest) in _RANGES.items():
        # Written so that it refuses NaN.
        if not lowest <= getattr(config, name) <= highest:
            raise ConfigError(f"{name} ({origins[name]}): must be from {lowest} to {highest}")
    for name, words in _CHOICES.items():
        if getattr(config, name) not in words:
            raise ConfigError(f"{name} ({origins[name]}): must be one of {', '.join(words)}")
    for name in ("state_dir", "data_dir", "domain"):
        if not getattr(config, name):
            raise ConfigError(f"{name} ({origins[name]}): must not be empty")
    if len(config.domain.encode()) > _MAX_DOMAIN_BYTES:
        raise ConfigError(f"domain ({origins['domain']}): must have at most {_MAX_DOMAIN_BYTES} bytes")
    if config.pool_bytes % 4096:
        raise ConfigError(f"pool_bytes ({origins['pool_bytes']}): must be a multiple of 4096")
    if len(os.fsencode(config.socket_path)) > 100:
        raise ConfigError(f"state_dir ({origins['state_dir']}): too long for a unix socket; choose a path under 80 bytes")
    for name in config.numerics_class_names():
        if re.fullmatch(_CLASS_NAME, name) is None:
            raise ConfigError(f"numerics_classes ({origins['numerics_classes']}): each name must match {_CLASS_NAME}")
    for name in config.determined_transform_names():
        if re.fullmatch(_TRANSFORM, name) is None:
            raise ConfigError(
                f"determined_transforms ({origins['determined_transforms']}): each must be algorithm@version, e.g. recency@1"
            )
    previous = config.previous_secret_paths()
    if len(previous) > _MAX_PREVIOUS or not all(path.is_absolute() for path in previous):
        raise ConfigError(
            f"previous_secret_files ({origins['previous_secret_files']}): must be at most {_MAX_PREVIOUS} absolute paths"
        )
    if config.admin_tcp and not _is_host_port(config.admin_tcp):
        raise ConfigError(f"admin_tcp ({origins['admin_tcp']}): must be HOST:PORT, e.g. 127.0.0.1:9464")
    if config.backend == "attach" and not re.fullmatch(r"(tcp|ipc|grpc|grpc\+unix)://\S+", config.attach_url):
        raise ConfigError(f"attach_url ({origins['attach_url']}): backend attach needs it, e.g. tcp://127.0.0.1:5555")
    try:
        config.l2_adapters()
    except ConfigError as error:
        raise ConfigError(f"l2 ({origins['l2']}): {error}") from error


def _is_host_port(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and re.fullmatch(r"[0-9]{1,5}", port) is not None and int(port) < 65_536


def parse_l2(text: str) -> list[dict[str, Any]]:
    """L2 adapters as LMCache takes them, from JSON; raises ``ConfigError`` with what is wrong."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError("is not valid JSON") from error
    if not isinstance(parsed, list) or not all(isinstance(item, dict) and isinstance(item.get("type"), str) for item in parsed):
        raise ConfigError(
            'must be a list of adapters, each an object with a "type", e.g. [{"type":"fs","base_path":"/data/kv"}]'
        )
    return parsed
