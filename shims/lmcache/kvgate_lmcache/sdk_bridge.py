"""LMCache's own SDK on kvgate: the same ``modify_kv`` functions, whose results get a manifest and are served to nobody else.

LMCache stores what such a function gives under the retained token ids, like any prompt's KV: whoever sends those ids is served the
compacted cache. Here the same function runs on what the gateway has of the prompt, its result is published as a variant, and the
request that goes on with it presents the variant's capability. ``docs/lmcache-sdk.md`` says what changes in a program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from blake3 import blake3
from lmcache.sdk.cache_kind import LMCacheSDKCacheKind
from lmcache.sdk.request import LMCacheRequestStream, PostCompletion, StreamPerfMetrics

from kvgate.client.artifacts import Artifact, Prefix, VariantCapability
from kvgate.client.errors import ArtifactError, NotStored
from kvgate.client.sdk import TTL_S, Gateway
from kvgate.contract.manifest import LEGACY, TransformManifest

ModifyFn = Callable[[Mapping[LMCacheSDKCacheKind, torch.Tensor], Sequence[int]], tuple[torch.Tensor, Sequence[int]]]
"""LMCache's ``ModifyFnType``: tensors ``[2, layer, token, KV heads * dim]`` by kind, and the tokens; gives a new tensor and tokens."""

