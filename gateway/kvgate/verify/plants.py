"""What a run plants: prompts under known identities, with payload bytes that can be made again from the run's number alone.

Nothing has to be kept between planting and checking but that number: tokens, payloads and contracts all follow from it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from blake3 import blake3

from kvgate.contract.address import Extra, token_digest
from kvgate.verify import derive, sample
from kvgate.verify.sample import EARLY, Shape, Value

MULTIMODAL: Final[Value] = {
    "kind": "multimodal",
    "digest": sample.digest_of("picture"),
    "offset_tokens": 2**31,
    "length_tokens": 1,
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """One full chunk: its tokens, and its extras as values."""

    tokens: tuple[int, ...]
    extras: tuple[Value, ...] = ()

    def digest(self, token_key: bytes) -> bytes:
        """``t``, by the very function that engines use."""
        return token_digest(token_key, self.tokens, [Extra.from_value(extra) for extra in self.extras])

    def documented(self, token_key: bytes) -> bytes:
        """``t``, as the documentation says."""
        return derive.token_digest(token_key, list(self.tokens), list(self.extras))


Prompt = list[Chunk]


@dataclass(frozen=True, slots=True)
class Plant:
    """One prompt stored under one identity. ``patch``: what differs from the ordinary request.

    ``left_out``: a (pp, tp) rank that never commits its rectangle. ``given_up``: reserved and written, but dropped.
    """

    name: str
    chunks: int
    same: str
    patch: Mapping[str, Any] = field(default_factory=dict)
    extras: tuple[Value, ...] = ()
    left_out: tuple[int, int] | None = None
    given_up: bool = False

    @property
    def whole(self) -> bool:
        """Whether it must be found again."""
        return self.left_out is None and not self.given_up


FOUR: Final = sample.split_into(sample.plan(EARLY, EARLY))
"""The request on two stages of two workers."""

PLANTS: Final = (
    Plant("ordinary", 2, "same request"),
    Plant("sibling", 1, "another prompt, same request"),
    Plant("four", 2, "same request on four workers", FOUR),
    Plant("gap", 1, "one rectangle of four is missing", FOUR, left_out=(1, 1)),
    Plant("given up", 1, "a reservation that was given up", given_up=True),
    Plant("adapter", 1, "same request with an adapter", {"model.adapter": sample.adapter()}),
    Plant("salted", 1, "same request with a cache salt", {"access.salt": sample.digest_of("salt one")}),
    Plant(
        "request",
        1,
        "same request of scope request",
        {"access.scope": "request", "access.scope_key": sample.digest_of("request one")},
    ),
    Plant("extras", 1, "same request with a picture", extras=(MULTIMODAL,)),
)


def class_plant(name: str) -> Plant:
    """A prompt of a declared engine class."""
    return Plant("class", 1, "same request of an engine class", {"model.numerics": sample.numerics_class(name)})


@dataclass(frozen=True, slots=True)
class Run:
    """One run: 32 random bytes, the shape of its gateway, and the engine classes it plants for. ``names``: of plants; none: all."""

    number: bytes
    shape: Shape
    classes: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()

    @property
    def plants(self) -> tuple[Plant, ...]:
        """All that is planted, once for each tier."""
        made = (*PLANTS, *(class_plant(name) for name in self.classes[:1]))
        return tuple(plant for plant in made if not self.names or plant.name in self.names)

    def request(self, patch: Mapping[str, Any]) -> Value:
        """The ordinary request with ``patch``."""
        return sample.changed(sample.request(self.shape), patch)

    def prompt(self, tier: str, plant: Plant) -> Prompt:
        """The planted prompt: other tokens for each tier, so that each tier is checked on objects of its own."""
        return [
            Chunk(self.tokens(f"{tier} {plant.name} {index}"), plant.extras if index == plant.chunks - 1 else ())
            for index in range(plant.chunks)
        ]

    def tokens(self, text: str) -> tuple[int, ...]:
        """A chunk's worth of token ids that stand for ``text``."""
        data = self.made(f"tokens {text}", 4 * self.shape.chunk_tokens)
        return tuple(number & 0x7FFFFFFF for number in struct.unpack(f"<{self.shape.chunk_tokens}I", data))

    def payload(self, tier: str, plant: Plant, chunk: int, rectangle: int, length: int) -> bytes:
        """The bytes of one object."""
        return self.made(f"payload {tier} {plant.name} {chunk} {rectangle}", length)

    def made(self, text: str, length: int) -> bytes:
        """``length`` bytes that stand for ``text`` in this run alone."""
        return bytes(blake3(text.encode(), key=self.number).digest(length=length))

    def engine(self, text: str) -> bytes:
        """The 16 bytes of an engine start."""
        return self.made(f"engine {text}", 16)

    def second(self) -> bytes:
        """The number of the run's other domain."""
        return self.made("other domain", 32)
