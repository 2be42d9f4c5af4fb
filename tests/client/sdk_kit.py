"""What the tests of the SDK keep of a prefix."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvgate.client.artifacts import Artifact, Prefix

TOKENS = tuple(range(500, 522))
"""Five whole chunks of four, and two tokens more."""
WHOLE = TOKENS[:20]
KEPT = [0, 1, 2, 3, 16, 17, 18, 19]


def keep(prefix: Prefix, kept: list[int] = KEPT, **changes: Any) -> Artifact:
    """Some of the prefix's tokens, under a manifest of scope request, with changes of it."""
    values: dict[str, Any] = {"algorithm": "keep", "version": "1", "parameters": {"n": "8"}, "retained": kept}
    return Artifact(
        prefix.keys[:, :, kept],
        prefix.values[:, :, kept],
        tuple(prefix.token_ids[at] for at in kept),
        prefix.source.manifest(**(values | changes)),
        prefix.source,
    )


def same(found: tuple[Any, Any], wanted: Artifact) -> bool:
    """Keys and values are the artifact's."""
    return np.array_equal(found[0], wanted.keys) and np.array_equal(found[1], wanted.values)
