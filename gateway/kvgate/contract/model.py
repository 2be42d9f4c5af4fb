"""The model contract: everything that decides which KV bytes a prompt gives, apart from the tokens."""

from __future__ import annotations

from typing import ClassVar

from kvgate.contract import specs
from kvgate.contract.artifacts import ArtifactSet
from kvgate.contract.digests import Kind, digest
from kvgate.contract.encoding import encode
from kvgate.contract.errors import ContractError
from kvgate.contract.record import IdentityRecord, Record, frozen

NUMBER = r"-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
"""Text of a number; ``Rope`` wants it exactly as Python's ``repr`` writes it: floats never enter the encoding."""

SPLIT_PREFIX = "split."
"""Names of numerics that only an engine of several workers has begin so."""

WORD = r"[A-Za-z0-9][A-Za-z0-9._+-]*"


@frozen
class Parameter(Record):
    """One named setting as exact text."""

    name: str = specs.text(pattern=r"[a-z0-9_.]+")
    value: str = specs.text(max_chars=65_536)


@frozen
class Rope(IdentityRecord):
    """Rotary position embedding as the engine applies it, overrides included. ``kind`` "none" for models without it.

    ``theta`` is exact text ("10000.0"). ``style``: "neox" rotates halves, "interleaved" rotates pairs. ``parameters`` holds
    the scaling settings, sorted by name, each once.
    """

    KIND: ClassVar[Kind] = Kind.ROPE

    kind: str = specs.text(pattern=WORD)
    theta: str = specs.text(pattern=NUMBER)
    rotary_dim: int = specs.uint(maximum=65_536)
    style: str = specs.choice("neox", "interleaved", "none")
    max_positions: int = specs.uint()
    parameters: tuple[Parameter, ...] = specs.array(specs.record(Parameter), maximum=64)

    def validate(self) -> None:
        require_sorted(self.parameters, "parameters")
        number = int(self.theta) if self.theta.lstrip("-").isdigit() else float(self.theta)
        if repr(number) != self.theta:
            raise ContractError("theta", "is not the number's own text", "write it as Python's repr does: 10000.0, 500000")


@frozen
class Engine(IdentityRecord):
    """The build that ran the model: another build of the engine or of torch may give other low bits, or a broken cache."""

    KIND: ClassVar[Kind] = Kind.ENGINE

    name: str = specs.text(pattern=WORD)
    version: str = specs.text()
    build: str = specs.text()
    torch: str = specs.text()


@frozen
class Numerics(IdentityRecord):
    """Settings that change low bits of KV for the same weights and tokens; strict by default."""

    KIND: ClassVar[Kind] = Kind.NUMERICS

    attention_backend: str = specs.text()
    isa: str = specs.text(pattern=WORD)
    compute_dtype: str = specs.text(pattern=WORD)
    execution: str = specs.text(pattern=r"[A-Za-z0-9_.,=+-]+")
    lora_max_rank: int | None = specs.optional(specs.uint(minimum=1, maximum=65_536))
    tensor_parallel: int = specs.uint(minimum=1, maximum=65_536)
    pipeline_parallel: int = specs.uint(minimum=1, maximum=65_536)
    other: tuple[Parameter, ...] = specs.array(specs.record(Parameter), maximum=64)
    engine: Engine = specs.record(Engine)

    def validate(self) -> None:
        require_sorted(self.other, "other")

    def without_engine(self, *, split: bool = True) -> bytes:
        """Digest of the numerics alone, so that a miss can name numerics and engine build apart.

        ``split`` False: without the worker split too, for an engine whose partition plan says the same. Settings that exist only where
        there is a split, named "split.…", go with it.
        """
        value = self.to_value()
        if not split:
            value["other"] = [one for one in value["other"] if not one["name"].startswith(SPLIT_PREFIX)]
        for name in ("engine",) if split else ("engine", "tensor_parallel", "pipeline_parallel"):
            del value[name]
        return digest(self.KIND, encode(value))


@frozen
class NumericsClass(IdentityRecord):
    """An operator's declaration that engines differing only in numerics and build may share; it stands in their place."""

    KIND: ClassVar[Kind] = Kind.NUMERICS_CLASS

    name: str = specs.text(pattern=r"[a-z0-9][a-z0-9._-]{0,63}")


@frozen
class KvQuantization(IdentityRecord):
    """How the engine itself stores KV: ``cache_dtype`` as it lies in its pages, and the digest of its scales (None: no scales)."""

    KIND: ClassVar[Kind] = Kind.KV_QUANTIZATION

    cache_dtype: str = specs.text(pattern=WORD)
    scales: bytes | None = specs.optional(specs.digest32())


@frozen
class Architecture(IdentityRecord):
    """The effective model configuration, names and paths and RoPE left out: ``settings`` is sorted by name, each once."""

    KIND: ClassVar[Kind] = Kind.ARCHITECTURE

    settings: tuple[Parameter, ...] = specs.array(specs.record(Parameter), minimum=1, maximum=1024)

    def validate(self) -> None:
        require_sorted(self.settings, "settings")


@frozen
class ModelContract(IdentityRecord):
    """What the loader loaded and how the engine computes with it. ``adapter`` and ``multimodal`` None mean an explicit "none"."""

    KIND: ClassVar[Kind] = Kind.MODEL

    base: ArtifactSet = specs.record(ArtifactSet)
    architecture: Architecture = specs.record(Architecture)
    adapter: ArtifactSet | None = specs.optional(specs.record(ArtifactSet))
    rope: Rope = specs.record(Rope)
    weight_quantization: str = specs.text()
    kv_quantization: KvQuantization = specs.record(KvQuantization)
    multimodal: bytes | None = specs.optional(specs.digest32())
    numerics: Numerics | NumericsClass = specs.either(Numerics, NumericsClass)

    def validate(self) -> None:
        if not self.base.roles()["weights"]:
            raise ContractError("base", "holds no weights", "hash the weight files that the loader opened")
        if any(role.startswith("adapter_") for role in self.base.roles()):
            raise ContractError("base", "holds an adapter file", "adapter files belong in 'adapter'")
        if self.adapter is None:
            return
        if not self.adapter.roles()["adapter_weights"]:
            raise ContractError("adapter", "holds no adapter weights", "hash the adapter files that the loader opened")
        if not all(role.startswith("adapter_") for role in self.adapter.roles()):
            raise ContractError("adapter", "holds a file that is no adapter file")
        if isinstance(self.numerics, Numerics) and self.numerics.lora_max_rank is None:
            raise ContractError("adapter", "given to an engine without LoRA", "enable LoRA in the engine")


def require_sorted(parameters: tuple[Parameter, ...], field: str) -> None:
    """Refuse parameters that are unsorted or named twice: one set of settings must have one encoding."""
    names = [parameter.name for parameter in parameters]
    if names != sorted(set(names)):
        raise ContractError(field, "is not sorted by name, each name once", "sort it and drop duplicates")
