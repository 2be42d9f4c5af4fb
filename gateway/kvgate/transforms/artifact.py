"""From a fetched prefix to an artifact that can be published: any transform, the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgate.transforms.base import PrefixKv, Transform, TransformError, Window, compact
from kvgate.transforms.rotary import Rotary

if TYPE_CHECKING:
    from kvgate.client.artifacts import Artifact, Prefix


def make_artifact(prefix: Prefix, transform: Transform, *, window: Window | None = None, scope: str | None = None) -> Artifact:
    """Run ``transform`` on ``prefix`` and write the manifest.

    ``scope``: how far the artifact may be shared; None: ``query`` where the transform looks at a query, else ``request``. Raises
    ``TransformError``, and ``ContractError`` for a scope that such a transform can't have.
    """
    from kvgate.client.artifacts import Artifact

    held = PrefixKv(prefix.torch(), prefix.token_ids, prefix.chunk_tokens)
    if transform.uses_query and window is None:
        raise TransformError(f"{transform.algorithm} needs the queries of a recent window")
    query = window.query_ids(prefix.token_ids) if transform.uses_query and window is not None else None
    made = compact(transform, held, Rotary.of_rope(prefix.rope), window)
    manifest = prefix.source.manifest(
        algorithm=transform.algorithm,
        version=transform.algorithm_version,
        parameters=transform.parameters(),
        retained=made.positions,
        query=query,
        scope=scope or ("request" if query is None else "query"),
    )
    return Artifact(made.kv[:, 0], made.kv[:, 1], made.token_ids, manifest, prefix.source)
