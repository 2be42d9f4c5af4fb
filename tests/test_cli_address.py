"""``kvgate address``: derives what the contract says, explains itself, and names what is wrong with a description."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvgate.cli import main
from kvgate.cli.address import MAX_FILE_BYTES, derive, example, parse
from kvgate.contract.address import chunk_chain, shard_address, token_digests
from kvgate.contract.errors import ContractError
from kvgate.contract.keys import token_key
from kvgate.contract.plan import PartitionPlan

Json = dict[str, Any]


def described(**changes: Any) -> Json:
    """The example with entries replaced; one replaced by ... is left out."""
    whole = example() | changes
    return {name: value for name, value in whole.items() if value is not ...}


def written(folder: Path, value: Any) -> str:
    """A file with ``value``: bytes as they are, anything else as JSON."""
    path = folder / "request.json"
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return str(path)


def refused(value: Any) -> ContractError:
    """The error that a description ends in."""
    with pytest.raises(ContractError) as caught:
        parse(value if isinstance(value, bytes) else json.dumps(value).encode())
    return caught.value


def test_the_example_is_valid_and_complete(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What --example prints can be given back at once."""
    assert main(["address", "--example"]) == 0
    printed = capsys.readouterr().out
    assert main(["address", "--json", written(tmp_path, printed.encode())]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == derive(parse(json.dumps(example()).encode()))
    assert [len(chunk["shards"]) for chunk in found["chunks"]] == [2, 2]
    assert found["tail_tokens"] == 2


def test_addresses_are_those_of_the_contract() -> None:
    """Chain and shards as the library derives them, in order."""
    description = described(extras=...)
    found = derive(parse(json.dumps(description).encode()))
    key = token_key(bytes.fromhex(description["domain_key"]))
    tokens = token_digests(key, description["tokens"], 4)
    chain = chunk_chain(bytes.fromhex(found["root"]), tokens)
    plan = PartitionPlan.from_json(description["plan"])
    assert [chunk["token_digest"] for chunk in found["chunks"]] == [token.hex() for token in tokens]
    assert [chunk["address"] for chunk in found["chunks"]] == [address.hex() for address in chain]
    for chunk, address in zip(found["chunks"], chain, strict=True):
        assert [shard["address"] for shard in chunk["shards"]] == [shard_address(address, r).hex() for r in plan.rectangles]
        assert {shard["payload_bytes"] for shard in chunk["shards"]} == {4 * 1 * 4 * 64 * 2 * 2}


def test_the_table_shows_every_address(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Everything in the JSON form is in the table too, and the tail is mentioned."""
    assert main(["address", written(tmp_path, example())]) == 0
    table = capsys.readouterr().out
    found = derive(parse(json.dumps(example()).encode()))
    wanted = [found["root"], *found["descriptor"].values()]
    wanted += [value for chunk in found["chunks"] for value in (chunk["token_digest"], chunk["address"])]
    wanted += [shard["address"] for chunk in found["chunks"] for shard in chunk["shards"]]
    assert all(value in table for value in wanted)
    assert "2 tokens after the last full chunk have no address" in table
    assert "g0 layers 0-3 heads 1-1" in table


def test_token_digests_stand_in_for_tokens_and_need_no_key() -> None:
    """The addresses are the same, and no secret is in the file."""
    whole = derive(parse(json.dumps(example()).encode()))
    digests = [chunk["token_digest"] for chunk in whole["chunks"]]
    bare = described(tokens=..., domain_key=..., extras=..., token_digests=digests)
    assert derive(parse(json.dumps(bare).encode())) == whole | {"tail_tokens": 0}


def test_a_token_key_stands_in_for_the_domain_key() -> None:
    """The auditor of one domain's prompts needs no more."""
    key = token_key(bytes.fromhex(example()["domain_key"])).hex()
    assert derive(parse(json.dumps(described(domain_key=..., token_key=key)).encode())) == derive(
        parse(json.dumps(example()).encode())
    )


def test_chosen_rectangles_are_named_in_the_order_given() -> None:
    """Only they, by the same addresses."""
    whole = derive(parse(json.dumps(example()).encode()))
    chosen = [shard["rectangle"] for shard in reversed(whole["chunks"][0]["shards"])]
    found = derive(parse(json.dumps(described(rectangles=chosen)).encode()))
    assert [chunk["shards"] for chunk in found["chunks"]] == [chunk["shards"][::-1] for chunk in whole["chunks"]]
    assert derive(parse(json.dumps(described(rectangles=[])).encode()))["chunks"][0]["shards"] == []


def test_extras_change_their_chunk_and_what_follows() -> None:
    """And nothing before."""
    plain = derive(parse(json.dumps(described(extras=...)).encode()))
    image = derive(parse(json.dumps(example()).encode()))
    assert plain["root"] == image["root"]
    assert plain["chunks"][0] == image["chunks"][0]
    assert plain["chunks"][1]["token_digest"] != image["chunks"][1]["token_digest"]


def test_fewer_tokens_than_a_chunk_have_no_address() -> None:
    """A root, no chunk, and all of it tail."""
    found = derive(parse(json.dumps(described(tokens=[1, 2, 3], extras=[])).encode()))
    assert (found["chunks"], found["tail_tokens"]) == ([], 3)


RECTANGLE = {"group": 0, "layer_start": 0, "layer_end": 4, "head_start": 0, "head_end": 2}
EXTRA = example()["extras"][0]
REFUSED: list[tuple[Any, str, str]] = [
    (b"", "description", "not JSON at line 1"),
    (b'{"model": \n oops}', "description", "not JSON at line 2"),
    (b"\xff\xfe{}", "description", "not UTF-8"),
    (b"[]", "description", "list"),
    (b"null", "description", "NoneType"),
    (b"[" * 100_000, "description", "nested too deep"),
    (b'{"tokens": [' + b"9" * 5000 + b"]}", "description", "integer out of range"),
    (b'{"tokens": [], "tokens": []}', "tokens", "twice"),
    (b'{"access": {"salt": null, "salt": null}}', "salt", "twice"),
    ({}, "model", "missing"),
    (described(variant=...), "variant", "missing"),
    (described(variant=None), "variant", "NoneType"),
    (described(variant=[]), "variant", "list"),
    (described(plan="tp2"), "plan", "str"),
    (described(adapter_name="kjv"), "adapter_name", "unknown entry"),
    (described(**{"x" * 200: 1}), "an entry", "unknown entry"),
    (described(**{"a\nb": 1}), "an entry", "unknown entry"),
    (described(variant={"manifest": None, "name": "x"}), "variant.name", "unknown field"),
    (described(variant={}), "variant.manifest", "missing"),
    (described(variant={"manifest": "AB"}), "variant.manifest", "hexadecimal"),
    (described(access=example()["access"] | {"domain": "11" * 32}), "access.domain", "not the id"),
    (described(domain_key="11" * 32), "access.domain", "not the id"),
    (described(domain_key="11"), "domain_key", "32 bytes"),
    (described(domain_key="00" * 32), "domain_key", "all zero"),
    (described(domain_key=None), "domain_key", "32 bytes"),
    (described(domain_key="AA" * 32), "domain_key", "32 bytes"),
    (described(token_key="11" * 32), "token_key", "beside domain_key"),
    (described(domain_key=...), "domain_key", "missing"),
    (described(domain_key=..., token_key=5), "token_key", "32 bytes"),
    (described(tokens=...), "tokens", "exactly one"),
    (described(token_digests=[]), "tokens", "exactly one"),
    (described(tokens=..., token_digests=[], extras=...), "domain_key", "no use"),
    (described(tokens=..., token_digests=[], domain_key=...), "extras", "no use"),
    (described(tokens=..., token_digests=["11" * 31], domain_key=..., extras=...), "token_digests[0]", "32 bytes"),
    (described(tokens=..., token_digests="11" * 32, domain_key=..., extras=...), "token_digests", "str"),
    (described(tokens=None), "tokens", "NoneType"),
    (described(tokens="1 2 3"), "tokens", "str"),
    (described(tokens=[1, -1]), "tokens[1]", "no token id"),
    (described(tokens=[1, 2, 2**32]), "tokens[2]", "no token id"),
    (described(tokens=[1.0]), "tokens[0]", "no token id"),
    (described(tokens=[True]), "tokens[0]", "no token id"),
    (described(tokens=[None]), "tokens[0]", "no token id"),
    (described(extras={}), "extras", "dict"),
    (described(extras=[5]), "extras[0]", "not an object"),
    (described(extras=[{"chunk": 0}]), "extras[0]", "not an object"),
    (described(extras=[EXTRA | {"chunk": 2}]), "extras[0].chunk", "full chunk"),
    (described(extras=[EXTRA | {"chunk": -1}]), "extras[0].chunk", "full chunk"),
    (described(extras=[EXTRA | {"chunk": True}]), "extras[0].chunk", "full chunk"),
    (described(extras=[EXTRA | {"extra": None}]), "extras[0].extra", "NoneType"),
    (described(extras=[EXTRA | {"extra": EXTRA["extra"] | {"digest": "11"}}]), "extras[0].extra.digest", "1 bytes"),
    (described(rectangles=None), "rectangles", "NoneType"),
    (described(rectangles=[RECTANGLE]), "rectangles[0]", "not a rectangle of the plan"),
    (described(rectangles=[RECTANGLE | {"group": -1}]), "rectangles[0].group", "range"),
    (described(rectangles=[{}]), "rectangles[0].group", "missing"),
]


@pytest.mark.parametrize(
    ("value", "field", "problem"), REFUSED, ids=lambda part: str(part)[:40] if isinstance(part, str) else ""
)
def test_a_wrong_description_is_refused_by_name(value: Any, field: str, problem: str) -> None:
    """The error names the entry by its path and says what is wrong."""
    error = refused(value)
    assert error.field == field
    assert problem in error.problem


def test_a_plan_of_another_model_than_the_representation_is_refused() -> None:
    """The gateway would refuse to register such a pair, so its addresses would name nothing."""
    description = copy.deepcopy(example())
    description["representation"]["groups"][0]["layers"] = 5
    assert refused(description).field == "plan.extents"


def test_more_shards_than_anyone_reads_are_refused() -> None:
    """Chunks times rectangles is bounded."""
    plan = example()["plan"]["rectangles"]
    digests = ["11" * 32] * 1000
    many = described(tokens=..., domain_key=..., extras=..., token_digests=digests, rectangles=plan * 600)
    assert refused(many).field == "rectangles"


def test_errors_go_to_stderr_with_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Field, problem and remedy on one line; nothing on standard output."""
    assert main(["address", written(tmp_path, described(tokens=[-1]))]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "kvgate address: tokens[0]: is no token id; an integer from 0 to 2**32-1\n"


@pytest.mark.parametrize("name", ["no/such/file", "."])
def test_a_file_that_can_not_be_read_is_an_error(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No traceback."""
    assert main(["address", str(tmp_path / name)]) == 2
    assert "can't read the file" in capsys.readouterr().err


def test_without_a_file_it_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    """It does not wait for standard input."""
    assert main(["address"]) == 2
    assert "--example" in capsys.readouterr().err


def test_a_file_beyond_the_limit_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Before it is parsed; exactly the limit is read."""
    padded = json.dumps(example()).encode().ljust(MAX_FILE_BYTES)
    assert main(["address", written(tmp_path, padded)]) == 0
    assert main(["address", written(tmp_path, padded + b" ")]) == 2
    assert "too large" in capsys.readouterr().err


def test_standard_input_is_read_for_a_dash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As in `… | kvgate address -`."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(example()).encode())))
    assert main(["address", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == derive(parse(json.dumps(example()).encode()))


def test_help_teaches_the_format(capsys: pytest.CaptureFixture[str]) -> None:
    """Every entry of a description is explained."""
    with pytest.raises(SystemExit) as caught:
        main(["address", "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in example())
    assert all(name in printed for name in ("token_digests", "token_key", "rectangles", "--example", "Exit status"))


def test_no_error_repeats_a_key_or_a_digest() -> None:
    """Keys may be in the file; they are in no message."""
    secret = "5e" * 32
    for wrong in (
        described(domain_key=secret),
        described(token_key=secret),
        described(domain_key=secret + "0"),
        described(tokens=..., token_digests=[], domain_key=secret, extras=...),
    ):
        assert "5e5e" not in str(refused(wrong))


def test_the_installed_command_works() -> None:
    """As a process of its own, with its exit codes."""
    command = [sys.executable, "-c", "import sys; from kvgate.cli import main; sys.exit(main())", "address"]
    shown = subprocess.run([*command, "--example"], capture_output=True, timeout=60, check=True)
    derived = subprocess.run([*command, "-"], input=shown.stdout, capture_output=True, timeout=60, check=True)
    assert b"root" in derived.stdout
    broken = subprocess.run([*command, "-"], input=b"{", capture_output=True, timeout=60, check=False)
    assert (broken.returncode, broken.stdout) == (2, b"")
    assert b"Traceback" not in broken.stderr
