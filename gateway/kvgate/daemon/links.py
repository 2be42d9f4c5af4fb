"""The explain chain of a request: like its chunk chain, but anchored in the isolation domain alone, so that equal prompts of one domain
meet in it whatever else about them differs. A link names no stored object and opens nothing.
"""

from __future__ import annotations

import struct
from typing import Final

from kvgate.contract.digests import DIGEST_BYTES, Kind, digest

_LINK: Final = struct.Struct("<32sQ32s")


class Links:
    """``e[n] = H_explain(e[n-1] or domain id, n, t[n])`` of one request, computed only as far as somebody asks."""

    __slots__ = ("_domain", "_links", "_tokens")

    def __init__(self, domain: bytes, tokens: bytes) -> None:
        """``tokens``: the ``t[n]``, 32 bytes each."""
        self._domain = domain
        self._tokens = tokens
        self._links: list[bytes] = []

    def __len__(self) -> int:
        return len(self._tokens) // DIGEST_BYTES

    def copy(self) -> Links:
        """The same chain, for another thread."""
        made = Links(self._domain, self._tokens)
        made._links = list(self._links)
        return made

    def extend(self, tokens: bytes) -> None:
        """Append the ``t[n]`` of further chunks."""
        self._tokens += tokens

    def first(self, count: int) -> list[bytes]:
        """The links of the first ``count`` chunks."""
        links = self._links
        for index in range(len(links), count):
            parent = links[-1] if links else self._domain
            token = self._tokens[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            links.append(digest(Kind.EXPLAIN, _LINK.pack(parent, index, token)))
        return links[:count]
