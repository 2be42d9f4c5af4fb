"""Transformed artifacts of a run: a SnapKV-like choice of every other token of the ordinary prompt, with its manifest.

No KV is transformed: what an artifact holds is made up like all payloads of a run. What counts is who gets which bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from blake3 import blake3

from kvgate.client.wire import Wire
from kvgate.contract.address import token_digest
from kvgate.contract.manifest import TransformManifest, position_map, query_digest, retained
from kvgate.protocol.messages import Commit, Committed, Reserved, WrittenPayload
from kvgate.protocol.variant_messages import (
    BindVariant,
    DescribeSource,
    ModelOpened,
    OpenModel,
    OpenVariant,
    ReserveRectangle,
    SealVariant,
    SourceDescribed,
    VariantBound,
    VariantOpened,
    VariantSealed,
)
from kvgate.verify.engine import ACQUIRE_MS, Desk, Engine
from kvgate.verify.link import CannotRun, call
from kvgate.verify.plants import PLANTS, Chunk, Run
from kvgate.verify.sample import LAYERS, Value, changed

TTL_S: Final = 7 * 86_400
ALGORITHM: Final = "kvgate-verify-snapkv"


@dataclass(frozen=True, slots=True)
class Source:
    """What an artifact is made from: token ids, the ``t`` of their whole chunks, that of the rest."""

    tokens: tuple[int, ...]
    digests: tuple[bytes, ...]
    tail: bytes | None


@dataclass(slots=True)
class Publisher:
    """A client in a run's domain, attached to the ordinary engine. ``capabilities``: by tier and artifact, as far as they are known."""

    run: Run
    desk: Desk
    wire: Wire
    engine: Engine
    opened: ModelOpened
    capabilities: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    async def open(cls, run: Run, desk: Desk, engine: Engine) -> Publisher:
        """Enter the domain as a client, and attach."""
        wire, _ = await desk.links.enter("client", run.number)
        return cls(run, desk, wire, engine, await call(wire, OpenModel(handle=engine.handle, model=None), ModelOpened))

    def source(self, tier: str, *, other: bool = False, shorter: bool = False) -> Source:
        """The ordinary prompt; ``other``: one that has other tokens wherever none is retained; ``shorter``: without its last token."""
        tokens = [token for chunk in self.run.prompt(tier, PLANTS[0]) for token in chunk.tokens]
        if other:
            tokens = [token if at % 2 else token ^ 1 for at, token in enumerate(tokens)]
        if shorter:
            tokens.pop()
        step, key = self.run.shape.chunk_tokens, self.opened.token_key
        whole = len(tokens) // step * step
        digests = tuple(Chunk(tuple(tokens[at : at + step])).digest(key) for at in range(0, whole, step))
        return Source(tuple(tokens), digests, token_digest(key, tokens[whole:]) if whole < len(tokens) else None)

    def retained(self, tier: str) -> list[bytes]:
        """The ``t`` of the artifact's own tokens: every other one of the source, one whole chunk."""
        return [Chunk(self.source(tier).tokens[1::2]).digest(self.opened.token_key)]

    async def manifest(self, source: Source, patch: Mapping[str, Any]) -> Value:
        """The manifest of an artifact of ``source``, with changes."""
        step = self.run.shape.chunk_tokens
        message = DescribeSource(
            handle=self.engine.handle,
            adapter=None,
            salt=None,
            scope="prefix",
            tokens=b"".join(source.digests),
            source_tokens=len(source.tokens),
            tail=source.tail,
        )
        described = await call(self.wire, message, SourceDescribed)
        positions = [[list(range(1, 2 * step, 2))]]
        value = {
            "algorithm": ALGORITHM,
            "algorithm_version": "1",
            "parameters": [{"name": "ratio", "value": "0.5"}],
            "source_prefix": described.source_prefix,
            "source_tokens": len(source.tokens),
            "retained": retained(positions, "model").to_value(),
            "position_map": position_map(positions, [[list(range(step))]]),
            "query": self.query("A"),
            "payload_format": described.payload_format,
            "model": described.model,
            "scope": "query",
        }
        return changed(value, patch)

    def query(self, name: str) -> bytes:
        """Digest of a query's tokens."""
        return query_digest(self.opened.token_key, self.run.tokens(f"query {name}"))

    async def find(self, manifest: Value, source: Source, tokens: Sequence[bytes]) -> VariantOpened:
        """Open an artifact by its exact manifest. Raises ``GatewayRefused``, ``ContractError``."""
        message = OpenVariant(
            handle=self.engine.handle,
            adapter=None,
            salt=None,
            manifest=TransformManifest.from_value(manifest),
            source=b"".join(source.digests),
            tail=source.tail,
            tokens=b"".join(tokens),
        )
        return await call(self.wire, message, VariantOpened)

    async def seal(self, lease: bytes) -> bytes:
        """The capability of an opened artifact. Raises ``GatewayRefused`` where it is not stored."""
        message = SealVariant(lease=lease, ttl_s=TTL_S, deadline_ms=ACQUIRE_MS)
        return (await call(self.wire, message, VariantSealed)).capability

    async def store(self, lease: bytes, payload: bytes | None, name: str) -> None:
        """Write the one rectangle of an opened artifact; ``payload`` None: bytes that stand for ``name``. Raises ``CannotRun``."""
        reserved = await call(self.wire, ReserveRectangle(lease=lease, rectangle=0, chunks=(0,)), Reserved)
        (slot,) = reserved.slots
        if slot.status != "slot":
            raise CannotRun(f"an artifact could not be stored: {slot.status}; see `kvgate status`")
        data = payload or self.payload(name, slot.length)
        self.engine.view(reserved, slot)[:] = data
        written = WrittenPayload(reservation=slot.reservation, digest=blake3(data).digest())
        await call(self.wire, Commit(written=(written,), aborted=()), Committed)

    def payload(self, name: str, length: int) -> bytes:
        """The bytes of an artifact."""
        return self.run.made(f"payload of artifact {name}", length)


