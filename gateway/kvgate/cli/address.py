"""``kvgate address FILE``: derive root, token digests, chunk and shard addresses from a JSON description, for auditors."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from blake3 import blake3

from kvgate.contract.access import Access, Variant
from kvgate.contract.address import Extra, chunk_chain, shard_address, token_digest
from kvgate.contract.artifacts import Artifact, ArtifactSet
from kvgate.contract.digests import DIGEST_BYTES, SCHEMA
from kvgate.contract.errors import ContractError
from kvgate.contract.keys import domain_id, token_key
from kvgate.contract.model import Architecture, Engine, KvQuantization, ModelContract, Numerics, Parameter, Rope
from kvgate.contract.plan import PartitionPlan, Rectangle, even_plan
from kvgate.contract.record import IdentityRecord, Record
from kvgate.contract.representation import ComponentFormat, KvGroup, Representation
from kvgate.contract.request import RequestDescriptor

MAX_FILE_BYTES: Final = 16 << 20
MAX_SHARDS: Final = 1 << 20

R = TypeVar("R", bound=Record)

_RECORDS: Final[dict[str, type[IdentityRecord]]] = {
    "model": ModelContract,
    "representation": Representation,
    "plan": PartitionPlan,
    "access": Access,
    "variant": Variant,
}
_OPTIONAL: Final = ("tokens", "token_digests", "domain_key", "token_key", "extras", "rectangles")

_HELP: Final = """\
Derive the addresses of a request's KV from a description of everything they depend on. Reads FILE ("-": standard input),
touches nothing else, and asks no gateway.

The file is one JSON object; bytes are lower-case hexadecimal text, and what is absent is an explicit null:

  model, representation, plan, access, variant   the records of docs/contract.md, every field given
  tokens           token ids; needs domain_key or token_key
  token_digests    in place of tokens: the digest t of each full chunk
  domain_key       key of the isolation domain; access.domain must be the id made from it
  token_key        in place of domain_key: its token key alone
  extras           multimodal items and prompt embeddings: {"chunk": index, "extra": {...}} each; [] if left out
  rectangles       which rectangles of the plan to name shards for; all if left out

A domain or token key is a secret: keep such a file closed to others. With token_digests none is needed.

