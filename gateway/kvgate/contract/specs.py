"""Field specs: what a field of a record may hold, how it is frozen, encoded, decoded and written as JSON."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kvgate.contract.digests import DIGEST_BYTES
from kvgate.contract.encoding import INT_MAX, check_text
from kvgate.contract.errors import ContractError

if TYPE_CHECKING:
    from kvgate.contract.record import Record

MAX_TEXT_CHARS = 256
MAX_ITEMS = 65_536


def unchanged(_name: str, value: Any) -> Any:
    """The value as it is decoded is its frozen form, or what ``check`` makes that of."""
    return value


@dataclasses.dataclass(frozen=True)
class Spec:
    """How one field behaves. ``check`` freezes and validates; the others convert between the frozen value and other forms.

    ``encode`` gives the deterministic encoding of ``to_value``'s result. It trusts the value: ``check`` has seen it.
    """

    check: Callable[[str, Any], Any]
    encode: Callable[[Any], bytes]
    to_value: Callable[[Any], Any] = lambda value: value
    from_value: Callable[[str, Any], Any] = unchanged
    to_json: Callable[[Any], Any] = lambda value: value
    from_json: Callable[[str, Any], Any] = lambda _name, value: value


UINT, BYTES, TEXT, ARRAY, MAP = 0, 2, 3, 4, 5
"""CBOR major types."""
_HEADS: Final = tuple(bytes([initial]) for initial in range(256))
_WIDER: Final = ((1 << 8, struct.Struct(">BB"), 24), (1 << 16, struct.Struct(">BH"), 25), (1 << 32, struct.Struct(">BI"), 26))
_WIDEST: Final = struct.Struct(">BQ")
_FALSE, _TRUE, _NULL = b"\xf4", b"\xf5", b"\xf6"


def head(major: int, argument: int) -> bytes:
    """The shortest CBOR head; ``argument`` is from 0 to 2**64-1."""
    if argument < 24:
        return _HEADS[major << 5 | argument]
    for bound, layout, info in _WIDER:
        if argument < bound:
            return layout.pack(major << 5 | info, argument)
    return _WIDEST.pack(major << 5 | 27, argument)


def text_bytes(value: str) -> bytes:
    """The encoding of well-formed NFC text."""
    raw = value.encode("utf-8")
    return head(TEXT, len(raw)) + raw


def _field(spec: Spec) -> Any:
    return dataclasses.field(metadata={"spec": spec})


def spec_of(field: Any) -> Spec:
    """The spec inside a field made by one of the functions below (to nest one in ``array`` or ``optional``)."""
    spec = field.metadata["spec"]
    assert isinstance(spec, Spec)
    return spec


def safe_name(key: Any) -> str:
    """A field name for an error message; anything that does not look like a name is not repeated (it may be secret)."""
    return key if isinstance(key, str) and re.fullmatch(r"[a-z0-9_]{1,40}", key) else "field"


def text(*, pattern: str | None = None, max_chars: int = MAX_TEXT_CHARS) -> Any:
    """Non-empty NFC text, optionally matching ``pattern`` in full."""
    compiled = re.compile(pattern) if pattern else None

    def check(name: str, value: Any) -> str:
        if type(value) is not str:
            raise ContractError(name, f"is {type(value).__name__}", "must be text")
        if not value:
            raise ContractError(name, "is empty", "give a value; absent has its own explicit form")
        if len(value) > max_chars:
            raise ContractError(name, "is too long", f"at most {max_chars} characters")
        check_text(value, name)
        if compiled and not compiled.fullmatch(value):
            raise ContractError(name, "has the wrong form", f"must match {pattern}")
        return value

    return _field(Spec(check, text_bytes))


def uint(*, minimum: int = 0, maximum: int = INT_MAX) -> Any:
    """An unsigned integer in a range, ends included."""

    def check(name: str, value: Any) -> int:
        if type(value) is not int:
            raise ContractError(name, f"is {type(value).__name__}", "must be an integer")
        if not minimum <= value <= maximum:
            raise ContractError(name, "is out of range", f"between {minimum} and {maximum}")
        return value

    return _field(Spec(check, lambda value: head(UINT, value)))


def raw_bytes(*, max_bytes: int, exact: int | None = None, multiple: int = 1) -> Any:
    """A byte string of bounded length; hexadecimal in JSON."""

    def check(name: str, value: Any) -> bytes:
        if type(value) is bytes:
            frozen = value
        elif isinstance(value, bytes | bytearray | memoryview):
            frozen = bytes(value)
        else:
            raise ContractError(name, f"is {type(value).__name__}", "must be bytes")
        if exact is not None and len(frozen) != exact:
            raise ContractError(name, f"has {len(frozen)} bytes", f"must have exactly {exact}")
        if len(frozen) > max_bytes or len(frozen) % multiple:
            raise ContractError(name, f"has {len(frozen)} bytes", f"a multiple of {multiple}, at most {max_bytes}")
        return frozen

    def from_json(name: str, value: Any) -> bytes:
        if type(value) is not str or not re.fullmatch(r"(?:[0-9a-f]{2})*", value):
            raise ContractError(name, "is not hexadecimal", "lower-case hexadecimal text")
        return bytes.fromhex(value)

    return _field(Spec(check, lambda value: head(BYTES, len(value)) + value, to_json=bytes.hex, from_json=from_json))


def digest32() -> Any:
    """A 32-byte digest. All zero is refused: it is what a forgotten field looks like."""
    inner = spec_of(raw_bytes(max_bytes=DIGEST_BYTES, exact=DIGEST_BYTES))

    def check(name: str, value: Any) -> bytes:
        frozen: bytes = inner.check(name, value)
        if not any(frozen):
            raise ContractError(name, "is all zero", "compute the digest; absent has its own explicit form")
        return frozen

    return _field(dataclasses.replace(inner, check=check))


def boolean() -> Any:
    """True or False."""

    def check(name: str, value: Any) -> bool:
        if type(value) is not bool:
            raise ContractError(name, f"is {type(value).__name__}", "must be true or false")
        return value

    return _field(Spec(check, lambda value: _TRUE if value else _FALSE))


def choice(*options: str) -> Any:
    """One of a closed set of words."""

    def check(name: str, value: Any) -> str:
        if type(value) is not str or value not in options:
            raise ContractError(name, "is not a known word", "one of " + ", ".join(options))
        return value

    encoded = {option: text_bytes(option) for option in options}
    return _field(Spec(check, encoded.__getitem__))


def record(kind: type[Record]) -> Any:
    """A nested record of one class."""
    return either(kind)


def either(*kinds: type[Record]) -> Any:
    """A nested record of one of several classes. With more than one, the class is told apart by an explicit ``is`` entry."""
    names = {kind.__name__: kind for kind in kinds}
    single = kinds[0] if len(kinds) == 1 else None
    tags = {kind: head(MAP, 2) + text_bytes("is") + text_bytes(kind.__name__) + text_bytes("value") for kind in kinds}

    def check(name: str, value: Any) -> Record:
        if type(value) not in kinds:
            raise ContractError(name, f"is {type(value).__name__}", "must be " + " or ".join(names))
        checked: Record = value
        return checked

    def wrap(value: Record, body: dict[str, Any]) -> dict[str, Any]:
        return body if single else {"is": type(value).__name__, "value": body}

    def encode(value: Record) -> bytes:
        return value.encode_unbounded() if single else tags[type(value)] + value.encode_unbounded()

    def pick(name: str, value: Any) -> tuple[type[Record], Any]:
        if single:
            return single, value
        tagged = isinstance(value, dict) and set(value) == {"is", "value"} and type(value["is"]) is str
        if not tagged or value["is"] not in names:
            raise ContractError(name, "is not a tagged record", "'is' one of " + ", ".join(names) + ", and 'value'")
        return names[value["is"]], value["value"]

    def from_value(name: str, value: Any) -> Record:
        if single is None or type(value) is not dict:
            return build(name, value, "from_value")
        try:
            return single.from_value(value)
        except ContractError as error:
            raise error.within(name) from None

    def build(name: str, value: Any, method: str) -> Record:
        kind, body = pick(name, value)
        if not isinstance(body, Mapping):
            raise ContractError(name, f"is {type(body).__name__}", f"must be a map of the fields of {kind.__name__}")
        try:
            built: Record = getattr(kind, method)(body)
        except ContractError as error:
            raise error.within(name) from None
        return built

    return _field(
        Spec(
            check,
            encode,
            to_value=lambda value: wrap(value, value.to_value()),
            from_value=from_value,
            to_json=lambda value: wrap(value, value.to_json()),
            from_json=lambda name, value: build(name, value, "from_json"),
        )
    )


def array(item: Any, *, minimum: int = 0, maximum: int = MAX_ITEMS) -> Any:
    """A tuple of items of one spec, bounded in length."""
    spec = spec_of(item)

    def each(name: str, values: Iterable[Any], convert: Callable[[str, Any], Any]) -> tuple[Any, ...]:
        try:
            return tuple([convert("", value) for value in values])
        except ContractError:
            # Once more, for the error that names the item: good ones are not worth a name each.
            return tuple([convert(f"{name}[{index}]", value) for index, value in enumerate(values)])

    def check(name: str, value: Any) -> tuple[Any, ...]:
        if type(value) not in (list, tuple):
            raise ContractError(name, f"is {type(value).__name__}", "must be a list or tuple")
        if not minimum <= len(value) <= maximum:
            raise ContractError(name, f"has {len(value)} items", f"between {minimum} and {maximum}")
        return each(name, value, spec.check)

    def convert_with(convert: Callable[[str, Any], Any]) -> Callable[[str, Any], tuple[Any, ...]]:
        def from_list(name: str, value: Any) -> tuple[Any, ...]:
            if type(value) is not list:
                raise ContractError(name, f"is {type(value).__name__}", "must be an array")
            if len(value) > maximum:
                raise ContractError(name, f"has {len(value)} items", f"at most {maximum}")
            return each(name, value, convert)

        return from_list

    return _field(
        Spec(
            check,
            lambda value: b"".join([head(ARRAY, len(value)), *map(spec.encode, value)]),
            to_value=lambda value: [spec.to_value(one) for one in value],
            from_value=convert_with(spec.from_value),
            to_json=lambda value: [spec.to_json(one) for one in value],
            from_json=convert_with(spec.from_json),
        )
    )


def optional(item: Any) -> Any:
    """The item, or None as the explicit "there is none". The field itself is still required."""
    spec = spec_of(item)
    return _field(
        Spec(
            check=lambda name, value: None if value is None else spec.check(name, value),
            encode=lambda value: _NULL if value is None else spec.encode(value),
            to_value=lambda value: None if value is None else spec.to_value(value),
            from_value=lambda name, value: None if value is None else spec.from_value(name, value),
            to_json=lambda value: None if value is None else spec.to_json(value),
            from_json=lambda name, value: None if value is None else spec.from_json(name, value),
        )
    )
