"""Functions written for the SDK, screened without a gateway: a capture as the prefix that ``Gateway.fetch`` would give, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blake3 import blake3

from kvgate.client.artifacts import Artifact, Prefix, Source, as_floats
from kvgate.client.errors import ArtifactError
from kvgate.contract.manifest import LEGACY
from kvgate.contract.model import Rope
from kvgate.screen.results import Named, Result, ScreenError
from kvgate.transforms.base import PrefixKv

if TYPE_CHECKING:
    import torch

    from kvgate.transforms.rotary import Rotary


def prefix_of(source: PrefixKv, rotary: Rotary) -> Prefix:
    """The capture as a fetched prefix; its digests and keys are made up, and are the same for the same tokens."""

    def made_up(what: str) -> bytes:
        return blake3(f"{what} {source.token_ids}".encode()).digest()

    described = Source(
        token_ids=source.token_ids,
        adapter=None,
        salt=None,
        model=made_up("model"),
        payload_format=made_up("format"),
        prefix=made_up("prefix"),
        shared_prefix=None,
        token_key=made_up("key"),
        shared_token_key=None,
    )
    keys, values = as_floats("keys", source.kv[:, 0]), as_floats("values", source.kv[:, 1])
    dtype = str(source.kv.dtype).removeprefix("torch.")
    return Prefix(described, keys, values, dtype, _rope(rotary), source.chunk_tokens)


def of_artifact(name: str, made: Any, source: PrefixKv) -> Result:
    """What the function gave: an artifact, or a bare tuple, which has no manifest; rounded to the cache's type, as publishing does.

    Raises ``ScreenError`` for anything else.
    """
    if isinstance(made, Artifact):
        manifest = made.manifest
        said = Named(
            manifest.algorithm,
            manifest.algorithm_version,
            tuple((one.name, one.value) for one in manifest.parameters),
            manifest.query,
        )
        known = None if manifest.algorithm == LEGACY else said
        return Result(
            kv=_joined(name, made.keys, made.values, source), token_ids=tuple(made.token_ids), positions=None, named=known
        )
    if isinstance(made, tuple) and len(made) == 3:
        return Result(kv=_joined(name, made[0], made[1], source), token_ids=tuple(made[2]), positions=None)
    raise ScreenError(f"{name}: gave {type(made).__name__}; an Artifact or (keys, values, token ids) is expected")


def _joined(name: str, keys: Any, values: Any, source: PrefixKv) -> torch.Tensor:
    import torch

    try:
        both = [torch.from_numpy(as_floats(what, one)) for what, one in (("keys", keys), ("values", values))]
    except ArtifactError as error:  # as publishing it would say
        raise ScreenError(f"{name}: {error}") from error
    return torch.stack(both, dim=1).to(source.kv.dtype)


def _rope(rotary: Rotary) -> Rope:
    """The contract's record of a plain rotary embedding with these frequencies."""
    from kvgate.transforms.rotary import Rotary as Made

    dim = 2 * len(rotary.frequencies)
    exact = float(rotary.frequencies[1]) ** (-dim / 2) if dim > 2 else 10000.0
    for theta in (round(exact, 6), exact):
        rope = Rope(
            kind="default",
            theta=repr(theta),
            rotary_dim=dim,
            style="interleaved" if rotary.interleaved else "neox",
            max_positions=1 << 20,
            parameters=(),
        )
        if bool((Made.of_rope(rope).frequencies - rotary.frequencies).abs().max() <= 1e-12):
            return rope
    raise ScreenError(
        "functions of the SDK's kind can be screened on plain rotary embedding only: write a transform with choose()"
    )
