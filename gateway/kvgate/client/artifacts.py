"""What a transform is given and what it hands back: sources, prefixes, artifacts, capabilities. Values; no gateway is asked here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvgate.client.errors import ArtifactError
from kvgate.contract import capability as contract_capability
from kvgate.contract.manifest import LEGACY, TransformManifest, position_map, query_digest, retained
from kvgate.contract.model import Parameter, Rope
from kvgate.integers import integers, type_name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

Positions = Any
"""Positions as a list, numpy array or torch tensor: ``[tokens]`` for the whole model, ``[layers, tokens]``, or
``[layers, heads, tokens]`` (with one head: per layer; with one layer and one head: for the whole model)."""

CAPABILITY_FIELD = "kvgate_variant"
"""Name of the capability in ``kv_transfer_params``."""

_TOKEN_IDS: Final = 1 << 32


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The tokens that a transform started from, under one adapter and salt, and what of that goes into a manifest.

    ``adapter`` and ``salt`` are digests. ``model`` and ``payload_format`` are those of the engine at the time: an artifact made under
    them can't be published once they are others.
    """

    token_ids: tuple[int, ...] = field(repr=False)
    adapter: bytes | None
    salt: bytes | None = field(repr=False)
    model: bytes
    payload_format: bytes
    prefix: bytes
    shared_prefix: bytes | None
    token_key: bytes = field(repr=False)
    shared_token_key: bytes | None = field(repr=False)

    def key_of(self, scope: str) -> bytes:
        """The key that tokens of an artifact of ``scope`` are hashed with. ``ArtifactError`` where no such scope is to be had."""
        if scope != "global":
            return self.token_key
        if self.shared_token_key is None:
            raise ArtifactError(
                "the operator of this gateway does not allow sharing across domains: scope global is not to be had"
            )
        return self.shared_token_key

    def manifest(
        self,
        *,
        algorithm: str,
        version: str,
        parameters: Mapping[str, str] | Sequence[tuple[str, str]] = (),
        retained: Positions | None = None,
        new_positions: Positions | None = None,
        query: Sequence[int] | None = None,
        scope: str = "request",
    ) -> TransformManifest:
        """The manifest of an artifact made from this source.

        ``parameters``: every setting that can change the result, as text. ``retained``: original positions that were kept, ascending in
        each list; None where the artifact is not made of kept tokens. ``new_positions``: where each of them is now; None: 0, 1, 2… .
        ``query``: the tokens the transform looked at to choose, None if it looked at none. ``scope``: request, query, prefix or global.
        Raises ``ArtifactError`` or ``kvgate.contract.errors.ContractError``.
        """
        settings = dict(parameters)
        if len(settings) != len(parameters):
            raise ArtifactError("a parameter is named twice")
        old = _rows("retained", retained) if retained is not None else [[[]]]
        if any(row and row[-1] >= len(self.token_ids) for layer in old for row in layer):
            raise ArtifactError(f"a kept position is beyond the source's {len(self.token_ids)} tokens")
        new = (
            [[list(range(len(row))) for row in layer] for layer in old]
            if new_positions is None
            else _rows("new_positions", new_positions)
        )
        if len(new) == len(new[0]) == 1:
            new = [[new[0][0] for _ in layer] for layer in old]
        token_key = self.key_of(scope)
        prefix = self.shared_prefix if scope == "global" else self.prefix
        assert prefix is not None, "there is one wherever there is a key"
        return TransformManifest(
            algorithm=algorithm,
            algorithm_version=version,
            parameters=tuple(Parameter(name=name, value=settings[name]) for name in sorted(settings)),
            source_prefix=prefix,
            source_tokens=len(self.token_ids),
            retained=_retained(old),
            position_map=position_map(old, new),
            query=None if query is None else query_digest(token_key, as_token_ids("query", query)),
            payload_format=self.payload_format,
            model=self.model,
            scope=scope,
        )

    def legacy_manifest(self) -> TransformManifest:
        """The manifest of a result that came without one: it says nothing, so nobody but the capability's holder may use it."""
        return self.manifest(algorithm=LEGACY, version="0")


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The KV of a prefix as the gateway has it: float32 ``[layers, KV heads, tokens, dim]``, copied out of the pool.

    ``dtype`` is the cache's own type; float32 holds it exactly. Keys are as cached: turned to positions 0, 1, 2… by ``rope``.
    """

    source: Source
    keys: Floats = field(repr=False)
    values: Floats = field(repr=False)
    dtype: str
    rope: Rope
    chunk_tokens: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """One id a token of the KV."""
        return self.source.token_ids

    def torch(self) -> Any:
        """The same as one torch tensor ``[layer, K or V, KV head, token, dim]`` of the cache's type; needs torch, and equal dims."""
        import torch

        both = torch.stack([torch.from_numpy(self.keys), torch.from_numpy(self.values)], dim=1)
        return both.to(getattr(torch, self.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """A transformed cache to publish.

    ``keys``, ``values``: ``[layers, KV heads, tokens, dim]``, numpy arrays or torch tensors of floats of at most 32 bits. They are
    rounded to the cache's own type, and must be finite in it. ``token_ids``: the logical ids, one a token, a whole number of chunks; a
    prompt that begins with them is decoded from this cache. ``manifest``: from ``source.manifest(…)``.
    """

    keys: Any = field(repr=False)
    values: Any = field(repr=False)
    token_ids: tuple[int, ...] = field(repr=False)
    manifest: TransformManifest
    source: Source

    @property
    def scope(self) -> str:
        """How far it may be shared."""
        return self.manifest.scope


@dataclass(frozen=True, slots=True, repr=False)
class VariantCapability:
    """The right to decode from one published artifact. Whoever holds it has that right: keep it as you keep a credential."""

    data: bytes
    token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hex(cls, text: str, token_ids: Sequence[int] = ()) -> VariantCapability:
        """Read back what ``hex`` gave; raises ``ContractError`` where it is none."""
        data = bytes.fromhex(text)
        contract_capability.Capability.read(data)
        return cls(data, tuple(token_ids))

    @property
    def hex(self) -> str:
        """The capability as text."""
        return self.data.hex()

    @property
    def kv_transfer_params(self) -> dict[str, str]:
        """What goes into a vLLM request; its prompt is ``token_ids`` and then the tokens to go on with."""
        return {CAPABILITY_FIELD: self.hex}

    @property
    def variant(self) -> bytes:
        """Digest of the artifact's manifest."""
        return contract_capability.Capability.read(self.data).manifest

    @property
    def scope(self) -> str:
        """The artifact's sharing scope."""
        return contract_capability.Capability.read(self.data).scope

    @property
    def expires_s(self) -> int:
        """When it ends, in Unix seconds."""
        return contract_capability.Capability.read(self.data).expires_s

    @property
    def expired(self) -> bool:
        """Whether that is past, by this machine's clock."""
        return time.time() >= self.expires_s

    def __repr__(self) -> str:
        return f"VariantCapability(scope={self.scope}, tokens={len(self.token_ids)})"


def as_floats(what: str, array: Any) -> Floats:
    """A numpy array or a torch tensor of floats of at most 32 bits as float32; raises ``ArtifactError`` for anything else."""
    import numpy as np

    refused = (
        f"{what} of {getattr(array, 'dtype', type_name(array))}: float16 and float32 are taken, and bfloat16 as a torch tensor"
    )
    if type(array).__module__.partition(".")[0] == "torch":
        if not array.dtype.is_floating_point or array.dtype.itemsize > 4:
            raise ArtifactError(refused)
        array = array.detach().cpu().float().numpy()
    array = np.asarray(array)
    if array.dtype.kind != "f" or array.dtype.itemsize > 4:
        raise ArtifactError(refused)
    return np.ascontiguousarray(array, dtype=np.float32)


def as_token_ids(what: str, tokens: Sequence[int]) -> tuple[int, ...]:
    """Token ids as plain integers; raises ``ArtifactError`` for anything that can't be one. The message holds none of them."""
    try:
        ids = tuple(integers(tokens))
    except TypeError as error:
        raise ArtifactError(f"{what}: give token ids, as the model's tokenizer makes them: {error}") from error
    if ids and not 0 <= min(ids) <= max(ids) < _TOKEN_IDS:
        raise ArtifactError(f"{what}: an id is negative or beyond {_TOKEN_IDS - 1}")
    return ids


def _rows(what: str, positions: Positions) -> list[list[list[int]]]:
    """Positions as ``[layers][heads][tokens]``."""
    depth, inner = 0, positions
    while hasattr(inner, "__len__") and not isinstance(inner, str | bytes) and getattr(inner, "ndim", 1) != 0:
        depth, inner = depth + 1, next(iter(inner), 0)
    try:
        match depth:
            case 1:
                return [[integers(positions)]]
            case 2:
                return [[integers(row)] for row in positions]
            case 3:
                return [[integers(row) for row in layer] for layer in positions]
    except TypeError as error:
        raise ArtifactError(f"{what}: {error}") from error
    raise ArtifactError(f"{what}: positions are [tokens], [layers, tokens] or [layers, heads, tokens]")


def _retained(rows: list[list[list[int]]]) -> Any:
    per = "head" if len(rows[0]) > 1 else "layer" if len(rows) > 1 else "model"
    return retained(rows, per)
