"""Golden vectors: addresses of fixed requests. ``python -m tests.contract.golden`` compares, with ``--write`` it writes them.

A difference means that every stored object would be missed, or worse, that an old name now stands for something else. Write them
anew only together with a new schema version.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvgate.cli.address import derive, example, parse
from kvgate.contract.address import Extra, token_digest
from kvgate.contract.capability import Capability, domain_capability_key
from kvgate.contract.digests import SCHEMA, Kind, context, digest
from kvgate.contract.keys import domain_id, domain_key, salt_digest, salt_key, token_key
from kvgate.contract.manifest import TransformManifest, position_map, query_digest, retained, source_prefix
from kvgate.contract.model import Parameter
from tests.contract.sample import KINDS, Json, changed, hex32, sample, sample_of_a_class

FILE = Path(__file__).with_name("golden.json")

DOMAIN_KEY = hex32(0xD0)


def requests() -> dict[str, Json]:
    """The fixed requests: together they reach every field and both forms of every optional one."""
    domain = domain_id(bytes.fromhex(DOMAIN_KEY)).hex()
    asked: Json = {"tokens": [0, 1, 2, 3, 70_000, 2**31, 2**32 - 1, 7, 8], "domain_key": DOMAIN_KEY, "extras": []}
    full = changed(sample(), {"access.domain": domain}) | asked
    extras = [
        {"chunk": 0, "extra": {"kind": kind, "digest": hex32(n), "offset_tokens": 2**31 - n, "length_tokens": n}}
        for n, kind in ((2, "embedding"), (1, "multimodal"))
    ]
    nulls: dict[str, Any] = {
        "model.adapter": None,
        "model.multimodal": None,
        "model.kv_quantization.scales": None,
        "model.rope.parameters": [],
        "model.numerics.lora_max_rank": None,
        "model.numerics.other": [],
        "representation.codec": "raw",
        "representation.v_format": {"dtype": "bfloat16", "group": None, "scale_dtype": None},
        "access.salt": None,
        "access.scope": "prefix",
        "access.scope_key": None,
        "variant.manifest": None,
    }
    return {
        "the example of kvgate address": example(),
        "every field given": full,
        "every optional field null": changed(full, nulls),
        "a class of engines": changed(sample_of_a_class(), {"access.domain": domain}) | asked,
        "two extras in one chunk": full | {"extras": extras},
    }


def golden() -> dict[str, Any]:
    """All vectors, computed now."""
    return {
        "schema": SCHEMA,
        "contexts": {kind.value: context(kind) for kind in Kind},
        "digests of no bytes": {kind.value: digest(kind, b"").hex() for kind in Kind},
        "keys": _keys(),
        "token digests": _token_digests(),
        "manifest": _manifest(),
        "requests": [_request(name, request) for name, request in requests().items()],
    }


def _keys() -> dict[str, Any]:
    secret = bytes(range(32))
    key = domain_key(secret, "café")
    salted = salt_digest(salt_key(key), "salt")
    assert salted is not None
    return {
        "secret": secret.hex(),
        "domain": "café",
        "salt": "salt",
        "domain_key": key.hex(),
        "domain_id": domain_id(key).hex(),
        "token_key": token_key(key).hex(),
        "salt_key": salt_key(key).hex(),
        "salt_digest": salted.hex(),
    }


def _token_digests() -> dict[str, str]:
    key = bytes(range(32))
    extra = Extra(kind="multimodal", digest=key, offset_tokens=2**31, length_tokens=1)
    return {
        "no tokens": token_digest(key, []).hex(),
        "tokens 1, 2, 3": token_digest(key, [1, 2, 3]).hex(),
        "tokens 1, 2, 3 and an image": token_digest(key, [1, 2, 3], [extra]).hex(),
    }


def _manifest() -> dict[str, Any]:
    kept, new = [[[0, 1, 700]], [[0, 2, 3]]], [[[0, 1, 2]], [[0, 1, 2]]]
    made = TransformManifest(
        algorithm="snapkv",
        algorithm_version="1",
        parameters=(Parameter(name="ratio", value="1/2"),),
        source_prefix=source_prefix(bytes(range(32)), 701, bytes(range(1, 33))),
        source_tokens=701,
        retained=retained(kept, "layer"),
        position_map=position_map(kept, new),
        query=query_digest(bytes(range(32)), [1, 2, 3]),
        payload_format=bytes.fromhex(hex32(5)),
        model=bytes.fromhex(hex32(6)),
        scope="query",
    )
    capability = Capability(
        scope=made.scope,
        chunks=3,
        expires_s=2_000_000_000,
        manifest=made.digest(),
        scope_key=made.query,
        root=bytes.fromhex(hex32(7)),
        end=bytes.fromhex(hex32(8)),
    )
    key = domain_capability_key(bytes(range(32)), bytes.fromhex(hex32(9)))
    return {"json": made.to_json(), "digest": made.digest().hex(), "capability": capability.seal(key).hex()}


def _request(name: str, request: Json) -> dict[str, Any]:
    encodings = {part: kind.from_json(request[part]).encode().hex() for part, kind in KINDS.items()}
    return {"name": name, "request": request, "encodings": encodings, "addresses": derive(parse(json.dumps(request).encode()))}


def text() -> str:
    """The content of the file."""
    return json.dumps(golden(), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    """Compare, or write with ``--write``."""
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(text())
        return 0
    same = FILE.read_text() == text()
    print("golden vectors agree" if same else "golden vectors differ: addresses have changed")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
