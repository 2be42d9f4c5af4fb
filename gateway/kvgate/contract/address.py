"""Addresses: token digests, the root-anchored chunk chain, and shard addresses. Only full chunks have addresses."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from kvgate.contract import specs
from kvgate.contract.digests import DIGEST_BYTES, Kind, digest, keyed
from kvgate.contract.encoding import encode
from kvgate.contract.errors import ContractError
from kvgate.contract.plan import Rectangle
from kvgate.contract.record import Record, frozen
from kvgate.contract.representation import MAX_CHUNK_TOKENS

assert sys.byteorder == "little", "tokens are hashed as u32 little-endian straight from memory"

_CHUNK: Final = struct.Struct("<32sQ32s")
_SHARD: Final = struct.Struct("<32sIIIII")
_NO_EXTRAS: Final = encode([])
_U32 = "I" if array("I").itemsize == 4 else "L"


@frozen
class Extra(Record):
    """A non-token input inside a chunk: the full digest of a multimodal item or prompt embedding, and where it lies in the chunk.

    ``offset_tokens`` is the item's start relative to the chunk's first token, plus 2**31 (an item may begin in an earlier chunk);
    ``length_tokens`` its whole length.
    """

    kind: str = specs.choice("multimodal", "embedding")
    digest: bytes = specs.digest32()
    offset_tokens: int = specs.uint(maximum=2**32 - 1)
    length_tokens: int = specs.uint(minimum=1, maximum=2**31)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as u32 little-endian, 4 bytes each. Raises ``ContractError`` for what is no integer from 0 to 2**32-1."""
    try:
        # An array takes bytes as ready-made machine words, not as a sequence of small numbers.
        if isinstance(tokens, bytes | bytearray):
            raise TypeError
        return array(_U32, tokens).tobytes()
    except (OverflowError, TypeError):
        raise ContractError("tokens", "hold something that is no token id", "integers from 0 to 2**32-1") from None


def token_digests(token_key: bytes, tokens: Sequence[int], chunk_tokens: int, start_chunk: int = 0) -> list[bytes]:
    """``t[n]`` of every full chunk of ``tokens`` from ``start_chunk`` on, for chunks without extras.

    ``token_key`` is the domain's 32-byte token key. Tokens after the last full chunk have no digest. Raises ``ContractError`` for a
    chunk size or a token out of range, and a negative ``start_chunk``.
    """
    if not 1 <= chunk_tokens <= MAX_CHUNK_TOKENS:
        raise ContractError("chunk_tokens", "is out of range", f"between 1 and {MAX_CHUNK_TOKENS}")
    if start_chunk < 0:
        raise ContractError("start_chunk", "is negative")
    packed = token_bytes(tokens[start_chunk * chunk_tokens :] if start_chunk else tokens)
    step = 4 * chunk_tokens
    head = struct.pack("<I", chunk_tokens)
    return [keyed(token_key, head + packed[at : at + step] + _NO_EXTRAS) for at in range(0, len(packed) - step + 1, step)]


def token_digest(token_key: bytes, tokens: Sequence[int], extras: Sequence[Extra] = ()) -> bytes:
    """``t`` of one chunk: 32-byte keyed hash of token count, tokens and extras. The order in which extras are given is not identity.

    Raises ``ContractError`` for what is no token id.
    """
    ordered = sorted(extras, key=lambda e: (e.offset_tokens, e.kind, e.digest, e.length_tokens))
    tail = encode([extra.to_value() for extra in ordered]) if ordered else _NO_EXTRAS
    return keyed(token_key, struct.pack("<I", len(tokens)) + token_bytes(tokens) + tail)


def chunk_address(parent: bytes, index: int, token: bytes) -> bytes:
    """``chunk[n] = H_chunk(chunk[n-1] or root, n, t[n])``, 32 bytes (docs/contract.md).

    Raises ``ContractError`` where ``parent`` or ``token`` is no digest, or ``index`` no u64.
    """
    if len(parent) != DIGEST_BYTES or len(token) != DIGEST_BYTES:
        raise ContractError("parent" if len(parent) != DIGEST_BYTES else "token", "must have exactly 32 bytes")
    try:
        packed = _CHUNK.pack(parent, index, token)
    except struct.error:
        raise ContractError("index", "is no chunk index", "an integer from 0 to 2**64-1") from None
    return digest(Kind.CHUNK, packed)


def chunk_chain(parent: bytes, tokens: Iterable[bytes], start_index: int = 0) -> list[bytes]:
    """Chunk addresses for consecutive token digests; ``parent`` is the root, or the address of chunk ``start_index - 1``.

    Raises ``ContractError`` as ``chunk_address`` does.
    """
    chain = []
    for index, token in enumerate(tokens, start_index):
        parent = chunk_address(parent, index, token)
        chain.append(parent)
    return chain


def shard_address(chunk: bytes, rectangle: Rectangle) -> bytes:
    """The 32-byte name of the one stored object that holds ``rectangle`` of ``chunk``: ``H_shard(chunk, group, layers, heads)``.

    Raises ``ContractError`` where ``chunk`` is no digest.
    """
    if len(chunk) != DIGEST_BYTES:
        raise ContractError("chunk", "must have exactly 32 bytes")
    r = rectangle
    return digest(Kind.SHARD, _SHARD.pack(chunk, r.group, r.layer_start, r.layer_end, r.head_start, r.head_end))
