"""The SDK: fetch the KV of a prefix, transform it, publish the result, and get the capability with which vLLM decodes from it.

``docs/variants.md`` has a complete example. Needs numpy; torch only where tensors are asked for or given.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast

from kvgate.client.artifacts import (
    CAPABILITY_FIELD,
    Artifact,
    Prefix,
    Source,
    VariantCapability,
    as_floats,
    as_token_ids,
)
from kvgate.client.client import GatewayClient
from kvgate.client.errors import ArtifactError, GatewayRefused, GatewayUnavailable, NotStored
from kvgate.client.leftovers import LEFTOVERS
from kvgate.client.moves import Deadline, Mover
from kvgate.client.payloads import require_finite, require_supported
from kvgate.client.pools import PoolMappings
from kvgate.config import default_endpoint
from kvgate.contract.address import token_digest, token_digests
from kvgate.contract.keys import salt_digest
from kvgate.contract.manifest import TransformManifest
from kvgate.contract.record import Record
from kvgate.protocol.messages import Bind, Bound
from kvgate.protocol.variant_messages import (
    BindVariant,
    DescribeSource,
    ModelOpened,
    OpenModel,
    OpenVariant,
    SealVariant,
    SourceDescribed,
    VariantBound,
    VariantOpened,
    VariantSealed,
)

DEADLINE_S: Final = 30.0
CONNECT_S: Final = 5.0
TTL_S: Final = 3600

Legacy = tuple[Any, Any, Sequence[int]]
"""A result without a manifest: keys, values, logical token ids."""
R = TypeVar("R", bound=Record)

__all__ = [
    "CAPABILITY_FIELD",
    "Artifact",
    "ArtifactError",
    "Gateway",
    "GatewayRefused",
    "GatewayUnavailable",
    "NotStored",
    "Prefix",
    "Source",
    "VariantCapability",
]


class Gateway:
    """A client of the gateway at ``endpoint`` (a unix socket; default: where ``kvgate serve`` listens by default).

    ``credential`` names the isolation domain, None the default one. ``model``: hexadecimal digits that the wanted engine's model digest
    begins with (`kvgate status` shows it); None where only one model is registered. An engine of that model must be connected to the
    gateway at the time of each call: its registration is what KV is fetched and published under. ``deadline_s`` bounds each call,
    ``connect_s`` the part of it that waits for a gateway.

    Every method raises ``GatewayRefused`` (the gateway says no, and why), ``GatewayUnavailable`` (no answer, or not in time), and
    ``ArtifactError`` for arguments that make no sense. Thread-safe. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        credential: bytes | None = None,
        model: str | None = None,
        deadline_s: float = DEADLINE_S,
        connect_s: float = CONNECT_S,
    ) -> None:
        if importlib.util.find_spec("numpy") is None:
            raise ModuleNotFoundError("the SDK needs numpy beside kvgate: pip install numpy", name="numpy")
        self._model = model
        self._deadline_s = deadline_s
        self._connect_s = connect_s
        self._endpoint = endpoint or default_endpoint()
        self._pools = PoolMappings()
        self._client = GatewayClient(self._endpoint, "client", credential, on_connect=LEFTOVERS.give_back)
        self._client.start()

    def opened(self) -> ModelOpened:
        """The engine as it is registered now: model contract, representation, plan, keys of the domain."""
        return self._open(Deadline(self._deadline_s))

    def source(self, tokens: Sequence[int], *, adapter: bytes | str | None = None, salt: str | None = None) -> Source:
        """Name a source without fetching its KV, for artifacts that are not made of it (a trained prefix).

        ``adapter``: digest of the adapter's artifact set, or hexadecimal digits it begins with; None: no adapter. ``salt``: the
        request's cache salt.
        """
        deadline = Deadline(self._deadline_s)
        return self._source(self._open(deadline), tokens, adapter, salt, deadline)

    def fetch(self, tokens: Sequence[int], *, adapter: bytes | str | None = None, salt: str | None = None) -> Prefix:
        """The KV of ``tokens``, from their first whole chunk to their last; what lies after it has no KV and is no part of the source.

        Raises ``NotStored`` where not all of it is stored.
        """
        deadline = Deadline(self._deadline_s)
        opened = self._open(deadline)
        step = opened.representation.chunk_tokens
        ids = as_token_ids("tokens", tokens)
        whole = ids[: len(ids) // step * step]
        if not whole:
            raise ArtifactError(f"{len(ids)} tokens are less than one chunk of {step}")
        source = self._source(opened, whole, adapter, salt, deadline)
        digests = token_digests(opened.token_key, whole, step)
        bind = Bind(
            handle=opened.handle,
            adapter=source.adapter,
            salt=source.salt,
            scope="prefix",
            scope_key=None,
            manifest=None,
            tokens=b"".join(digests),
        )
        lease = self._call(bind, Bound, deadline).lease
        keys, values = self._read(opened, lease, len(digests), deadline)
        return Prefix(
            source=source,
            keys=keys,
            values=values,
            dtype=opened.representation.k_format.dtype,
            rope=opened.model.rope,
            chunk_tokens=step,
        )

    def publish(
        self,
        artifact: Artifact | Legacy,
        *,
        ttl_s: int = TTL_S,
        adapter: bytes | str | None = None,
        salt: str | None = None,
    ) -> VariantCapability:
        """Store an artifact and get its capability, good for ``ttl_s`` or the gateway's own limit.

        A bare tuple ``(keys, values, token_ids)`` is a legacy result: nobody but the holder of the capability can use it; only then
        ``adapter`` and ``salt`` are taken. What is stored already under the very same manifest and ids is left as it is; where that is
        another result, ``ArtifactError`` is raised.
        """
        deadline = Deadline(self._deadline_s)
        opened = self._open(deadline)
        if isinstance(artifact, tuple):
            keys, values, given = artifact
            token_ids = as_token_ids("token_ids", given)
            source = self._source(opened, token_ids, adapter, salt, deadline)
            artifact = Artifact(keys, values, token_ids, source.legacy_manifest(), source)
        elif adapter is not None or salt is not None:
            raise ArtifactError("adapter and salt of an artifact are those of its source")
        token_ids = as_token_ids("token_ids", artifact.token_ids)
        floats = self._checked(opened, artifact, len(token_ids))
        variant = self._open_variant(opened, artifact.manifest, artifact.source, token_ids, deadline)
        mover = self._mover(opened)
        try:
            mover.write(variant.lease, *floats, deadline)
            return self._seal(variant, token_ids, ttl_s, deadline)
        finally:
            mover.release(variant.lease, self._deadline_s)

    def find(
        self, manifest: TransformManifest, source: Source, token_ids: Sequence[int], *, ttl_s: int = TTL_S
    ) -> VariantCapability:
        """The capability of an artifact that somebody has published under exactly this manifest, source and logical ids.

        Raises ``GatewayRefused`` (field ``tokens``) where there is none, and ``ArtifactError`` for scope ``request``: such an artifact
        can't be found.
        """
        if manifest.scope == "request":
            raise ArtifactError("an artifact of scope request can't be found: keep the capability that publish gave")
        return self._find(manifest, source, as_token_ids("token_ids", token_ids), ttl_s)

    def _find(self, manifest: TransformManifest, source: Source, ids: tuple[int, ...], ttl_s: int) -> VariantCapability:
        """``find`` without its own refusal: what the gateway says."""
        deadline = Deadline(self._deadline_s)
        opened = self._open(deadline)
        variant = self._open_variant(opened, manifest, source, ids, deadline)
        try:
            return self._seal(variant, ids, ttl_s, deadline)
        finally:
            self._mover(opened).release(variant.lease, self._deadline_s)

    def restore(
        self,
        capability: VariantCapability,
        token_ids: Sequence[int] | None = None,
        *,
        adapter: bytes | str | None = None,
        salt: str | None = None,
    ) -> tuple[Any, Any]:
        """Keys and values of a published artifact as float32 ``[layers, KV heads, tokens, dim]``; ``token_ids``: its logical ids.

        What vLLM does with the capability, without vLLM. Raises ``NotStored`` where the artifact is no longer there.
        """
        deadline = Deadline(self._deadline_s)
        opened = self._open(deadline)
        ids = capability.token_ids if token_ids is None else as_token_ids("token_ids", token_ids)
        key = opened.shared_token_key if capability.scope == "global" else opened.token_key
        bind = BindVariant(
            handle=opened.handle,
            adapter=_adapter(opened, adapter),
            salt=salt_digest(opened.salt_key, salt),
            capability=capability.data,
            tokens=b"".join(token_digests(key or opened.token_key, ids, opened.representation.chunk_tokens)),
        )
        bound = self._call(bind, VariantBound, deadline)
        return self._read(opened, bound.lease, len(bound.addresses) // 32, deadline)

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._client.close()
        self._pools.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _call(self, message: Record, reply: type[R], deadline: Deadline) -> R:
        return cast(R, self._client.call(message, deadline.left_s))

    def _open(self, deadline: Deadline) -> ModelOpened:
        if not self._client.wait_connected(min(self._connect_s, deadline.left_s)):
            raise GatewayUnavailable(
                f"not connected to {self._endpoint}: {self._client.trouble or 'no gateway answers'}. Start one with `kvgate serve`, "
                "or name the endpoint that it printed: $KVGATE_ENDPOINT, or Gateway(endpoint)"
            )
        opened = self._call(OpenModel(handle=None, model=self._model), ModelOpened, deadline)
        require_supported(opened.representation)
        return opened

    def _source(
        self, opened: ModelOpened, tokens: Sequence[int], adapter: bytes | str | None, salt: str | None, deadline: Deadline
    ) -> Source:
        ids = as_token_ids("tokens", tokens)
        if not ids:
            raise ArtifactError("a source has at least one token")
        found = _adapter(opened, adapter)
        salted = salt_digest(opened.salt_key, salt)
        described = self._describe(opened, ids, found, salted, "prefix", opened.token_key, deadline)
        shared = None
        if opened.shared_token_key is not None:
            shared = self._describe(opened, ids, found, salted, "global", opened.shared_token_key, deadline).source_prefix
        return Source(
            token_ids=ids,
            adapter=found,
            salt=salted,
            model=described.model,
            payload_format=described.payload_format,
            prefix=described.source_prefix,
            shared_prefix=shared,
            token_key=opened.token_key,
            shared_token_key=opened.shared_token_key,
        )

    def _describe(
        self,
        opened: ModelOpened,
        ids: tuple[int, ...],
        adapter: bytes | None,
        salt: bytes | None,
        scope: str,
        key: bytes,
        deadline: Deadline,
    ) -> SourceDescribed:
        chunks, tail = _digests(key, ids, opened.representation.chunk_tokens)
        message = DescribeSource(
            handle=opened.handle,
            adapter=adapter,
            salt=salt,
            scope=scope,
            tokens=chunks,
            source_tokens=len(ids),
            tail=tail,
        )
        return self._call(message, SourceDescribed, deadline)

    def _open_variant(
        self,
        opened: ModelOpened,
        manifest: TransformManifest,
        source: Source,
        token_ids: tuple[int, ...],
        deadline: Deadline,
    ) -> VariantOpened:
        step = opened.representation.chunk_tokens
        if not token_ids or len(token_ids) % step:
            raise ArtifactError(f"an artifact has a multiple of {step} tokens (a chunk), this one has {len(token_ids)}")
        key = source.key_of(manifest.scope)
        chunks, tail = _digests(key, source.token_ids, step)
        message = OpenVariant(
            handle=opened.handle,
            adapter=source.adapter,
            salt=source.salt,
            manifest=manifest,
            source=chunks,
            tail=tail,
            tokens=b"".join(token_digests(key, token_ids, step)),
        )
        return self._call(message, VariantOpened, deadline)

    def _seal(self, variant: VariantOpened, token_ids: tuple[int, ...], ttl_s: int, deadline: Deadline) -> VariantCapability:
        message = SealVariant(lease=variant.lease, ttl_s=ttl_s, deadline_ms=deadline.left_ms)
        sealed = self._call(message, VariantSealed, deadline)
        return VariantCapability(sealed.capability, token_ids)

    def _read(self, opened: ModelOpened, lease: bytes, chunks: int, deadline: Deadline) -> tuple[Any, Any]:
        mover = self._mover(opened)
        try:
            held = mover.acquire(lease, chunks, deadline)
            if held < chunks:
                step = opened.representation.chunk_tokens
                raise NotStored(held * step, chunks * step)
            return mover.read(lease, chunks, deadline)
        finally:
            mover.release(lease, self._deadline_s)

    def _mover(self, opened: ModelOpened) -> Mover:
        return Mover(self._client, self._pools, opened.representation, opened.plan)

    def _checked(self, opened: ModelOpened, artifact: Artifact, tokens: int) -> tuple[Any, Any]:
        keys, values = as_floats("keys", artifact.keys), as_floats("values", artifact.values)
        group = opened.representation.groups[0]
        for name, array, dim in (("keys", keys, group.head_dim_k), ("values", values, group.head_dim_v)):
            wanted = (group.layers, group.kv_heads, tokens, dim)
            if array.shape != wanted:
                raise ArtifactError(f"{name} have shape {array.shape}, this model and these token ids need {wanted}")
            require_finite(name, array, opened.representation.k_format.dtype)
        return keys, values


def _digests(key: bytes, ids: Sequence[int], step: int) -> tuple[bytes, bytes | None]:
    """The ``t[n]`` of the full chunks, and the token digest of what is left, None where nothing is."""
    whole = len(ids) // step * step
    tail = token_digest(key, ids[whole:]) if whole < len(ids) else None
    return b"".join(token_digests(key, ids, step)), tail


def _adapter(opened: ModelOpened, adapter: bytes | str | None) -> bytes | None:
    """The adapter's whole digest; raises ``ArtifactError`` where it names none, or several."""
    if adapter is None or isinstance(adapter, bytes):
        return adapter
    known = [opened.adapters[at : at + 32] for at in range(0, len(opened.adapters), 32)]
    found = [one for one in known if one.hex().startswith(adapter)]
    if len(found) != 1:
        raise ArtifactError(f"{len(found)} adapters of this engine have a digest that begins so")
    return found[0]