FETCH_S: Final = 30.0
POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What the author of a function says of it. Without it the result is a legacy one, whose scope can only be ``request``.

    ``algorithm`` and ``version``: change the version with every change that may give other bytes. ``parameters``: every setting, as
    text. ``query``: the tokens it looked at to choose, None for none. ``scope``: as wide as the gateway's policy lets it be.
    """

    algorithm: str
    version: str
    parameters: Mapping[str, str]
    query: Sequence[int] | None = None
    scope: str = "request"


class OnlyKv(dict[LMCacheSDKCacheKind, torch.Tensor]):
    """The tensors by kind, as LMCache hands them over."""

    def __missing__(self, kind: LMCacheSDKCacheKind) -> torch.Tensor:
        raise ArtifactError(
            f"{kind} is not to be had through the gateway: only the queries of a prompt's last tokens are captured;"
            " write a transform that takes a window (docs/variants.md)"
        )


def modified(prefix: Prefix, function: ModifyFn, described: Described | None = None) -> tuple[Artifact, tuple[int, ...]]:
    """Run ``function`` on a fetched prefix: the artifact to publish, and the new tokens behind its last whole chunk.

    Those are dropped from the KV, as LMCache drops them, and are computed anew in front of what follows. Raises ``ArtifactError`` for a
    result of the wrong shape and for less than one chunk.
    """
    heads, dim = prefix.keys.shape[1], prefix.keys.shape[3]
    given = joined(prefix)
    result: Any = function(OnlyKv({LMCacheSDKCacheKind.KV: given.clone()}), list(prefix.token_ids))
    if not isinstance(result, tuple) or len(result) != 2:
        raise ArtifactError(f"the function gave {type(result).__name__}: (KV, tokens) is expected")
    made, ids = result[0], tuple(int(token) for token in result[1])
    shape = (2, given.shape[1], len(ids), given.shape[3])
    if not isinstance(made, torch.Tensor) or tuple(made.shape) != shape:
        found = tuple(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
        raise ArtifactError(f"the function gave {found} for {len(ids)} tokens; {shape} is expected")
    whole = len(ids) // prefix.chunk_tokens * prefix.chunk_tokens
    if whole == 0:
        raise ArtifactError(f"the function kept {len(ids)} tokens: less than one chunk of {prefix.chunk_tokens}")
    kept = made[:, :, :whole]
    keys, values = kept.reshape(*kept.shape[:3], heads, dim).transpose(2, 3)
    manifest = _manifest(prefix, given, kept, described)
    return Artifact(keys, values, ids[:whole], manifest, prefix.source), ids[whole:]


def for_screening(function: ModifyFn, described: Described | None = None) -> Callable[[Prefix], Artifact]:
    """``function`` as ``kvgate screen module:name`` takes it: ``name = for_screening(function)``."""
    return lambda prefix: modified(prefix, function, described)[0]


def joined(prefix: Prefix) -> torch.Tensor:
    """The prefix as LMCache's SDK gives it: ``[2, layer, token, KV heads * dim]`` in the cache's own type."""
    kv: torch.Tensor = prefix.torch()
    return kv.permute(1, 0, 3, 2, 4).flatten(3).contiguous()


def kept_positions(given: torch.Tensor, kept: torch.Tensor) -> list[int] | None:
    """Which tokens of ``given`` those of ``kept`` are, told by their values; None where they are not kept tokens, or not in order."""
    known: dict[bytes, list[int]] = {}
    for position, row in enumerate(_row_digests(given[1])):
        known.setdefault(row, []).append(position)
    found: list[int] = []
    for row in _row_digests(kept[1]):
        after = found[-1] if found else -1
        places = [one for one in known.get(row, ()) if one > after]
        if not places:
            return None
        found.append(places[0])
    return found


def _manifest(prefix: Prefix, given: torch.Tensor, kept: torch.Tensor, described: Described | None) -> TransformManifest:
    positions = kept_positions(given, kept) if kept.dtype == given.dtype else None
    moved = None
    if positions is not None and torch.equal(_bits(kept[0]), _bits(given[0][:, positions])):
        moved = positions  # keys as they were: still turned to their old positions
    said = described or Described(algorithm=LEGACY, version="0", parameters={})
    return prefix.source.manifest(
        algorithm=said.algorithm,
        version=said.version,
        parameters=said.parameters,
        retained=positions,
        new_positions=moved,
        query=said.query,
        scope=said.scope,
    )


def _row_digests(values: torch.Tensor) -> list[bytes]:
    """Of each token's values ``[layer, token, …]`` over all layers."""
    return [blake3(_bits(row).numpy().tobytes()).digest() for row in values.transpose(0, 1)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def create_request(
    gateway: Gateway,
    post_completion: PostCompletion,
    prompt_token_ids: Sequence[int],
    cache_salt: str = "",
    *,
    adapter: bytes | str | None = None,
    ttl_s: int = TTL_S,
) -> GatewayRequestStream:
    """``lmcache.sdk.request.create_request`` with a gateway in place of LMCache's contexts."""
    return GatewayRequestStream(gateway, post_completion, prompt_token_ids, cache_salt, adapter=adapter, ttl_s=ttl_s)


class GatewayRequestStream(LMCacheRequestStream):  # type: ignore[misc,unused-ignore]
    """LMCache's request stream, whose KV lies behind a gateway.

    After ``modify_kv`` each ``generate`` adds ``kv_transfer_params`` to the sampling parameters that ``post_completion`` gets: they go
    on to vLLM as they are. A request whose variant is gone fails; ``resend_full`` goes back to the full prompt then.
    """

    def __init__(
        self,
        gateway: Gateway,
        post_completion: PostCompletion,
        prompt_token_ids: Sequence[int],
        cache_salt: str = "",
        *,
        adapter: bytes | str | None = None,
        ttl_s: int = TTL_S,
    ) -> None:
        super().__init__((), post_completion, prompt_token_ids, cache_salt)
        self.tokens: list[int]
        self._suffix_tokens: list[int]
        self._gateway = gateway
        self._adapter = adapter
        self._ttl_s = ttl_s
        self._replaced: tuple[int, ...] = ()  # the prefix that the variant stands for
        self.capability: VariantCapability | None = None

    @property
    def manifest(self) -> bytes | None:
        """Digest of the variant's manifest; None before ``modify_kv``."""
        return self.capability.variant if self.capability is not None else None

    def modify_kv(
        self, fn: ModifyFn, timeout: float = FETCH_S, poll_interval: float = POLL_S, *, described: Described | None = None
    ) -> None:
        """Edit the cached KV by ``fn``, as LMCache's method does, and publish the result as a variant of scope ``request``.

        ``described``: what ``fn`` is, for a manifest that says more and for wider scopes. Raises ``NotStored`` where no KV of the
        prompt comes within ``timeout`` seconds, ``ArtifactError``, and what ``kvgate.client.sdk.Gateway`` raises.
        """
        if self.capability is not None:
            raise ArtifactError("this stream's KV is a variant already: resend_full() first, then modify the whole")
        prefix = self._fetch(timeout, poll_interval)
        artifact, rest = modified(prefix, fn, described)
        self.capability = self._gateway.publish(artifact, ttl_s=self._ttl_s)
        self._replaced = prefix.token_ids
        self._suffix_tokens = [*rest, *self.tokens[len(prefix.token_ids) :], *self._suffix_tokens]
        self.tokens = list(artifact.token_ids)
        self.done = False

    def generate(self, sampling_params: dict[str, Any], suffix_tokens: Sequence[int] = ()) -> StreamPerfMetrics:
        """One inference pass, as LMCache's method does; from the variant, once there is one."""
        if self.capability is not None:
            sampling_params = sampling_params | {"kv_transfer_params": dict(self.capability.kv_transfer_params)}
        return super().generate(sampling_params, suffix_tokens)

    def resend_full(self) -> None:
        """Put the full prompt back in front of everything that came since, and forget the variant."""
        if self.capability is not None:
            self.tokens = [*self._replaced, *self.tokens[len(self.capability.token_ids) :]]
            self.capability, self._replaced = None, ()

    def retrieve(self, kind: LMCacheSDKCacheKind, timeout: float = FETCH_S, poll_interval: float = POLL_S) -> torch.Tensor:
        """The prompt's KV in whole chunks, ``[2, layer, token, KV heads * dim]``."""
        if kind is not LMCacheSDKCacheKind.KV:
            return OnlyKv()[kind]
        return joined(self._fetch(timeout, poll_interval))

    def update(self, kind: LMCacheSDKCacheKind, kv: torch.Tensor, tokens: Sequence[int]) -> None:
        """Refused: KV without what it was made from can only be stored under its tokens, which is what kvgate does not do."""
        raise ArtifactError("update() stores KV under its token ids alone: use modify_kv, which knows the source")

    def _fetch(self, timeout_s: float, poll_s: float) -> Prefix:
        """What is stored of the tokens: vLLM saves after it has answered, so all of it is waited for, and less is taken at the end."""
        until = time.monotonic() + timeout_s
        wanted = self.tokens
        while True:
            try:
                return self._gateway.fetch(wanted, adapter=self._adapter, salt=self.cache_salt or None)
            except NotStored as error:
                if time.monotonic() < until:
                    time.sleep(max(0.0, min(poll_s, until - time.monotonic())))
                elif 0 < error.tokens < len(wanted):
                    wanted = wanted[: error.tokens]
                else:
                    raise
