"""Failures that users of other caches reported, as properties of identity: the whole kind must be impossible.

The number of each kind is that of the project's list of such reports; here are those that identity alone decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.contract.access import Access
from kvgate.contract.address import Extra, chunk_chain, shard_address, token_digest, token_digests
from kvgate.contract.artifacts import Artifact, ArtifactSet
from kvgate.contract.digests import Kind, digest
from kvgate.contract.keys import domain_id, domain_key, salt_digest, salt_key, token_key
from kvgate.contract.plan import PartitionPlan, even_plan
from tests.contract.sample import Json, changed, get, hex32, records_of, sample
from tests.contract.strategies import root_of

SECRET = bytes(range(32))
TOKENS = list(range(12))


def objects(request: Json, tokens: list[int] = TOKENS, key: bytes = b"k" * 32) -> set[bytes]:
    """The names of all objects that storing ``tokens`` under ``request`` makes."""
    records = records_of(request)
    plan = records["plan"]
    assert isinstance(plan, PartitionPlan)
    chain = chunk_chain(root_of(records), token_digests(key, tokens, 4))
    return {shard_address(chunk, rectangle) for chunk in chain for rectangle in plan.rectangles}


def all_apart(sets: Iterable[set[bytes]]) -> bool:
    """Whether no two sets have a common member."""
    found = list(sets)
    return len(set().union(*found)) == sum(map(len, found))


def adapter_set(content: bytes) -> Json:
    """The adapter made of one file with ``content``."""
    file = Artifact(role="adapter_weights", size_bytes=len(content), digest=digest(Kind.ARTIFACT_SET, content))
    return ArtifactSet(artifacts=(file,)).to_json()


def test_an_adapter_reloaded_under_its_name_and_path_shares_nothing_with_its_old_bytes() -> None:
    """Kind 1: neither name nor path has a place in identity, and the bytes are other bytes."""
    old, new = adapter_set(b"v1"), adapter_set(b"v2")
    assert all_apart(objects(changed(sample(), {"model.adapter": one})) for one in (old, new))
    assert set(get(old, "artifacts[0]")) == {"role", "size_bytes", "digest"}


def test_adapter_a_adapter_b_and_no_adapter_share_nothing() -> None:
    """Kind 2: the adapter is in every address, and "none" is a value of its own, not "any"."""
    adapters = (adapter_set(b"A"), adapter_set(b"B"), None)
    assert all_apart(objects(changed(sample(), {"model.adapter": one})) for one in adapters)


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20))
def test_an_adapter_and_a_salt_of_the_same_text_share_nothing(text: str) -> None:
    """Kind 3: adapter "X" is the content of files in the model contract, salt "X" a keyed digest in access."""
    salt = salt_digest(salt_key(domain_key(SECRET, "d")), text)
    assert salt is not None
    base = changed(sample(), {"model.adapter": None, "access.salt": None})
    as_adapter = changed(base, {"model.adapter": adapter_set(text.encode())})
    as_salt = changed(base, {"access.salt": salt.hex()})
    assert all_apart(map(objects, (base, as_adapter, as_salt)))


def test_even_one_digest_as_adapter_scales_manifest_or_salt_shares_nothing() -> None:
    """Kind 3, taken further: the same 32 bytes in another field are another request."""
    base = changed(
        sample(),
        {"model.kv_quantization.scales": None, "model.multimodal": None, "access.salt": None, "variant.manifest": None},
    )
    fields = ("model.kv_quantization.scales", "model.multimodal", "access.salt", "variant.manifest", "access.domain")
    assert all_apart(objects(changed(base, {field: hex32(77)})) for field in fields)


def test_two_salts_share_nothing_and_one_salt_shares_all() -> None:
    """Kind 4: a miss across salts, a hit within one."""
    key = salt_key(domain_key(SECRET, "d"))

    def with_salt(salt: str | None) -> set[bytes]:
        hashed = salt_digest(key, salt)
        return objects(changed(sample(), {"access.salt": hashed.hex() if hashed else None}))

    assert all_apart((with_salt("t1"), with_salt("t2"), with_salt("T1"), with_salt(None)))
    assert with_salt("t1") == with_salt("t1")


@given(st.binary(max_size=64))
def test_one_text_has_another_digest_in_every_context(data: bytes) -> None:
    """Kind 5: digests of different kinds never meet, whatever the bytes."""
    assert len({digest(kind, data) for kind in Kind}) == len(Kind)


def test_tenants_share_nothing_although_their_prompts_are_equal() -> None:
    """Kinds 4 and 6: the domain is in the root and its key in every token digest."""

    def of_domain(name: str) -> set[bytes]:
        key = domain_key(SECRET, name)
        access = Access(domain=domain_id(key), salt=None, scope="prefix", scope_key=None)
        return objects(sample() | {"access": access.to_json()}, key=token_key(key))

    assert all_apart(map(of_domain, ("a", "b", "caf\u00e9", "cafe\u0301")))
    assert not set(token_digests(token_key(domain_key(SECRET, "a")), TOKENS, 4)) & set(
        token_digests(token_key(domain_key(SECRET, "b")), TOKENS, 4)
    )


@given(st.binary(min_size=30, max_size=30), st.binary(min_size=30, max_size=30), st.binary(min_size=2, max_size=2))
def test_images_whose_digests_end_alike_share_nothing(one: bytes, other: bytes, tail: bytes) -> None:
    """Kind 8: the whole digest is in the chunk, not its last four hexadecimal digits."""
    if one == other or not any(one + tail) or not any(other + tail):
        return

    def chunk(image: bytes, offset: int = 2**31) -> bytes:
        return token_digest(b"k" * 32, [9] * 4, [Extra(kind="multimodal", digest=image, offset_tokens=offset, length_tokens=3)])

    assert chunk(one + tail) != chunk(other + tail)
    assert chunk(one + tail) != chunk(one + tail, 2**31 + 1)


@pytest.mark.parametrize("byte", [0, 1, 17, 31])
def test_one_changed_weight_byte_shares_nothing(byte: int) -> None:
    """Kinds 10 and 11: the digest of the file that was loaded is in every address; the model's name is in none."""
    weights = bytes(range(32))
    altered = weights[:byte] + bytes([weights[byte] ^ 1]) + weights[byte + 1 :]

    def loaded(content: bytes) -> set[bytes]:
        file = {"role": "weights", "size_bytes": 32, "digest": digest(Kind.ARTIFACT_SET, content).hex()}
        return objects(changed(sample(), {"model.base.artifacts[0]": file}))

    assert all_apart((loaded(weights), loaded(altered)))


