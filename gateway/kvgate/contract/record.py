"""Frozen typed records: declared once, validated at construction, with exactly one encoding.

A record class lists its fields with a *spec* each (``text()``, ``uint()``, ``digest32()``, …). Validation, encoding, decoding and the
JSON form all walk that one list, so a field cannot be validated but left out of the digest, or the other way round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from kvgate.contract import specs
from kvgate.contract.decoding import DEFAULT_MAX_BYTES, decode
from kvgate.contract.digests import SCHEMA, Kind, digest
from kvgate.contract.encoding import MAX_VALUES, encode
from kvgate.contract.errors import ContractError

T = TypeVar("T")


@dataclass_transform(
    kw_only_default=True,
    frozen_default=True,
    field_specifiers=(
        specs.text,
        specs.uint,
        specs.raw_bytes,
        specs.digest32,
        specs.boolean,
        specs.choice,
        specs.record,
        specs.either,
        specs.array,
        specs.optional,
    ),
)
def frozen(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen, slotted, keyword-only record. Every field needs a spec (else ``TypeError``); there are no defaults."""
    made = dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)
    for field in dataclasses.fields(made):  # type: ignore[arg-type]
        if "spec" not in field.metadata:
            raise TypeError(f"{cls.__name__}.{field.name} has no spec")
    listed = tuple((f.name, f.metadata["spec"]) for f in dataclasses.fields(made))  # type: ignore[arg-type]
    made._specs = listed  # type: ignore[attr-defined]
    # Most values are decoded as what they are; these are not.
    made._converters = tuple((name, spec.from_value) for name, spec in listed if spec.from_value is not specs.unchanged)  # type: ignore[attr-defined]
    made._names = frozenset(name for name, _ in listed)  # type: ignore[attr-defined]
    # The order of RFC 8949 section 4.2.1: bytewise on the encoded keys, sorted once and not at every encoding.
    made._encoders = tuple(sorted((specs.text_bytes(name), name, spec.encode) for name, spec in listed))  # type: ignore[attr-defined]
    return made


class Record:
    """Base of all records. Subclasses are decorated with ``@frozen``."""

    __slots__ = ()
    _specs: ClassVar[tuple[tuple[str, specs.Spec], ...]] = ()
    _converters: ClassVar[tuple[tuple[str, Callable[[str, Any], Any]], ...]] = ()
    _names: ClassVar[frozenset[str]] = frozenset()
    _encoders: ClassVar[tuple[tuple[bytes, str, Callable[[Any], bytes]], ...]] = ()

    def __post_init__(self) -> None:
        for name, spec in self._specs:
            # The spec returns an immutable copy, so later changes to what the caller passed in change nothing here.
            given = getattr(self, name)
            kept = spec.check(name, given)
            if kept is not given:
                object.__setattr__(self, name, kept)
        self.validate()

    def validate(self) -> None:
        """Checks across fields; subclasses raise ``ContractError`` naming the field."""

    def to_value(self) -> dict[str, Any]:
        """The record as a value of the contract's type set, all fields present."""
        return {name: spec.to_value(getattr(self, name)) for name, spec in self._specs}

    def encode(self) -> bytes:
        """The one encoding of this record: that of ``to_value()``, written field by field."""
        encoded = self.encode_unbounded()
        # Every value takes a byte at least, so only long encodings need counting; ``encode`` does that.
        return encoded if len(encoded) <= MAX_VALUES else encode(self.to_value())

    def encode_unbounded(self) -> bytes:
        """``encode`` without its bound on the number of values, for a record inside something larger that is bounded itself."""
        parts = [specs.head(specs.MAP, len(self._encoders))]
        for key, name, to_bytes in self._encoders:
            parts.append(key)
            parts.append(to_bytes(getattr(self, name)))
        return b"".join(parts)

    @classmethod
    def from_value(cls, value: Any) -> Self:
        """Build from a decoded map. Raises ``ContractError`` naming a field that is missing, unknown or out of range."""
        if type(value) is dict and value.keys() == cls._names:
            return cls(**value | {name: convert(name, value[name]) for name, convert in cls._converters})
        return cls._build(value, lambda spec, name, item: spec.from_value(name, item))

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Build from parsed JSON: as ``from_value``, with bytes written as hexadecimal text."""
        return cls._build(value, lambda spec, name, item: spec.from_json(name, item))

    @classmethod
    def decode(cls, data: bytes, max_bytes: int = DEFAULT_MAX_BYTES) -> Self:
        """Decode strictly and validate. Raises ``ContractError`` naming the field, or what is wrong with the encoding."""
        return cls.from_value(decode(data, max_bytes))

    def to_json(self) -> dict[str, Any]:
        """The record for JSON output: bytes become hexadecimal text."""
        return {name: spec.to_json(getattr(self, name)) for name, spec in self._specs}

    @classmethod
    def _build(cls, value: Any, convert: Any) -> Self:
        if not isinstance(value, Mapping):
            raise ContractError(cls.__name__, "not a map")
        for key in value:
            if key not in cls._names:
                raise ContractError(specs.safe_name(key), f"unknown field of {cls.__name__}")
        fields = {}
        for name, spec in cls._specs:
            if name not in value:
                raise ContractError(name, f"missing in {cls.__name__}", "absent is an explicit null, never a missing field")
            fields[name] = convert(spec, name, value[name])
        return cls(**fields)


class IdentityRecord(Record):
    """A record with a digest of its own kind."""

    __slots__ = ()
    KIND: ClassVar[Kind]

    def digest(self, schema: int = SCHEMA) -> bytes:
        """32-byte digest of this record under its kind's context."""
        return digest(self.KIND, self.encode(), schema)
