"""``docs/contract.md`` says what the code does."""

from __future__ import annotations

import json
import re

import pytest
from blake3 import blake3

from kvgate.cli.address import derive, example, parse
from kvgate.contract.digests import Kind, context
from kvgate.contract.encoding import MAX_DEPTH, MAX_VALUES
from kvgate.contract.request import RequestDescriptor
from kvgate.contract.table import EXCLUDED, IDENTITY, MANIFEST, IdentityField
from tests.contract.document import FILE, PARTS, forms, render
from tests.contract.sample import KINDS

TEXT = FILE.read_text()
SECTIONS = {name: TEXT.partition(f"<!-- computed: {name} -->")[2].partition("<!-- end -->")[0] for name in PARTS}


def rows(section: str) -> list[list[str]]:
    """Cells of a table, without its head."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_the_computed_parts_are_up_to_date() -> None:
    """Rendering them again changes nothing, and each is there once."""
    assert render(TEXT) == TEXT
    assert all(TEXT.count(f"<!-- computed: {name} -->") == 1 for name in PARTS)
    assert all(len(section) > 100 for section in SECTIONS.values())


@pytest.mark.parametrize(("section", "fields"), [("identity fields", IDENTITY), ("manifest fields", MANIFEST)])
def test_the_document_lists_every_identity_field(section: str, fields: tuple[IdentityField, ...]) -> None:
    """Row by row the table of the code, read back from the document."""
    found = [(path.strip("`"), form, level, names, meaning) for path, form, level, names, meaning in rows(section)]
    assert found == [(row.path, forms()[row.path], row.level, ", ".join(row.components) or "—", row.meaning) for row in fields]


def test_the_document_lists_every_exclusion() -> None:
    """Row by row, with the reason."""
    found = [(what, tuple(re.findall(r"`(\w+)`", names)), reason) for what, names, reason in rows("excluded")]
    assert found == [(row.what, row.names, row.reason) for row in EXCLUDED]


def test_the_document_lists_every_context() -> None:
    """All kinds, and no others."""
    assert SECTIONS["contexts"].strip("`\n").splitlines()[1:] == [context(kind) for kind in Kind]


def test_the_document_states_the_limits_of_the_code() -> None:
    """Depth and number of values."""
    assert f"more than {MAX_DEPTH} levels, more than {MAX_VALUES:,} values" in TEXT


def test_the_description_in_the_document_is_the_example() -> None:
    """Copied out of the document it is a valid description."""
    written = re.sub(r"^```\w*$", "", SECTIONS["example"], flags=re.MULTILINE)
    assert json.loads(written) == example()


def inputs() -> dict[str, bytes]:
    """The byte strings of the worked example under their headings."""
    found = re.findall(r"^(\S.*?)\n((?:    [0-9a-f]+\n)+)", SECTIONS["worked example"], re.MULTILINE)
    return {heading: bytes.fromhex("".join(lines.split())) for heading, lines in found}


def stated(label: str) -> list[bytes]:
    """The values that the example states under a label."""
    return [bytes.fromhex(value) for value in re.findall(rf"^{re.escape(label)} = ([0-9a-f]+)$", TEXT, re.MULTILINE)]


def derived(kind: Kind, data: bytes) -> bytes:
    """BLAKE3 with a context string as the document prints it."""
    (line,) = [one for one in SECTIONS["contexts"].splitlines() if one.endswith(f" v1 {kind.value}")]
    return blake3(data, derive_key_context=line).digest()


@pytest.mark.parametrize("name", KINDS)
def test_the_worked_example_encodes_and_digests_each_record(name: str) -> None:
    """The bytes in the document are the record's encoding, and hash to the digest stated below them."""
    data = inputs()[f"{name}: encoding"]
    assert data == KINDS[name].from_json(example()[name]).encode()
    assert stated("digest")[list(KINDS).index(name)] == derived(KINDS[name].KIND, data)


def test_the_worked_example_derives_the_root() -> None:
    """From the five digests."""
    data = inputs()["request descriptor: encoding"]
    assert data == RequestDescriptor(**dict(zip(KINDS, stated("digest"), strict=True))).encode()
    assert stated("root") == [derived(Kind.REQUEST, data)]


def test_the_worked_example_derives_chunk_and_shard() -> None:
    """Token digest, chunk and shard follow from the bytes and keys that the document prints, and from nothing else."""
    found = inputs()
    (token_key,), (root,) = stated("token key"), stated("root")
    assert token_key == derived(Kind.TOKEN_KEY, stated("domain key (given)")[0])
    first, second = (blake3(found[heading], key=token_key).digest() for heading in found if "hashed with" in heading)
    assert stated("t") == [first, second]
    (chunk_input,) = [data for heading, data in found.items() if heading == "chunk 0: root, index, t"]
    assert chunk_input == root + bytes(8) + first
    chunk = derived(Kind.CHUNK, chunk_input)
    assert stated("chunk address") == [chunk]
    assert stated("chunk 1: chunk address") == [derived(Kind.CHUNK, chunk + b"\1" + bytes(7) + second)]
    (shard_input,) = [data for heading, data in found.items() if "rectangle 1" in heading]
    assert (len(chunk_input), len(shard_input)) == (72, 52)
    assert shard_input[:32] == chunk
    assert stated("shard address") == [derived(Kind.SHARD, shard_input)]


def test_the_command_derives_what_the_worked_example_states() -> None:
    """``kvgate address`` on the example."""
    found = derive(parse(json.dumps(example()).encode()))
    assert found["root"] == stated("root")[0].hex()
    assert list(found["descriptor"].values()) == [value.hex() for value in stated("digest")]
    assert [chunk["token_digest"] for chunk in found["chunks"]] == [value.hex() for value in stated("t")]
    assert found["chunks"][0]["shards"][1]["address"] == stated("shard address")[0].hex()
    assert found["chunks"][1]["address"] == stated("chunk 1: chunk address")[0].hex()
