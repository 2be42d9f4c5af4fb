"""Strict decoder for the contract's CBOR: accepts exactly the bytes that ``encoding.encode`` can produce, refuses all else by name."""

from __future__ import annotations

import unicodedata
from typing import Any

from kvgate.contract.encoding import INT_MIN, MAX_DEPTH, MAX_VALUES
from kvgate.contract.errors import ContractError

DEFAULT_MAX_BYTES = 1 << 20

_UINT, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE = range(8)
_FALSE, _TRUE, _NULL = 0xF4, 0xF5, 0xF6
# Smallest argument that needs the 1, 2, 4 and 8 byte form; anything smaller there is not the shortest head.
_SHORTEST = {24: 24, 25: 1 << 8, 26: 1 << 16, 27: 1 << 32}


def decode(data: bytes, max_bytes: int = DEFAULT_MAX_BYTES) -> Any:
    """Decode one value that fills ``data``; maps become dicts, arrays lists. Raises ``ContractError`` with the reason by name."""
    if len(data) > max_bytes:
        raise ContractError("cbor", "input too large", f"at most {max_bytes} bytes")
    reader = _Reader(bytes(data))
    value = reader.value(0)
    if reader.position != len(data):
        raise ContractError("cbor", "trailing bytes after the value")
    return value


class _Reader:
    __slots__ = ("data", "position", "values")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.values = 1

    def value(self, depth: int) -> Any:
        major, argument = self._head()
        if major == _UINT:
            return argument
        if major == _BYTES:
            return self._take(argument)
        if major == _TEXT:
            return self._text(argument)
        if major == _NEGATIVE:
            return self._negative(argument)
        if major == _SIMPLE:
            return {_FALSE: False, _TRUE: True, _NULL: None}[argument]
        if depth >= MAX_DEPTH:
            raise ContractError("cbor", "nested too deep", f"at most {MAX_DEPTH} levels")
        return self._array(argument, depth) if major == _ARRAY else self._map(argument, depth)

    def _head(self) -> tuple[int, int]:
        """Major type and argument; for the three simple values the argument is the initial byte itself."""
        initial = self._take(1)[0]
        major, info = initial >> 5, initial & 0x1F
        if major == _TAG:
            raise ContractError("cbor", "tag", "tags are outside the contract")
        if major == _SIMPLE:
            if initial in (_FALSE, _TRUE, _NULL):
                return _SIMPLE, initial
            name = "float" if 25 <= info <= 27 else "break without a start" if info == 31 else "simple value"
            raise ContractError("cbor", name, "only true, false and null are in the contract")
        if info < 24:
            return major, info
        if info == 31:
            raise ContractError("cbor", "indefinite length", "definite lengths only")
        if info not in _SHORTEST:
            raise ContractError("cbor", "reserved additional information")
        argument = int.from_bytes(self._take(1 << (info - 24)), "big")
        if argument < _SHORTEST[info]:
            raise ContractError("cbor", "head is not the shortest form")
        return major, argument

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise ContractError("cbor", "truncated")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def _negative(self, argument: int) -> int:
        value = -1 - argument
        if value < INT_MIN:
            raise ContractError("cbor", "integer out of range", "between -2**63 and 2**64-1")
        return value

    def _text(self, count: int) -> str:
        try:
            text = self._take(count).decode("utf-8")
        except UnicodeDecodeError:
            raise ContractError("cbor", "text is not valid UTF-8") from None
        if not unicodedata.is_normalized("NFC", text):
            raise ContractError("cbor", "text is not NFC")
        return text

    def _array(self, count: int, depth: int) -> list[Any]:
        self._check_count(count, 1)
        return [self.value(depth + 1) for _ in range(count)]

    def _map(self, count: int, depth: int) -> dict[str, Any]:
        self._check_count(count, 2)
        result: dict[str, Any] = {}
        previous = b""
        for _ in range(count):
            start = self.position
            major, length = self._head()
            if major != _TEXT:
                raise ContractError("cbor", "map key that is not text")
            key = self._text(length)
            encoded = self.data[start : self.position]
            if encoded == previous:
                raise ContractError("cbor", "duplicate map key")
            if encoded < previous:
                raise ContractError("cbor", "map keys out of order")
            previous = encoded
            result[key] = self.value(depth + 1)
        return result

    def _check_count(self, count: int, values_each: int) -> None:
        # Every value needs at least one byte: a huge count in a short input must not reserve memory.
        if count * values_each > len(self.data) - self.position:
            raise ContractError("cbor", "truncated")
        self.values += count * values_each
        if self.values > MAX_VALUES:
            raise ContractError("cbor", "holds too many values", f"at most {MAX_VALUES}")
