"""What fields records have, read from their declarations: independent of the specs that encode them."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import types
import typing
from collections.abc import Iterator
from typing import Any

import kvgate.contract
from kvgate.contract.record import IdentityRecord, Record

FORMS = {int: "integer", str: "text", bytes: "32 bytes", bool: "boolean"}


def leaf_paths(kind: type[Record], prefix: str) -> list[str]:
    """Dotted paths of all leaves below ``prefix``; ``[]`` stands for the items of an array."""
    return [path for path, _ in _leaves(kind, prefix)]


def leaf_forms(kind: type[Record], prefix: str) -> dict[str, str]:
    """What each leaf holds, in words."""
    return {path: _form(hint) for path, hint in _leaves(kind, prefix)}


def _form(hint: Any) -> str:
    arguments = typing.get_args(hint) or (hint,)
    return " or ".join("null" if one is type(None) else FORMS[one] for one in arguments)


def _leaves(kind: type[Record], prefix: str) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        yield from _inside(hints[field.name], f"{prefix}.{field.name}")


def _inside(hint: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(hint, type) and issubclass(hint, Record):
        yield from _leaves(hint, path)
        return
    arguments = [one for one in typing.get_args(hint) if one not in (type(None), Ellipsis)]
    nested = [one for one in arguments if isinstance(one, type) and issubclass(one, Record)]
    origin: Any = typing.get_origin(hint)
    if origin is tuple:
        yield from _inside(arguments[0], f"{path}[]")
    elif origin is types.UnionType and nested:
        for one in nested:
            yield from _inside(one, path)
    else:
        yield path, hint


def record_classes() -> set[type[Record]]:
    """Every record class that a module of the contract declares."""
    found = set()
    for module in pkgutil.iter_modules(kvgate.contract.__path__, "kvgate.contract."):
        for thing in vars(importlib.import_module(module.name)).values():
            if isinstance(thing, type) and issubclass(thing, Record) and thing not in (Record, IdentityRecord):
                found.add(thing)
    return found
