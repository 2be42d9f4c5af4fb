"""Break the contract and the protocol on purpose, one way at a time, and see that a test fails each time.

    python tests/mutation/contract.py [PART OF A NAME]

Works on a copy of the package; the tests of the repository run against the copy. Exit status 1 names the changes that no test noticed,
and 2 a change that no longer applies. Takes half an hour or more: run it when the contract or its tests change.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gateway" / "kvgate"
# Those that notice most come first.
TESTS = ("tests/contract/test_golden.py", "tests/contract", "tests/protocol", "tests/test_cli_address.py")
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replace ``old``, which is there exactly once, by ``new``."""

    file: str
    old: str
    new: str

    @property
    def name(self) -> str:
        """For output and selection."""
        return f"{self.file}: {' '.join(self.old.split())[:60]} → {' '.join(self.new.split())[:60] or 'nothing'}"


def _of(file: str, *pairs: tuple[str, str]) -> list[Mutation]:
    return [Mutation(file, old, new) for old, new in pairs]


MUTATIONS: list[Mutation] = [
    *_of(
        "contract/address.py",
        ('struct.Struct("<32sQ32s")', 'struct.Struct(">32sQ32s")'),
        ("_CHUNK.pack(parent, index, token)", "_CHUNK.pack(parent, 0, token)"),
        ("_CHUNK.pack(parent, index, token)", "_CHUNK.pack(token, index, parent)"),
        ("_CHUNK.pack(parent, index, token)", "_CHUNK.pack(bytes(32), index, token)"),
        ("digest(Kind.CHUNK, packed)", "digest(Kind.SHARD, packed)"),
        ("r.head_start, r.head_end))", "r.head_start, 0))"),
        ("r.head_start, r.head_end))", "r.head_end, r.head_start))"),
        ("chunk, r.group, r.layer_start", "chunk, 0, r.layer_start"),
        ("r.layer_start, r.layer_end, r", "r.layer_start, r.layers, r"),
        ("token_bytes(tokens) + tail", "token_bytes(tokens[:-1]) + tail"),
        ("token_bytes(tokens) + tail", "token_bytes(tokens)"),
        ('struct.pack("<I", len(tokens)) + token', "token"),
        ("keyed(token_key, head + packed[at : at + step]", "digest(Kind.TOKEN_KEY, head + packed[at : at + step]"),
        ("keyed(token_key, struct.pack", "keyed(bytes(32), struct.pack"),
        ("e.offset_tokens, e.kind, e.digest, e.length_tokens", "e.offset_tokens, e.kind, e.digest"),
        ("key=lambda e: (e.offset_tokens", "key=lambda e: (-e.offset_tokens"),
        ("tokens[start_chunk * chunk_tokens :] if start_chunk else tokens", "tokens"),
        ("len(packed) - step + 1, step", "len(packed), step"),
        ("if isinstance(tokens, bytes | bytearray):", "if False:"),
        ("if len(chunk) != DIGEST_BYTES:", "if len(chunk) > DIGEST_BYTES:"),
        ("parent = chunk_address(parent, index, token)\n", "parent = chunk_address(parent, index - index, token)\n"),
        ("if start_chunk < 0:", "if start_chunk < -9:"),
    ),
    *_of(
        "contract/record.py",
        ("for name, spec in self._specs}\n\n    def encode", "for name, spec in self._specs[:-1]}\n\n    def encode"),
        ("            if key not in cls._names:", "            if False:"),
        ("            if name not in value:", "            if False:"),
        ("                object.__setattr__(self, name, kept)", "                pass"),
        ("sorted((specs.text_bytes(name), name, spec.encode)", "sorted((name.encode(), name, spec.encode)"),
        (
            "sorted((specs.text_bytes(name), name, spec.encode) for name, spec in listed)",
            "((specs.text_bytes(name), name, spec.encode) for name, spec in listed)",
        ),
        ("self._encoders:\n", "self._encoders[1:]:\n"),
        ("if len(encoded) <= MAX_VALUES else", "if True else"),
        ("value.keys() == cls._names", "value.keys() >= cls._names"),
        ("        self.validate()\n", ""),
        ("dataclass(frozen=True, slots=True, kw_only=True)", "dataclass(slots=True, kw_only=True, unsafe_hash=True)"),
        ("return digest(self.KIND, self.encode(), schema)", "return digest(Kind.MODEL, self.encode(), schema)"),
        ("if not isinstance(value, Mapping):", "if False:"),
    ),
    *_of(
        "contract/specs.py",
        ("        frozen = bytes(value)\n", "        frozen = value\n"),
        ("        if not any(frozen):", "        if False:"),
        ("        check_text(value, name)\n", ""),
        ("if compiled and not compiled.fullmatch(value)", "if compiled and not compiled.match(value)"),
        ("if not minimum <= value <= maximum:", "if not minimum <= value:"),
        (
            '        if not value:\n            raise ContractError(name, "is empty"',
            '        if False:\n            raise ContractError(name, "is empty"',
        ),
        ("if len(value) > max_chars:", "if False:"),
        ("if type(value) is not int:", "if not isinstance(value, int):"),
        ("if exact is not None and len(frozen) != exact:", "if False:"),
        ("return body if single else", "return body if True else"),
        ("tags[type(value)] + value.encode_unbounded()", "value.encode_unbounded()"),
        ("    if argument < 24:\n", "    if argument <= 24:\n"),
        ('(1 << 8, struct.Struct(">BB"), 24)', '(1 << 7, struct.Struct(">BB"), 24)'),
        ("_NULL if value is None else spec.encode(value)", "_NULL if not value else spec.encode(value)"),
        ("lambda value: _TRUE if value else _FALSE", "lambda value: _TRUE"),
        ("lambda value: head(BYTES, len(value)) + value", "lambda value: head(TEXT, len(value)) + value"),
        ("[head(ARRAY, len(value)), *map(spec.encode, value)]", "[head(ARRAY, len(value)), *map(spec.encode, value[::-1])]"),
        (
            'tagged = isinstance(value, dict) and set(value) == {"is", "value"} and type(value["is"]) is str',
            'tagged = isinstance(value, dict) and set(value) == {"is", "value"}',
        ),
        ("if type(value) not in kinds:", "if not isinstance(value, kinds):"),
        ("if not minimum <= len(value) <= maximum:", "if len(value) > maximum:"),
        ("            raise error.within(name) from None", "            raise"),
        (
            'if isinstance(key, str) and re.fullmatch(r"[a-z0-9_]{1,40}", key) else "field"',
            'if isinstance(key, str) else "field"',
        ),
        ("len(frozen) > max_bytes or len(frozen) % multiple", "len(frozen) > max_bytes"),
        ('r"(?:[0-9a-f]{2})*"', 'r"(?:[0-9a-fA-F]{2})*"'),
        ("if type(value) is not str or value not in options:", "if type(value) is not str:"),
    ),
    *_of(
        "contract/encoding.py",
        ("canonical=True", "canonical=False"),
        ('    if not unicodedata.is_normalized("NFC", text):', "    if False:"),
        ("if not INT_MIN <= value <= INT_MAX:", "if not -(2**64) <= value <= INT_MAX:"),
        ("if type(key) is not str:", "if False:"),
        ("elif depth >= MAX_DEPTH:", "elif depth > MAX_DEPTH:"),
        ("        check_text(key, path)\n", ""),
        ("return 1 + len(value) + sum", "return 1 + sum"),
        ("elif kind is bytes:", "elif kind in (bytes, bytearray):"),
    ),
    *_of(
        "contract/decoding.py",
        ("        if argument < shortest:", "        if False:"),
        ("if reader.position != len(data):", "if False:"),
        ("            if encoded <= previous:", "            if encoded < previous:"),
        ("            if encoded <= previous:", "            if encoded == previous:"),
        ("            if encoded <= previous:", "            if encoded[1:] <= previous[1:]:"),
        ("            previous = encoded\n", ""),
        ("        if value < INT_MIN:", "        if False:"),
        ("if not text.isascii() and not unicodedata", "if text.isascii() and not unicodedata"),
        ("        if depth >= MAX_DEPTH:", "        if depth > MAX_DEPTH:"),
        ("if count * values_each > self.end - self.position:", "if False:"),
        ("        if self.values > MAX_VALUES:", "        if False:"),
        ("self._check_count(count, 2)", "self._check_count(count, 1)"),
        ("    if len(data) > max_bytes:", "    if False:"),
        ("            if stop > self.end:", "            if False:"),
        ("        stop = begin + count\n", "        stop = min(begin + count, self.end)\n"),
        ("26: (4, 1 << 16)", "26: (4, 1 << 8)"),
        ("27: (8, 1 << 32)", "27: (8, 1 << 31)"),
        ("24: (1, 24)", "24: (1, 23)"),
        ("_Reader(bytes(data))", "_Reader(data)"),
        ("if initial in (_FALSE, _TRUE, _NULL)", "if 0xF4 <= initial <= 0xF7"),
        ('decode("utf-8")', 'decode("utf-8", "surrogatepass")'),
        ("begin + length < self.end", "begin + length <= self.end"),
        ("        if major != _TEXT:", "        if False:"),
        ("return _text(encoded[1:])", "return encoded[1:].decode()"),
        ("for length in range(24)}", "for length in range(25)}"),
    ),
    *_of(
        "contract/digests.py",
        ("contract v{schema} {kind.value}", "contract v1 {kind.value}"),
        ("contract v{schema} {kind.value}", "contract v{schema}"),
        ("2026-11-30", "2026-12-01"),
        ('SALT_KEY = "salt key"', 'SALT_KEY = "token key"'),
        ("blake3(data, key=key).digest()", "blake3(key + data).digest()"),
        ("_hasher(kind, schema).copy()", "_hasher(kind, schema)"),
        ("SCHEMA: Final = 1\n", "SCHEMA: Final = 2\n"),
    ),
    *_of(
        "contract/keys.py",
        ('keyed(digest(Kind.DOMAIN_KEY, _key("secret", secret)), _name', "digest(Kind.DOMAIN_KEY, _name"),
        ('data = name.encode("utf-8")', 'data = __import__("unicodedata").normalize("NFC", name).encode("utf-8")'),
        ("    if not name:\n", "    if False:\n"),
        ("    if len(key) != DIGEST_BYTES:", "    if len(key) > DIGEST_BYTES:"),
        ("None if salt is None else", "None if not salt else"),
        ("    if len(data) > MAX_NAME_BYTES:", "    if len(name) > MAX_NAME_BYTES:"),
    ),
    *_of(
        "contract/artifacts.py",
        ('object.__setattr__(self, "artifacts", tuple(ordered))', "pass"),
        ("key=lambda a: (a.role, a.digest, a.size_bytes)", "key=lambda a: a.digest"),
        ("tuple(ordered)", "tuple(dict.fromkeys(ordered))"),
        ("if sizes.setdefault(item.digest, item.size_bytes) != item.size_bytes:", "if False:"),
    ),
    *_of(
        "contract/model.py",
        ('for name in ("engine",) if split', 'for name in ("other",) if split'),
        ('("engine", "tensor_parallel", "pipeline_parallel"):', '("engine", "tensor_parallel"):'),
        ("if names != sorted(set(names)):", "if names != sorted(names):"),
        ("if names != sorted(set(names)):", "if len(names) != len(set(names)):"),
        ("        if repr(number) != self.theta:", "        if False:"),
        ('r"-?[0-9]+(?:\\.[0-9]+)?(?:e[+-]?[0-9]+)?"', 'r"-?\\d+(?:\\.\\d+)?(?:e[+-]?\\d+)?"'),
        ('if not self.base.roles()["weights"]:', "if False:"),
        ("and self.numerics.lora_max_rank is None:", "and False:"),
        ('if not self.adapter.roles()["adapter_weights"]:', "if False:"),
        ('if not all(role.startswith("adapter_") for role in self.adapter.roles()):', "if False:"),
        ('if any(role.startswith("adapter_") for role in self.base.roles()):', "if False:"),
        ('        require_sorted(self.other, "other")\n', ""),
    ),
    *_of(
        "contract/plan.py",
        ("        if order != sorted(order):", "        if False:"),
        ("if any(rectangle.overlaps(other) for other in self.rectangles[:index]):", "if False:"),
        ("if cells[group] != extent.layers * extent.kv_heads:", "if False:"),
        (
            "if rectangle.layer_end > extent.layers or rectangle.head_end > extent.kv_heads:",
            "if rectangle.layer_end > extent.layers:",
        ),
        ("if holders[rectangle] != self.replication:", "if holders[rectangle] > self.replication:"),
        ("            if key in seen:", "            if False:"),
        ("if len({key[:2] for key in seen}) != self.pipeline_parallel * self.tensor_parallel:", "if False:"),
        (
            "if place.pp_rank >= self.pipeline_parallel or place.tp_rank >= self.tensor_parallel:",
            "if place.tp_rank >= self.tensor_parallel:",
        ),
        ("        if [(p.pp_rank, p.tp_rank, p.rectangle) for p in self.places] != sorted(", "        if [] != sorted(() and "),
        ("            and self.head_start < other.head_end\n", "            and self.head_start <= other.head_end\n"),
        ("tp // replication)", "tp % splits)"),
        ("        if self.head_start >= self.head_end:", "        if self.head_start > self.head_end:"),
        ("        if value < 1:\n", "        if value < -9:\n"),
        ("    if len(pipeline) * tensor_parallel > MAX_WORKERS:", "    if False:"),
    ),
    *_of(
        "contract/representation.py",
        (
            "if rectangle.layer_end > group.layers or rectangle.head_end > group.kv_heads:",
            "if rectangle.layer_end > group.layers:",
        ),
        (
            'for name in ("codec", "k_format", "v_format"):\n            del',
            'for name in ("codec", "k_format"):\n            del',
        ),
        (
            'encode({name: value[name] for name in ("codec", "k_format", "v_format")})',
            'encode({name: value[name] for name in ("codec", "v_format")})',
        ),
        ("groups = -(-head_dim // self.group)", "groups = head_dim // self.group"),
        ('if self.codec == "raw" and quantised:', "if False:"),
        ("if DTYPE_BYTES[self.k_format.dtype] != 2:", "if False:"),
        ("            if group.head_dim_v == 0:", "            if False:"),
        ("        if (self.group is None) != (self.scale_dtype is None):", "        if False:"),
    ),
    *_of(
        "contract/access.py",
        ("        if narrow and self.scope_key is None:", "        if False:"),
        ("        if not narrow and self.scope_key is not None:", "        if False:"),
    ),
    *_of(
        "contract/manifest.py",
        ("encode([last, source_tokens, tail])", "encode([last, source_tokens])"),
        ("encode([last, source_tokens, tail])", "encode([last, tail])"),
        ("encode([last, source_tokens, tail])", "encode([source_tokens, tail])"),
        ("digest(Kind.QUERY, token_digest(token_key, tokens))", "token_digest(token_key, tokens)"),
        ("if any(a >= b for a, b in pairwise(row)):", "if any(a > b for a, b in pairwise(row)):"),
        ("_SHAPE.pack(layers, heads, tokens) + b", "_SHAPE.pack(0, 0, 0) + b"),
        ("parts = [_SHAPE.pack(*shape)]", "parts = []"),
        ('[_positions("position_map", old_row), ', "["),
        (', _positions("position_map", new_row)]', "]"),
        ('if _shape("position_map", new) != shape:', "if False:"),
        ("if any(position >= MAX_POSITIONS for position in row):", "if False:"),
        ("if len(heads) != 1 or len(tokens) != 1:", "if False:"),
        ("if self.retained.tokens > self.source_tokens:", "if False:"),
        ('if self.algorithm == LEGACY and self.scope != "request":', "if False:"),
        ('if self.scope == "query" and self.query is None:', "if False:"),
        ('if self.scope in ("prefix", "global") and self.query', 'if self.scope == "global" and self.query'),
        ('if self.scope in ("prefix", "global") and self.query', 'if self.scope == "prefix" and self.query'),
        ('if self.per == "model" and self.layers != 1:', "if False:"),
        ('if self.per != "head" and self.heads != 1:', "if False:"),
        ('        require_sorted(self.parameters, "parameters")\n', ""),
    ),
    *_of(
        "contract/capability.py",
        ("return compare_digest(data[_BODY.size :], keyed(key, data[: _BODY.size]))", "return True"),
        ("keyed(key, data[: _BODY.size]))", "keyed(key, data[: _BODY.size - 32] + bytes(32)))"),
        ("return keyed(deployment_key, domain)", "return deployment_key"),
        ("if form != FORMAT or scope >= len(SCOPES) or not chunks:", "if scope >= len(SCOPES):"),
        ("if len(data) != CAPABILITY_BYTES:", "if len(data) < CAPABILITY_BYTES:"),
        ('struct.Struct("<BBIQ32s32s32s32s")', 'struct.Struct(">BBIQ32s32s32s32s")'),
        ("            self.root,\n            self.end,", "            self.end,\n            self.root,"),
    ),
    *_of(
        "contract/errors.py",
        ('f"{parent}{self.field}" if self.field.startswith("[") else', ""),
    ),
    *_of(
        "protocol/framing.py",
        ('struct.Struct("<I")', 'struct.Struct(">I")'),
        ("if not 0 < length <= MAX_FRAME_BYTES:", "if length > MAX_FRAME_BYTES:"),
        ("if len(payload) > MAX_FRAME_BYTES:", "if False:"),
        ("decode(payload, MAX_FRAME_BYTES)", "decode(payload, 1 << 30)"),
        ("value.keys() != _KEYS", "not value.keys() >= _KEYS"),
        ('type(value["id"]) is not int', 'not isinstance(value["id"], int)'),
        ('or type(value["type"]) is not str', ""),
        ("        if kind is None:", "        if False:"),
    ),
    *_of(
        "protocol/versions.py",
        ("min(ours.highest, theirs.highest)", "ours.highest"),
        ("min(ours.highest, theirs.highest)", "theirs.highest"),
        ("max(ours.lowest, theirs.lowest)", "ours.lowest"),
        ("peer speaks {theirs}", "peer speaks another"),
        ("versions.stop - 1", "versions.stop"),
    ),
    *_of(
        "protocol/messages.py",
        ("    Release: Done,\n", ""),
        (
            "tokens: bytes = specs.raw_bytes(max_bytes=_LIST_BYTES, multiple=DIGEST_BYTES)\n\n\n@frozen\nclass Bound",
            "tokens: bytes = specs.raw_bytes(max_bytes=_LIST_BYTES)\n\n\n@frozen\nclass Bound",
        ),
        ("MAX_CHUNKS: Final = 16_384", "MAX_CHUNKS: Final = 65_536"),
    ),
    *_of(
        "contract/table.py",
        ('    ("model.rope.theta", "rope", "base of the rotation, as exact text"),\n', ""),
        ('("model.multimodal", "base"', '("model.multimodal", "rope"'),
        ('    Excluded("request id", ("request_id", "req_id"), "two requests with one prefix are meant to share"),\n', ""),
    ),
    *_of(
        "cli/address.py",
        (
            "        if name in value:\n            raise ContractError(_shown(name)",
            "        if False:\n            raise ContractError(_shown(name)",
        ),
        ("    if domain_id(key) != access.domain:", "    if False:"),
        ("    if sizes != [", "    if False and sizes != ["),
        ("        if rectangle not in plan.rectangles:", "        if False:"),
        ("extras.get(index, ())", "()"),
        ("    if len(data) > MAX_FILE_BYTES:", "    if False:"),
    ),
]


