"""Deterministic CBOR (RFC 8949 section 4.2.1) on a small type set, one byte string per value.

Values are ints from -2**63 to 2**64-1, bytes, NFC text, sequences, maps with text keys, True, False and None. On text-key maps
cbor2's canonical order (length first) and section 4.2.1 (bytewise on the encoded key) agree, because the head of a text
string grows with its length; on mixed keys they differ, which is why only text keys are in the set.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import cbor2

from kvgate.contract.errors import ContractError

INT_MIN = -(2**63)
INT_MAX = 2**64 - 1
MAX_DEPTH = 16
MAX_VALUES = 1 << 17
"""Values in one encoding, counted with everything nested in it (a map's keys count too): bounds what a short input can unfold to."""

TYPE_NAMES = "int, bytes, text, array, map with text keys, true, false or null"


def encode(value: Any) -> bytes:
    """The one encoding of ``value``; raises ``ContractError`` for anything outside the type set."""
    check(value, "value", 0)
    encoded: bytes = cbor2.dumps(value, canonical=True)
    # Every value takes a byte at least, so only long encodings need counting.
    if len(encoded) > MAX_VALUES and _count(value) > MAX_VALUES:
        raise ContractError("value", "holds too many values", f"at most {MAX_VALUES}")
    return encoded


def check(value: Any, path: str, depth: int) -> None:
    """Raise ``ContractError`` naming ``path`` where ``value`` leaves the type set."""
    if value is None or value is True or value is False:
        return
    kind = type(value)
    if kind is int:
        if not INT_MIN <= value <= INT_MAX:
            raise ContractError(path, "integer out of range", "between -2**63 and 2**64-1")
    elif kind is str:
        check_text(value, path)
    elif kind is bytes:
        return
    elif depth >= MAX_DEPTH:
        raise ContractError(path, "nested too deep", f"at most {MAX_DEPTH} levels")
    elif kind in (list, tuple):
        _check_sequence(value, path, depth)
    elif kind is dict:
        _check_map(value, path, depth)
    else:
        # Subclasses (IntEnum, OrderedDict, numpy ints) are refused too: their encoding is not ours to promise.
        raise ContractError(path, f"type {kind.__name__} is outside the contract", TYPE_NAMES)


def check_text(text: str, path: str) -> None:
    """Raise ``ContractError`` unless ``text`` is well-formed NFC."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ContractError(path, "text holds a lone surrogate", "valid Unicode") from None
    if not unicodedata.is_normalized("NFC", text):
        raise ContractError(path, "text is not NFC", "normalise it with unicodedata.normalize('NFC', …)")


def _count(value: Any) -> int:
    if type(value) is dict:
        return 1 + len(value) + sum(map(_count, value.values()))
    if type(value) in (list, tuple):
        return 1 + sum(map(_count, value))
    return 1


def _check_sequence(value: Sequence[Any], path: str, depth: int) -> None:
    for index, item in enumerate(value):
        check(item, f"{path}[{index}]", depth + 1)


def _check_map(value: Mapping[Any, Any], path: str, depth: int) -> None:
    for key, item in value.items():
        if type(key) is not str:
            raise ContractError(path, f"map key of type {type(key).__name__}", "text keys only")
        check_text(key, path)
        check(item, f"{path}.{key}", depth + 1)
