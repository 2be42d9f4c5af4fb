"""Hypothesis strategies for every record of the contract, valid by construction, and for values of the encoding's type set."""

from __future__ import annotations

import itertools
import unicodedata
from typing import Any

from hypothesis import strategies as st

from kvgate.contract.access import Access, Variant
from kvgate.contract.address import Extra
from kvgate.contract.artifacts import ROLES, Artifact, ArtifactSet
from kvgate.contract.encoding import INT_MAX, INT_MIN
from kvgate.contract.manifest import LEGACY, Retained, TransformManifest
from kvgate.contract.model import (
    Architecture,
    Engine,
    KvQuantization,
    ModelContract,
    Numerics,
    NumericsClass,
    Parameter,
    Rope,
)
from kvgate.contract.plan import Extent, PartitionPlan, Place, Rectangle
from kvgate.contract.record import IdentityRecord, Record
from kvgate.contract.representation import DTYPE_BYTES, ComponentFormat, KvGroup, Representation
from kvgate.contract.request import RequestDescriptor


def nfc(text: str) -> str:
    """The NFC form."""
    return unicodedata.normalize("NFC", text)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The strategy, or None."""
    return st.none() | strategy


digests = st.binary(min_size=32, max_size=32).filter(any)
_characters = st.characters(codec="utf-8")
any_text = st.text(_characters, max_size=20).map(nfc)
texts = st.text(_characters, min_size=1, max_size=20).map(nfc)
words = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,11}", fullmatch=True)
names = st.from_regex(r"[a-z0-9_.]{1,12}", fullmatch=True)
numbers = (st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)).map(repr)
u32s = st.integers(0, 2**32 - 1)
u64s = st.integers(0, INT_MAX)

values = st.recursive(
    st.none() | st.booleans() | st.integers(INT_MIN, INT_MAX) | st.binary(max_size=40) | any_text,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(any_text, inner, max_size=5),
    max_leaves=20,
)
"""Any value of the type set, arrays as lists."""

parameters = st.builds(Parameter, name=names, value=texts)
parameter_lists = st.lists(parameters, max_size=4, unique_by=lambda p: p.name).map(
    lambda found: tuple(sorted(found, key=lambda p: p.name))
)


def artifact_sets(must: str, roles: tuple[str, ...]) -> st.SearchStrategy[ArtifactSet]:
    """Sets with at least one file of role ``must`` and others of ``roles``."""
    return st.builds(
        lambda first, rest: ArtifactSet(artifacts=(first, *rest)),
        _artifacts((must,)),
        st.lists(_artifacts(roles), max_size=3),
    )


@st.composite
def _artifacts(draw: st.DrawFn, roles: tuple[str, ...]) -> Artifact:
    content = draw(digests)
    # One content has one size, whatever else is drawn.
    return Artifact(role=draw(st.sampled_from(roles)), size_bytes=int.from_bytes(content[:4], "big"), digest=content)


base_sets = artifact_sets("weights", tuple(role for role in ROLES if not role.startswith("adapter_")))
adapter_sets = artifact_sets("adapter_weights", ("adapter_weights", "adapter_config"))

ropes = st.builds(
    Rope,
    kind=words,
    theta=numbers,
    rotary_dim=st.integers(0, 65_536),
    style=st.sampled_from(("neox", "interleaved", "none")),
    max_positions=u64s,
    parameters=parameter_lists,
)
engines = st.builds(Engine, name=words, version=texts, build=texts, torch=texts)


def _numerics(lora: st.SearchStrategy[Any]) -> st.SearchStrategy[Numerics]:
    return st.builds(
        Numerics,
        attention_backend=texts,
        isa=words,
        compute_dtype=words,
        execution=words,
        lora_max_rank=lora,
        tensor_parallel=st.integers(1, 65_536),
        pipeline_parallel=st.integers(1, 65_536),
        other=parameter_lists,
        engine=engines,
    )


lora_ranks = st.integers(1, 65_536)
numerics = _numerics(optional(lora_ranks))
numerics_classes = st.builds(NumericsClass, name=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,11}", fullmatch=True))
kv_quantizations = st.builds(KvQuantization, cache_dtype=words, scales=optional(digests))
architectures = st.builds(Architecture, settings=parameter_lists.filter(bool))


@st.composite
def models(draw: st.DrawFn) -> ModelContract:
    """Model contracts with and without an adapter, of one engine or of a class of engines."""
    adapter = draw(optional(adapter_sets))
    strict = _numerics(lora_ranks) if adapter else numerics
    return ModelContract(
        base=draw(base_sets),
        architecture=draw(architectures),
        adapter=adapter,
        rope=draw(ropes),
        weight_quantization=draw(texts),
        kv_quantization=draw(kv_quantizations),
        multimodal=draw(optional(digests)),
        numerics=draw(strict | numerics_classes),
    )


plain_formats = st.builds(
    ComponentFormat,
    dtype=st.sampled_from(tuple(DTYPE_BYTES)),
    group=st.none(),
    scale_dtype=st.none(),
)
scaled_formats = st.builds(
    ComponentFormat,
    dtype=st.just("int8"),
    group=st.integers(1, 4096),
    scale_dtype=st.sampled_from(("float16", "bfloat16", "float32")),
)
formats = plain_formats | scaled_formats
half_formats = st.builds(
    ComponentFormat, dtype=st.sampled_from(("bfloat16", "float16")), group=st.none(), scale_dtype=st.none()
)


def _groups(smallest_v: int) -> st.SearchStrategy[list[KvGroup]]:
    group = st.builds(
        KvGroup,
        layers=st.integers(1, 4096),
        kv_heads=st.integers(1, 4096),
        head_dim_k=st.integers(1, 4096),
        head_dim_v=st.integers(smallest_v, 4096),
        window=optional(st.integers(1, 2**32)),
    )
    return st.lists(group, min_size=1, max_size=3)


groups = _groups(0)


@st.composite
def representations(draw: st.DrawFn) -> Representation:
    """Representations of both codecs."""
    raw = draw(st.booleans())
    return Representation(
        layout="canonical",
        layout_version=1,
        chunk_tokens=draw(st.integers(1, 65_536)),
        codec="raw" if raw else "k16v8",
        k_format=draw(plain_formats if raw else half_formats),
        v_format=draw(plain_formats if raw else scaled_formats),
        groups=tuple(draw(groups if raw else _groups(1))),
    )


@st.composite
def rectangles(draw: st.DrawFn, limit: int = 4096) -> Rectangle:
    """Any rectangle within ``limit`` layers and heads."""
    layers = sorted(draw(st.lists(st.integers(0, limit), min_size=2, max_size=2, unique=True)))
    heads = sorted(draw(st.lists(st.integers(0, limit), min_size=2, max_size=2, unique=True)))
    return Rectangle(
        group=draw(st.integers(0, 63)), layer_start=layers[0], layer_end=layers[1], head_start=heads[0], head_end=heads[1]
    )


def _cuts(draw: st.DrawFn, size: int, parts: int) -> list[tuple[int, int]]:
    inner = draw(st.lists(st.integers(1, size - 1), min_size=parts - 1, max_size=parts - 1, unique=True)) if parts > 1 else []
    edges = [0, *sorted(inner), size]
    return list(itertools.pairwise(edges))


@st.composite
def plans(draw: st.DrawFn) -> PartitionPlan:
    """Valid plans: uneven stages and head splits, declared copies, one or two KV groups, any worker order."""
    stages, splits, copies = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    workers = splits * copies
    order = draw(st.permutations([worker // copies for worker in range(workers)]))
    extents: list[Extent] = []
    found: list[Rectangle] = []
    places: list[Place] = []
    for group in range(draw(st.integers(1, 2))):
        layers, heads = draw(st.integers(stages, 40)), draw(st.integers(splits, 16))
        extents.append(Extent(layers=layers, kv_heads=heads))
        first = len(found)
        head_cuts = _cuts(draw, heads, splits)
        for start, end in _cuts(draw, layers, stages):
            found += [
                Rectangle(group=group, layer_start=start, layer_end=end, head_start=low, head_end=high)
                for low, high in head_cuts
            ]
        places += [
            Place(pp_rank=pp, tp_rank=tp, rectangle=first + pp * splits + order[tp])
            for pp in range(stages)
            for tp in range(workers)
        ]
    return PartitionPlan(
        extents=tuple(extents),
        pipeline_parallel=stages,
        tensor_parallel=workers,
        replication=copies,
        rectangles=tuple(found),
        places=tuple(sorted(places, key=lambda p: (p.pp_rank, p.tp_rank, p.rectangle))),
    )


@st.composite
def accesses(draw: st.DrawFn) -> Access:
    """All four scopes."""
    scope = draw(st.sampled_from(("request", "query", "prefix", "global")))
    narrow = scope in ("request", "query")
    return Access(domain=draw(digests), salt=draw(optional(digests)), scope=scope, scope_key=draw(digests) if narrow else None)


variants = st.builds(Variant, manifest=optional(digests))
extras = st.builds(
    Extra,
    kind=st.sampled_from(("multimodal", "embedding")),
    digest=digests,
    offset_tokens=u32s,
    length_tokens=st.integers(1, 2**31),
)
descriptors = st.builds(RequestDescriptor, model=digests, representation=digests, plan=digests, access=digests, variant=digests)

PARTS: dict[str, st.SearchStrategy[Any]] = {
    "model": models(),
    "representation": representations(),
    "plan": plans(),
    "access": accesses(),
    "variant": variants,
}
"""The five records below a request descriptor."""

parts = st.fixed_dictionaries(PARTS)


def root_of(records: dict[str, IdentityRecord]) -> bytes:
    """The root of five records."""
    return RequestDescriptor(**{name: record.digest() for name, record in records.items()}).root()


@st.composite
def retained_records(draw: st.DrawFn) -> Retained:
    """Kept positions of any shape."""
    per = draw(st.sampled_from(("model", "layer", "head")))
    return Retained(
        per=per,
        layers=1 if per == "model" else draw(st.integers(1, 4096)),
        heads=draw(st.integers(1, 4096)) if per == "head" else 1,
        tokens=draw(st.integers(0, 2**31)),
        positions=draw(digests),
    )


@st.composite
def manifests(draw: st.DrawFn) -> TransformManifest:
    """Any transform manifest, of every scope and with or without a query where that may be."""
    kept = draw(retained_records())
    algorithm = draw(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,11}", fullmatch=True) | st.just(LEGACY))
    query = draw(optional(digests))
    wide = ["query"] if query else ["prefix", "global"]
    return TransformManifest(
        algorithm=algorithm,
        algorithm_version=draw(words),
        parameters=draw(parameter_lists),
        source_prefix=draw(digests),
        source_tokens=draw(st.integers(max(1, kept.tokens), 2**31)),
        retained=kept,
        position_map=draw(digests),
        query=query,
        payload_format=draw(digests),
        model=draw(digests),
        scope=draw(st.sampled_from(["request"] if algorithm == LEGACY else ["request", *wide])),
    )


RECORDS: dict[type[Record], st.SearchStrategy[Any]] = {
    Parameter: parameters,
    Artifact: _artifacts(ROLES),
    ArtifactSet: base_sets | adapter_sets,
    Rope: ropes,
    Engine: engines,
    Numerics: numerics,
    NumericsClass: numerics_classes,
    KvQuantization: kv_quantizations,
    Architecture: architectures,
    ModelContract: models(),
    ComponentFormat: formats,
    KvGroup: groups.map(lambda found: found[0]),
    Representation: representations(),
    Rectangle: rectangles(),
    Extent: st.builds(Extent, layers=st.integers(1, 4096), kv_heads=st.integers(1, 4096)),
    Place: st.builds(Place, pp_rank=st.integers(0, 1024), tp_rank=st.integers(0, 1024), rectangle=st.integers(0, 1024)),
    PartitionPlan: plans(),
    Access: accesses(),
    Variant: variants,
    Extra: extras,
    RequestDescriptor: descriptors,
    Retained: retained_records(),
    TransformManifest: manifests(),
}
"""A strategy for every record class of the contract."""

records = st.one_of(*RECORDS.values())
