"""The parts of ``docs/contract.md`` that are computed: the tables, the context strings and the worked example.

``python -m tests.contract.document --write`` renders them anew; the tests compare.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvgate.cli.address import derive, example, parse
from kvgate.contract.address import Extra
from kvgate.contract.digests import Kind, context
from kvgate.contract.manifest import TransformManifest
from kvgate.contract.plan import Rectangle
from kvgate.contract.table import EXCLUDED, IDENTITY, MANIFEST, IdentityField
from tests.contract import independent
from tests.contract.sample import KINDS
from tests.contract.walk import leaf_forms

FILE = Path(__file__).resolve().parents[2] / "docs" / "contract.md"
MARK = re.compile(r"(<!-- computed: (?P<name>[a-z ]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)

OTHER_FORMS = {
    "schema": "integer",
    "chunk.parent": "32 bytes",
    "chunk.index": "u64",
    "chunk.token_key": "32 bytes",
    "chunk.tokens[]": "u32",
    "shard.chunk": "32 bytes",
}


def forms() -> dict[str, str]:
    """What stands in each field."""
    found = dict(OTHER_FORMS)
    for name, kind in KINDS.items():
        found |= leaf_forms(kind, name)
    found |= leaf_forms(Extra, "chunk.extras[]") | leaf_forms(Rectangle, "shard.rectangle")
    return found | leaf_forms(TransformManifest, "manifest")


def identity_table(fields: tuple[IdentityField, ...] = IDENTITY) -> str:
    """Identity fields as a table."""
    known = forms()
    rows = ["| field | form | enters | a miss names | what it is |", "|---|---|---|---|---|"]
    rows += [
        f"| `{row.path}` | {known[row.path]} | {row.level} | {', '.join(row.components) or '—'} | {row.meaning} |"
        for row in fields
    ]
    return "\n".join(rows)


def excluded_table() -> str:
    """The excluded things as a table."""
    rows = ["| not identity | refused as a field under these names | because |", "|---|---|---|"]
    rows += [f"| {row.what} | {', '.join(f'`{name}`' for name in row.names) or '—'} | {row.reason} |" for row in EXCLUDED]
    return "\n".join(rows)


def context_table() -> str:
    """The context strings, as a block."""
    return "\n".join(["```text", *(context(kind) for kind in Kind), "```"])


def _hex(label: str, data: bytes) -> str:
    lines = textwrap.wrap(data.hex(), 96)
    return f"{label}\n" + "\n".join(f"    {line}" for line in lines)


def worked_example() -> str:
    """Every byte string that is hashed for the first chunk of the example, and what comes out."""
    request = example()
    found = derive(parse(json.dumps(request).encode()))
    digests = {name: independent.derive_key(kind, _encoding(request, name)) for name, kind in independent.KINDS.items()}
    first, size = found["chunks"][0], request["representation"]["chunk_tokens"]
    key = independent.derive_key("token key", bytes.fromhex(request["domain_key"]))
    tokens = struct.pack(f"<I{size}I", size, *request["tokens"][:size]) + independent.cbor([])
    image = [one["extra"] for one in request["extras"]]
    second_tokens = struct.pack(f"<I{size}I", size, *request["tokens"][size : 2 * size]) + independent.cbor(
        independent.from_json(image)
    )
    chunk = bytes.fromhex(found["root"]) + struct.pack("<Q", 0) + bytes.fromhex(first["token_digest"])
    rectangle = independent.rectangle(request["plan"]["rectangles"][1])
    shard = bytes.fromhex(first["address"]) + struct.pack("<5I", *rectangle)
    text = [_hex(f"{name}: encoding", _encoding(request, name)) + "\n" + _out("digest", digests[name]) for name in KINDS]
    text += [
        _hex("request descriptor: encoding", independent.cbor(digests)) + "\n" + _out("root", bytes.fromhex(found["root"])),
        _out("domain key (given)", bytes.fromhex(request["domain_key"])),
        _out("token key", key),
        _hex("chunk 0: hashed with the token key", tokens) + "\n" + _out("t", bytes.fromhex(first["token_digest"])),
        _hex("chunk 0: root, index, t", chunk) + "\n" + _out("chunk address", bytes.fromhex(first["address"])),
        _hex(f"chunk 0, rectangle 1 {rectangle}: chunk address and rectangle", shard)
        + "\n"
        + _out("shard address", bytes.fromhex(first["shards"][1]["address"])),
        _hex("chunk 1, with one image: hashed with the token key", second_tokens)
        + "\n"
        + _out("t", bytes.fromhex(found["chunks"][1]["token_digest"])),
        _out("chunk 1: chunk address", bytes.fromhex(found["chunks"][1]["address"])),
    ]
    return "```text\n" + "\n\n".join(text) + "\n```"


def _out(label: str, value: bytes) -> str:
    return f"{label} = {value.hex()}"


def _encoding(request: dict[str, Any], name: str) -> bytes:
    return independent.cbor(independent.from_json(request[name]))


def example_json() -> str:
    """The description that the example starts from."""
    lines = [f'  "{name}": {json.dumps(value)}' for name, value in example().items()]
    wrapped = ["\n".join(textwrap.wrap(line, 126, subsequent_indent="    ", break_on_hyphens=False)) for line in lines]
    return "```json\n{\n" + ",\n".join(wrapped) + "\n}\n```"


PARTS: dict[str, Callable[[], str]] = {
    "identity fields": identity_table,
    "manifest fields": lambda: identity_table(MANIFEST),
    "excluded": excluded_table,
    "contexts": context_table,
    "example": example_json,
    "worked example": worked_example,
}


def render(document: str) -> str:
    """The document with all computed parts rendered anew."""

    def part(found: re.Match[str]) -> str:
        return found[1] + PARTS[found["name"]]() + "\n" + found["end"]

    return MARK.sub(part, document)


def main() -> int:
    """Compare, or write with ``--write``."""
    document = FILE.read_text()
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(render(document))
        return 0
    same = render(document) == document
    print("docs/contract.md agrees" if same else "docs/contract.md differs from the code")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