def check(mutation: Mutation) -> str:
    """ "noticed", or what else happened."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "kvgate"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        target = copy / mutation.file
        source = target.read_text()
        if source.count(mutation.old) != 1:
            return f"does not apply: {source.count(mutation.old)} places"
        target.write_text(source.replace(mutation.old, mutation.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS]
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return "noticed"
        # 1: a test failed; 2: a test module could not even be imported. Anything else says nothing about the change.
        return {0: "NOT NOTICED", 1: "noticed", 2: "noticed"}.get(done.returncode, f"not tried: exit code {done.returncode}")


def main() -> int:
    """Try all, or those whose name holds the argument."""
    chosen = [one for one in MUTATIONS if not sys.argv[1:] or sys.argv[1] in one.name]
    unchanged = Mutation("contract/errors.py", "class ContractError", "class ContractError")
    if check(unchanged) != "NOT NOTICED":
        print("the tests fail without any change: nothing can be learnt")
        return 2
    results = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, (mutation, result) in enumerate(zip(chosen, pool.map(check, chosen), strict=True), 1):
            results.append(result)
            print(f"{number}/{len(chosen)} {result}: {mutation.name}", flush=True)
    print(f"{results.count('noticed')} of {len(results)} changes noticed")
    if any(result.startswith("does not apply") for result in results):
        return 2
    return 1 if any(result != "noticed" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
