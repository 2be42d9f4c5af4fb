"""Strict decoder for the contract's CBOR: accepts exactly the bytes that ``encoding.encode`` can produce, refuses all else by name."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Any

from kvgate.contract.encoding import INT_MIN, MAX_DEPTH, MAX_VALUES
from kvgate.contract.errors import ContractError

DEFAULT_MAX_BYTES = 1 << 20

_UINT, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE = range(8)
_FALSE, _TRUE, _NULL = 0xF4, 0xF5, 0xF6
# Additional information → bytes of the argument, and the smallest that needs so many: anything smaller is not the shortest head.
_WIDTHS = {24: (1, 24), 25: (2, 1 << 8), 26: (4, 1 << 16), 27: (8, 1 << 32)}
# Initial byte → major type and argument, where that byte is the whole head and in the contract.
_SHORT_HEADS: tuple[tuple[int, int] | None, ...] = tuple(
    (initial >> 5, initial & 0x1F)
    if initial >> 5 < _TAG and initial & 0x1F < 24
    else (_SIMPLE, initial)
    if initial in (_FALSE, _TRUE, _NULL)
    else None
    for initial in range(256)
)
# Initial byte → major type, bytes of the argument, smallest argument.
_LONG_HEADS = {major << 5 | info: (major, *width) for major in range(_TAG) for info, width in _WIDTHS.items()}
_STRINGS = (_BYTES, _TEXT)
_KEY_LENGTHS = {_TEXT << 5 | length: length for length in range(24)}
_SIMPLE_VALUES = {_FALSE: False, _TRUE: True, _NULL: None}


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
    __slots__ = ("data", "end", "position", "values")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.end = len(data)
        self.position = 0
        self.values = 1

    def value(self, depth: int) -> Any:
        # This runs for every field of every message: heads of one byte are looked up here, all else is `_head`'s.
        begin = self.position
        short = _SHORT_HEADS[self.data[begin]] if begin < self.end else None
        if short is None:
            major, argument = self._head()
            begin = self.position
        else:
            major, argument = short
            self.position = begin = begin + 1
        if major in _STRINGS:
            stop = begin + argument
            if stop > self.end:
                raise ContractError("cbor", "truncated")
            self.position = stop
            taken = self.data[begin:stop]
            return taken if major == _BYTES else _text(taken)
        if major == _UINT:
            return argument
        if major == _SIMPLE:
            return _SIMPLE_VALUES[argument]
        if major == _NEGATIVE:
            return self._negative(argument)
        if depth >= MAX_DEPTH:
            raise ContractError("cbor", "nested too deep", f"at most {MAX_DEPTH} levels")
        return self._array(argument, depth) if major == _ARRAY else self._map(argument, depth)

    def _head(self) -> tuple[int, int]:
        """Major type and argument; for the three simple values the argument is the initial byte itself."""
        begin = self.position
        if begin >= self.end:
            raise ContractError("cbor", "truncated")
        initial = self.data[begin]
        self.position = begin + 1
        short = _SHORT_HEADS[initial]
        if short is not None:
            return short
        long = _LONG_HEADS.get(initial)
        if long is None:
            raise _refused_head(initial)
        major, width, shortest = long
        argument = int.from_bytes(self._take(width), "big")
        if argument < shortest:
            raise ContractError("cbor", "head is not the shortest form")
        return major, argument

    def _take(self, count: int) -> bytes:
        begin = self.position
        stop = begin + count
        if stop > self.end:
            raise ContractError("cbor", "truncated")
        self.position = stop
        return self.data[begin:stop]

    def _negative(self, argument: int) -> int:
        value = -1 - argument
        if value < INT_MIN:
            raise ContractError("cbor", "integer out of range", "between -2**63 and 2**64-1")
        return value

    def _array(self, count: int, depth: int) -> list[Any]:
        self._check_count(count, 1)
        return [self.value(depth + 1) for _ in range(count)]

    def _map(self, count: int, depth: int) -> dict[str, Any]:
        self._check_count(count, 2)
        result: dict[str, Any] = {}
        previous = b""
        data = self.data
        for _ in range(count):
            begin = self.position
            # A field name is short: its length is the byte before it.
            length = _KEY_LENGTHS.get(data[begin]) if begin < self.end else None
            if length is not None and begin + length < self.end:
                self.position = stop = begin + 1 + length
                encoded = data[begin:stop]
                key = _short_key(encoded)
            else:
                key = self._key()
                encoded = data[begin : self.position]
            if encoded <= previous:
                raise ContractError("cbor", "duplicate map key" if encoded == previous else "map keys out of order")
            previous = encoded
            result[key] = self.value(depth + 1)
        return result

    def _key(self) -> str:
        major, length = self._head()
        if major != _TEXT:
            raise ContractError("cbor", "map key that is not text")
        return _text(self._take(length))

    def _check_count(self, count: int, values_each: int) -> None:
        # Every value needs at least one byte: a huge count in a short input must not reserve memory.
        if count * values_each > self.end - self.position:
            raise ContractError("cbor", "truncated")
        self.values += count * values_each
        if self.values > MAX_VALUES:
            raise ContractError("cbor", "holds too many values", f"at most {MAX_VALUES}")


def _refused_head(initial: int) -> ContractError:
    """Why no value of the contract begins with this byte."""
    major, info = initial >> 5, initial & 0x1F
    if major == _TAG:
        return ContractError("cbor", "tag", "tags are outside the contract")
    if major == _SIMPLE:
        name = "float" if 25 <= info <= 27 else "break without a start" if info == 31 else "simple value"
        return ContractError("cbor", name, "only true, false and null are in the contract")
    if info == 31:
        return ContractError("cbor", "indefinite length", "definite lengths only")
    return ContractError("cbor", "reserved additional information")


def _text(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ContractError("cbor", "text is not valid UTF-8") from None
    if not text.isascii() and not unicodedata.is_normalized("NFC", text):
        raise ContractError("cbor", "text is not NFC")
    return text


@lru_cache(maxsize=1024)
def _short_key(encoded: bytes) -> str:
    """The text of a key with a head of one byte. The same few field names come with every message."""
    return _text(encoded[1:])