async def bind(engine: Engine, request: Value, capability: bytes, tokens: Sequence[bytes]) -> VariantBound:
    """Present a capability as a scheduler does. Raises ``GatewayRefused``."""
    message = BindVariant(
        handle=engine.handle,
        adapter=await engine.adapter(request["model"]["adapter"]),
        salt=request["access"]["salt"],
        capability=capability,
        tokens=b"".join(tokens),
    )
    return await call(engine.desk.scheduler, message, VariantBound)


MANIFESTS: Final[dict[str, list[tuple[dict[str, Any], str]]]] = {
    "manifest.algorithm": [({"algorithm": "kvgate-verify-other"}, "")],
    "manifest.algorithm_version": [({"algorithm_version": "2"}, "")],
    "manifest.parameters[].name": [({"parameters[0].name": "ratios"}, "")],
    "manifest.parameters[].value": [({"parameters[0].value": "0.25"}, ""), ({"parameters": []}, "")],
    "manifest.source_prefix": [({}, "other source"), ({"source_prefix": b"\1" * 32}, "")],
    "manifest.source_tokens": [({}, "shorter source")],
    "manifest.retained.per": [
        ({"retained.per": "layer", "retained.layers": LAYERS}, "tied"),
        ({"retained.per": "layer"}, ""),
    ],
    "manifest.retained.layers": [({"retained.per": "layer", "retained.layers": LAYERS}, "tied"), ({"retained.layers": 2}, "")],
    "manifest.retained.heads": [
        ({"retained.per": "head", "retained.layers": LAYERS, "retained.heads": LAYERS}, "tied"),
        ({"retained.heads": 2}, ""),
    ],
    "manifest.retained.tokens": [({"retained.tokens": 0}, "")],
    "manifest.retained.positions": [({"retained.positions": b"\2" * 32}, "")],
    "manifest.position_map": [({"position_map": b"\3" * 32}, "")],
    "manifest.query": [({}, "other query")],
    "manifest.payload_format": [({"payload_format": b"\4" * 32}, "")],
    "manifest.model": [({"model": b"\5" * 32}, "")],
    "manifest.scope": [
        ({"scope": "request"}, "tied"),
        ({"scope": "prefix", "query": None}, ""),
        ({"scope": "global", "query": None}, ""),
    ],
}
"""Path of the manifest's table → other manifests, and what else is other: "tied" where more changes with it."""
