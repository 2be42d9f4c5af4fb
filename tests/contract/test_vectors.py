"""Public test vectors (KVGATE_VECTORS): CBOR is accepted exactly where it lies in the contract's type set and is shortest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cbor2
import pytest
from blake3 import blake3

from kvgate.contract import digests
from kvgate.contract.decoding import decode
from kvgate.contract.digests import DIGEST_BYTES, Kind, digest, keyed
from kvgate.contract.encoding import INT_MAX, INT_MIN, encode
from kvgate.contract.errors import ContractError
from tests.contract import independent


def load(folder: Path, name: str) -> Any:
    """One vector file."""
    return json.loads((folder / name).read_text())


def in_type_set(value: Any) -> bool:
    """Whether a value read by a general decoder can be written at all."""
    if value is None or isinstance(value, bool | bytes | str):
        return True
    if isinstance(value, int):
        return INT_MIN <= value <= INT_MAX
    if isinstance(value, list):
        return all(map(in_type_set, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(in_type_set, value.values()))
    return False


def should_accept(data: bytes) -> bool:
    """In the type set, and exactly what an independent encoder writes for it. A tag is never in the set, whatever it means."""
    if data[0] >> 5 in (6, 7):
        return data in (b"\xf4", b"\xf5", b"\xf6")
    value = cbor2.loads(data)
    return in_type_set(value) and independent.cbor(value) == data


def check(data: bytes) -> bool:
    """Decode; True where accepted, False where refused."""
    try:
        value = decode(data)
    except ContractError:
        return False
    assert encode(value) == data
    return True


@pytest.mark.parametrize(("name", "accepted", "rows"), [("cbor_appendix_a.json", 35, 82), ("dcbor_valid.json", 24, 40)])
def test_well_formed_vectors_are_accepted_exactly_inside_the_type_set(
    vectors_dir: Path, name: str, accepted: int, rows: int
) -> None:
    """Floats, tags, simple values, wide integers, indefinite lengths and integer keys are refused, all else is read."""
    vectors = [bytes.fromhex(row["hex"]) for row in load(vectors_dir, name)]
    assert len(vectors) == rows
    assert [check(data) for data in vectors] == [should_accept(data) for data in vectors]
    assert sum(map(check, vectors)) == accepted


@pytest.mark.parametrize("name", ["cbor_appendix_a.json", "dcbor_valid.json"])
def test_accepted_vectors_decode_to_their_published_value(vectors_dir: Path, name: str) -> None:
    """What is read is the value that the vector states."""
    for row in load(vectors_dir, name):
        data = bytes.fromhex(row["hex"])
        if check(data) and "decoded" in row and not row.get("skipDecode"):
            assert decode(data) == row["decoded"]


def test_every_invalid_vector_is_refused(vectors_dir: Path) -> None:
    """None of the deviations from deterministic CBOR is read."""
    vectors = [bytes.fromhex(row["hex"]) for row in load(vectors_dir, "dcbor_invalid.json")]
    assert len(vectors) == 37
    assert not [data.hex() for data in vectors if check(data)]


def test_blake3_vectors_in_all_three_modes(vectors_dir: Path) -> None:
    """The hash library is BLAKE3, and ``keyed`` is its keyed mode."""
    vectors = load(vectors_dir, "blake3_test_vectors.json")
    key = vectors["key"].encode()
    assert len(vectors["cases"]) == 35
    for case in vectors["cases"]:
        data = bytes(i % 251 for i in range(case["input_len"]))
        short = 2 * DIGEST_BYTES
        assert blake3(data).hexdigest() == case["hash"][:short]
        assert keyed(key, data).hex() == case["keyed_hash"][:short]
        assert blake3(data, derive_key_context=vectors["context_string"]).hexdigest() == case["derive_key"][:short]


def test_digest_is_derive_key_mode(vectors_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``digest`` with the vectors' context string gives the vectors' derive_key outputs."""
    vectors = load(vectors_dir, "blake3_test_vectors.json")
    monkeypatch.setattr(digests, "context", lambda kind, schema: vectors["context_string"])
    for case in vectors["cases"]:
        data = bytes(i % 251 for i in range(case["input_len"]))
        # A schema of its own: prepared hashers are kept by kind and schema.
        assert digest(Kind.MODEL, data, -1).hex() == case["derive_key"][: 2 * DIGEST_BYTES]