def with_plan(**arguments: Any) -> set[bytes]:
    """Objects of a request over one group of 4 layers and 4 heads under an even plan."""
    request = changed(sample(), {"representation.groups": [get(sample(), "representation.groups[0]") | {"kv_heads": 4}]})
    return objects(request | {"plan": even_plan(layers=4, kv_heads=4, **arguments).to_json()})


def test_widths_share_nothing() -> None:
    """Kind 14: what one worker stored is no part of what two, or two stages, look up."""
    whole, halves = ((0, 4),), ((0, 2), (2, 4))
    widths = [with_plan(pipeline=stages, tensor_parallel=tp) for stages in (whole, halves) for tp in (1, 2, 4, 8)]
    assert all_apart(widths)


def test_two_workers_of_one_plan_never_name_one_object() -> None:
    """Kind 14: two rectangles of a chunk are two objects; two workers with one rectangle hold one, as declared."""
    assert len(with_plan(pipeline=((0, 4),), tensor_parallel=4)) == 3 * 4
    assert len(with_plan(pipeline=((0, 4),), tensor_parallel=8)) == 3 * 4


@pytest.mark.parametrize("field", ["name", "version", "build", "torch"])
def test_engine_builds_share_nothing(field: str) -> None:
    """Kind 17: a broken engine image can't poison the cache of the next one."""
    path = f"model.numerics.engine.{field}"
    assert all_apart(objects(changed(sample(), {path: value})) for value in ("b1", "b2", "b1.0"))


def test_a_declared_class_of_engines_shares_and_only_then() -> None:
    """Kind 17, the declared exception: builds share under a class name, and never with an engine outside the class."""

    def in_class(name: str) -> set[bytes]:
        return objects(changed(sample(), {"model.numerics": {"is": "NumericsClass", "value": {"name": name}}}))

    assert in_class("h100") == in_class("h100")
    assert all_apart((in_class("h100"), in_class("h200"), objects(sample())))


def test_a_ratio_or_a_query_of_a_transform_shares_nothing() -> None:
    """Kind 30: the manifest and the query are in the root, beside tokens that are equal."""
    cases = (
        {"variant.manifest": None},
        {"variant.manifest": hex32(50)},
        {"variant.manifest": hex32(25)},
        {"access.scope_key": hex32(51)},
        {"access.scope_key": hex32(52)},
    )
    assert all_apart(objects(changed(sample(), case)) for case in cases)