Start from an example:  kvgate address --example > request.json;  kvgate address request.json
Exit status: 0 derived; 2 the description is wrong (the message names the field and what is accepted).
"""


@dataclass(frozen=True, slots=True)
class Description:
    """A parsed and checked description. ``tail_tokens`` tokens lie after the last full chunk and have no address."""

    records: dict[str, IdentityRecord]
    representation: Representation
    rectangles: tuple[Rectangle, ...]
    token_digests: tuple[bytes, ...]
    tail_tokens: int


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``address`` command."""
    parser = subparsers.add_parser(
        "address",
        help="derive addresses from a JSON description",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help='the description; "-" reads standard input')
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--example", action="store_true", help="print a complete description to edit, and stop")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out; returns the exit status."""
    if args.example:
        print(json.dumps(example(), indent=2))
        return 0
    if args.file is None:
        print("kvgate address: give a FILE, or --example to see one", file=sys.stderr)
        return 2
    try:
        result = derive(parse(_read(args.file)))
    except ContractError as error:
        print(f"kvgate address: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"kvgate address: can't read the file: {error.strerror}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=2) if args.json else _table(result))
    return 0


def parse(data: bytes) -> Description:
    """Check a description; raises ``ContractError`` naming the field."""
    value = _load(data)
    for name in value:
        if name not in _RECORDS and name not in _OPTIONAL:
            raise ContractError(_shown(name), "unknown entry", "see kvgate address --help")
    records = {name: _record(kind, name, value) for name, kind in _RECORDS.items()}
    representation, plan, access = records["representation"], records["plan"], records["access"]
    assert isinstance(representation, Representation)
    assert isinstance(plan, PartitionPlan)
    assert isinstance(access, Access)
    _check_geometry(plan, representation)
    digests, tail = _token_digests(value, representation.chunk_tokens, access)
    rectangles = _rectangles(value, plan)
    if len(digests) * len(rectangles) > MAX_SHARDS:
        raise ContractError("rectangles", "give too many shards", f"at most {MAX_SHARDS} chunks times rectangles")
    return Description(records, representation, rectangles, digests, tail)


def derive(description: Description) -> dict[str, Any]:
    """Everything the description names, as JSON values."""
    parts = {name: record.digest() for name, record in description.records.items()}
    root = RequestDescriptor(**parts).root()
    chunks = [
        {
            "index": index,
            "token_digest": token.hex(),
            "address": address.hex(),
            "shards": [
                {
                    "rectangle": rectangle.to_json(),
                    "payload_bytes": description.representation.payload_bytes(rectangle),
                    "address": shard_address(address, rectangle).hex(),
                }
                for rectangle in description.rectangles
            ],
        }
        for index, (token, address) in enumerate(
            zip(description.token_digests, chunk_chain(root, description.token_digests), strict=True)
        )
    ]
    return {
        "schema": SCHEMA,
        "descriptor": {name: digest.hex() for name, digest in parts.items()},
        "root": root.hex(),
        "chunks": chunks,
        "tail_tokens": description.tail_tokens,
    }


def _read(name: str) -> bytes:
    if name == "-":
        data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    else:
        with Path(name).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ContractError(
            "description", "is too large", f"at most {MAX_FILE_BYTES} bytes; give token_digests in place of tokens"
        )
    return data


def _load(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError:
        raise ContractError("description", "is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ContractError("description", f"is not JSON at line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise ContractError("description", "is nested too deep") from None
    except ValueError as error:
        if isinstance(error, ContractError):
            raise
        # An integer of thousands of digits: Python's parser refuses it with a plain ValueError.
        raise ContractError("description", "holds an integer out of range", "between -2**63 and 2**64-1") from None
    if not isinstance(value, dict):
        raise ContractError("description", f"is {type(value).__name__}", "must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, item in pairs:
        if name in value:
            raise ContractError(_shown(name), "is given twice in one object", "keep one")
        value[name] = item
    return value


def _shown(name: str) -> str:
    """A key of the user's own file for a message, kept short and printable."""
    return name if len(name) <= 40 and name.isprintable() and name else "an entry"


def _record(kind: type[R], name: str, value: dict[str, Any]) -> R:
    if name not in value:
        raise ContractError(name, "is missing", "give the record; kvgate address --example shows one")
    return _from_json(kind, name, value[name])


def _from_json(kind: type[R], path: str, value: Any) -> R:
    if not isinstance(value, dict):
        raise ContractError(path, f"is {type(value).__name__}", f"must be an object of the fields of {kind.__name__}")
    try:
        return kind.from_json(value)
    except ContractError as error:
        raise error.within(path) from None


def _check_geometry(plan: PartitionPlan, representation: Representation) -> None:
    # The gateway refuses to register such a pair, so its addresses would name nothing.
    sizes = [(group.layers, group.kv_heads) for group in representation.groups]
    if sizes != [(extent.layers, extent.kv_heads) for extent in plan.extents]:
        raise ContractError("plan.extents", "differ from representation.groups in layers or heads", "give both the same groups")


def _token_digests(value: dict[str, Any], chunk_tokens: int, access: Access) -> tuple[tuple[bytes, ...], int]:
    key = _token_key(value, access)
    if ("tokens" in value) == ("token_digests" in value):
        raise ContractError("tokens", "or token_digests: exactly one must be given")
    if "token_digests" in value:
        for name in ("extras", "domain_key", "token_key"):
            if name in value:
                raise ContractError(name, "has no use with token_digests", "leave it out")
        given = _list("token_digests", value["token_digests"])
        return tuple(_hex32(f"token_digests[{index}]", item) for index, item in enumerate(given)), 0
    tokens = _tokens(_list("tokens", value["tokens"]))
    if key is None:
        raise ContractError("domain_key", "is missing", "tokens need domain_key or token_key; or give token_digests")
    full = len(tokens) // chunk_tokens
    extras = _extras(value, full)
    digests = tuple(
        token_digest(key, tokens[index * chunk_tokens : (index + 1) * chunk_tokens], extras.get(index, ()))
        for index in range(full)
    )
    return digests, len(tokens) - full * chunk_tokens


def _token_key(value: dict[str, Any], access: Access) -> bytes | None:
    if "domain_key" in value and "token_key" in value:
        raise ContractError("token_key", "is given beside domain_key", "give one of the two")
    if "token_key" in value:
        return _hex32("token_key", value["token_key"])
    if "domain_key" not in value:
        return None
    key = _hex32("domain_key", value["domain_key"])
    if domain_id(key) != access.domain:
        raise ContractError(
            "access.domain", "is not the id of the domain with this domain_key", "one of the two belongs elsewhere"
        )
    return token_key(key)


def _tokens(values: list[Any]) -> list[int]:
    for index, token in enumerate(values):
        if type(token) is not int or not 0 <= token < 2**32:
            raise ContractError(f"tokens[{index}]", "is no token id", "an integer from 0 to 2**32-1")
    return values


def _extras(value: dict[str, Any], full_chunks: int) -> dict[int, list[Extra]]:
    found: dict[int, list[Extra]] = {}
    for index, item in enumerate(_list("extras", value.get("extras", []))):
        path = f"extras[{index}]"
        if not isinstance(item, dict) or item.keys() != {"chunk", "extra"}:
            raise ContractError(path, "is not an object of chunk and extra")
        if type(item["chunk"]) is not int or not 0 <= item["chunk"] < full_chunks:
            raise ContractError(f"{path}.chunk", "is not the index of a full chunk", f"below {full_chunks}")
        found.setdefault(item["chunk"], []).append(_from_json(Extra, f"{path}.extra", item["extra"]))
    return found


def _rectangles(value: dict[str, Any], plan: PartitionPlan) -> tuple[Rectangle, ...]:
    if "rectangles" not in value:
        return plan.rectangles
    chosen = []
    for index, item in enumerate(_list("rectangles", value["rectangles"])):
        rectangle = _from_json(Rectangle, f"rectangles[{index}]", item)
        if rectangle not in plan.rectangles:
            raise ContractError(f"rectangles[{index}]", "is not a rectangle of the plan", "one of plan.rectangles")
        chosen.append(rectangle)
    return tuple(chosen)


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ContractError(name, f"is {type(value).__name__}", "must be an array")
    return value


def _hex32(name: str, value: Any) -> bytes:
    digits = "0123456789abcdef"
    if not isinstance(value, str) or len(value) != 2 * DIGEST_BYTES or not set(value) <= set(digits):
        raise ContractError(name, "is not 32 bytes in hexadecimal", "64 characters, lower case")
    if not any(bytes.fromhex(value)):
        raise ContractError(name, "is all zero", "that is what a forgotten value looks like")
    return bytes.fromhex(value)


def _table(result: dict[str, Any]) -> str:
    lines = [f"schema {result['schema']}", ""]
    lines += [f"{name:<16}{digest}" for name, digest in result["descriptor"].items()]
    lines += [f"{'root':<16}{result['root']}"]
    for chunk in result["chunks"]:
        lines += ["", f"chunk {chunk['index']}", f"  {'t':<38}{chunk['token_digest']}", f"  {'address':<38}{chunk['address']}"]
        lines += [f"  {_rectangle_name(shard):<38}{shard['address']}  {shard['payload_bytes']} B" for shard in chunk["shards"]]
    if result["tail_tokens"]:
        lines += ["", f"{result['tail_tokens']} tokens after the last full chunk have no address"]
    return "\n".join(lines)


def _rectangle_name(shard: dict[str, Any]) -> str:
    r = shard["rectangle"]
    return f"g{r['group']} layers {r['layer_start']}-{r['layer_end'] - 1} heads {r['head_start']}-{r['head_end'] - 1}"


def example() -> dict[str, Any]:
    """A complete, valid description: a small model on two workers, ten tokens in chunks of four, one image."""
    key = bytes(range(1, DIGEST_BYTES + 1))
    records: dict[str, Record] = {
        "model": _example_model(),
        "representation": Representation(
            layout="canonical",
            layout_version=1,
            chunk_tokens=4,
            codec="raw",
            k_format=ComponentFormat(dtype="bfloat16", group=None, scale_dtype=None),
            v_format=ComponentFormat(dtype="bfloat16", group=None, scale_dtype=None),
            groups=(KvGroup(layers=4, kv_heads=2, head_dim_k=64, head_dim_v=64, window=None),),
        ),
        "plan": even_plan(layers=4, kv_heads=2, pipeline=((0, 4),), tensor_parallel=2),
        "access": Access(domain=domain_id(key), salt=None, scope="prefix", scope_key=None),
        "variant": Variant(manifest=None),
    }
    image = Extra(kind="multimodal", digest=_example_digest("image"), offset_tokens=2**31 + 1, length_tokens=2)
    return {
        **{name: record.to_json() for name, record in records.items()},
        "tokens": [1, 22172, 3186, 13, 450, 4996, 17354, 1701, 29916, 432],
        "domain_key": key.hex(),
        "extras": [{"chunk": 1, "extra": image.to_json()}],
    }


def _example_model() -> ModelContract:
    settings = (("hidden_size", "256"), ("num_hidden_layers", "4"), ("num_key_value_heads", "2"))
    return ModelContract(
        base=ArtifactSet(artifacts=(Artifact(role="weights", size_bytes=29_376, digest=_example_digest("weights")),)),
        architecture=Architecture(settings=tuple(Parameter(name=name, value=text) for name, text in settings)),
        adapter=None,
        rope=Rope(kind="default", theta="10000.0", rotary_dim=64, style="neox", max_positions=2048, parameters=()),
        weight_quantization="none",
        kv_quantization=KvQuantization(cache_dtype="bfloat16", scales=None),
        multimodal=_example_digest("image preprocessing"),
        numerics=Numerics(
            attention_backend="CPU_ATTN",
            isa="avx512",
            compute_dtype="bfloat16",
            execution="eager",
            lora_max_rank=None,
            tensor_parallel=2,
            pipeline_parallel=1,
            other=(),
            engine=Engine(name="vllm", version="0.32.0", build="cpu", torch="2.12.0"),
        ),
    )


def _example_digest(text: str) -> bytes:
    digest: bytes = blake3(f"example {text}".encode()).digest()
    return digest
