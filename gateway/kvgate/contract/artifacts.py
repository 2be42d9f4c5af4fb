"""Artifact sets: the files a loader really opened, each with role, size and BLAKE3 digest. Names and paths are not identity."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from kvgate.contract import specs
from kvgate.contract.digests import Kind
from kvgate.contract.errors import ContractError
from kvgate.contract.record import IdentityRecord, Record, frozen

ROLES = ("weights", "quantization", "kv_scales", "remote_code", "adapter_weights", "adapter_config")
"""What a file was opened as. One file opened in two roles is listed twice."""


@frozen
class Artifact(Record):
    """One file, by content. ``digest`` is plain BLAKE3-256 of its bytes."""

    role: str = specs.choice(*ROLES)
    size_bytes: int = specs.uint()
    digest: bytes = specs.digest32()


@frozen
class ArtifactSet(IdentityRecord):
    """A multiset of artifacts; the order in which a loader opened them is not identity, how often and as what is."""

    KIND: ClassVar[Kind] = Kind.ARTIFACT_SET

    artifacts: tuple[Artifact, ...] = specs.array(specs.record(Artifact), minimum=1, maximum=4096)

    def validate(self) -> None:
        sizes: dict[bytes, int] = {}
        for index, item in enumerate(self.artifacts):
            if sizes.setdefault(item.digest, item.size_bytes) != item.size_bytes:
                raise ContractError(f"artifacts[{index}].size_bytes", "one digest with two sizes", "hash the file again")
        ordered = sorted(self.artifacts, key=lambda a: (a.role, a.digest, a.size_bytes))
        object.__setattr__(self, "artifacts", tuple(ordered))

    def roles(self) -> Counter[str]:
        """How many artifacts there are of each role."""
        return Counter(item.role for item in self.artifacts)
