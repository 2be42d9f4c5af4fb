"""One exact text for a configuration value: equal values give equal text, floats as ``repr`` writes them, no addresses, no order."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

MAX_DEPTH: Final = 12
CONTEXT: Final = "kvgate 2026-11 v1 settings"


@dataclass(frozen=True, slots=True)
class Setting:
    """One named setting as exact text."""

    name: str
    value: str


def exact_text(value: Any, depth: int = 0) -> str:
    """ASCII text of ``value``. Objects that are not plain data are written as their class with their public attributes.

    Raises ``ValueError`` for data nested deeper than ``MAX_DEPTH``, such as a cycle.
    """
    if depth > MAX_DEPTH:
        raise ValueError("settings are nested too deep")
    if value is None or isinstance(value, (bool, str)):
        return json.dumps(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (int, float)):
        # int and float subclasses print as what they are.
        return repr(float(value)) if isinstance(value, float) else repr(int(value))
    if isinstance(value, bytes):
        return "0x" + value.hex()
    if isinstance(value, Mapping):
        items = sorted((exact_text(k, depth + 1), exact_text(v, depth + 1)) for k, v in value.items())
        return "{" + ",".join(f"{k}:{v}" for k, v in items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(exact_text(item, depth + 1) for item in value) + "]"
    if isinstance(value, (set, frozenset)):
        return "<" + ",".join(sorted(exact_text(item, depth + 1) for item in value)) + ">"
    return _object_text(value, depth)


def _object_text(value: Any, depth: int) -> str:
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return str(value)
    if isinstance(value, re.Pattern):
        return json.dumps(value.pattern)
    if isinstance(value, type) or callable(value):
        return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else _named(kind)
    if dataclasses.is_dataclass(value):
        attributes = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        attributes = getattr(value, "__dict__", {})
    public = {name: item for name, item in attributes.items() if not name.startswith("_")}
    return _named(kind) + exact_text(public, depth + 1)


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def settings_digest(value: Any) -> str:
    """64 hex digits that stand for ``value`` where its text would be too long or would give too much away."""
    return blake3(exact_text(value).encode(), derive_key_context=CONTEXT).hexdigest()


def setting_name(key: str) -> str:
    """``key`` as a setting's name: lower-case letters, digits, dot and underscore. Other characters become their code point."""
    return re.sub(r"[^a-z0-9_]", lambda found: f".{ord(found[0]):x}.", key)


def sorted_settings(values: dict[str, str]) -> tuple[Setting, ...]:
    """Settings sorted by name."""
    return tuple(Setting(name, values[name]) for name in sorted(values))
