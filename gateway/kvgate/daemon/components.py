"""From full records to the digests that the daemon keeps: what a registration, an adapter or a request is made of."""

from __future__ import annotations

from dataclasses import dataclass

from kvgate.contract.digests import Kind, digest
from kvgate.contract.encoding import encode
from kvgate.contract.model import ModelContract, Numerics
from kvgate.contract.plan import PartitionPlan
from kvgate.contract.representation import Representation
from kvgate.contract.request import RequestDescriptor
from kvgate.storage.envelope import ENVELOPE_BYTES, Components


@dataclass(frozen=True, slots=True)
class ModelDigests:
    """Digests of one model contract and of its parts, by the names a miss uses."""

    model: bytes
    base: bytes
    adapter: bytes | None
    rope: bytes
    numerics: bytes
    engine: bytes


def digest_model(model: ModelContract, plan: PartitionPlan | None = None) -> ModelDigests:
    """Digest a contract once; ``base`` covers weights, architecture, quantisation and multimodal preprocessing.

    ``numerics`` leaves the worker split out where ``plan`` says the same: a miss across widths is the plan's, named once.
    """
    if isinstance(model.numerics, Numerics):
        numerics = model.numerics.without_engine(split=plan is None or not _same_split(model.numerics, plan))
        engine = model.numerics.engine.digest()
    else:
        numerics = engine = model.numerics.digest()
    value = model.to_value()
    parts = {name: value[name] for name in ("base", "architecture", "weight_quantization", "kv_quantization", "multimodal")}
    return ModelDigests(
        model=model.digest(),
        base=digest(Kind.BASE, encode(parts)),
        adapter=model.adapter.digest() if model.adapter else None,
        rope=model.rope.digest(),
        numerics=numerics,
        engine=engine,
    )


def _same_split(numerics: Numerics, plan: PartitionPlan) -> bool:
    return (numerics.tensor_parallel, numerics.pipeline_parallel) == (plan.tensor_parallel, plan.pipeline_parallel)


def identify(model: ModelDigests, form: StoredForm, access: bytes, variant: bytes) -> tuple[bytes, Components]:
    """Root and components of a request: the one place where both are put together from the same digests."""
    root = RequestDescriptor(
        model=model.model,
        representation=form.representation_digest,
        plan=form.plan_digest,
        access=access,
        variant=variant,
    ).root()
    components = Components(
        base=model.base,
        adapter=model.adapter,
        rope=model.rope,
        numerics=model.numerics,
        engine=model.engine,
        payload_layout=form.layout,
        codec=form.codec,
        plan=form.plan_digest,
        access=access,
        variant=variant,
    )
    return root, components


@dataclass(frozen=True, slots=True)
class StoredForm:
    """A representation and a plan with their digests; ``object_bytes`` of each rectangle's stored object, envelope included."""

    representation: Representation
    plan: PartitionPlan
    representation_digest: bytes
    layout: bytes
    codec: bytes
    plan_digest: bytes
    object_bytes: tuple[int, ...]

    @classmethod
    def of(cls, representation: Representation, plan: PartitionPlan) -> StoredForm:
        """Digest both."""
        return cls(
            representation,
            plan,
            representation.digest(),
            representation.layout_digest(),
            representation.codec_digest(),
            plan.digest(),
            tuple(ENVELOPE_BYTES + representation.payload_bytes(rectangle) for rectangle in plan.rectangles),
        )
