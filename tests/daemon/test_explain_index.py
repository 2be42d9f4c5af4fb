"""The explain index itself: bounded, durable, private, and no worse than empty when its file is not."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.contract.access import ORDINARY
from kvgate.daemon import explain_index
from kvgate.daemon.explain_index import MAX_MAKES, ExplainIndex
from kvgate.daemon.explain_thread import Ask, ExplainThread, Note
from kvgate.daemon.links import Links
from kvgate.daemon.reasons import ACCESS_BYTES, SET_BYTES, Make, Question, Verdict, judge
from tests.daemon import makers
from tests.daemon.wire import WAIT_S

DOMAIN = makers.name("domain")


def links(*texts: str) -> list[bytes]:
    """The links of a prompt of these chunks."""
    return Links(DOMAIN, makers.tokens(*texts)).first(len(texts))


def make(parts: str = "", access: str = "", variant: str = "") -> Make:
    """Something stored; equal texts make it equal. ``variant``: empty for ordinary KV."""
    kind = makers.name(variant) if variant else ORDINARY.digest()
    return Make(makers.name(parts) * (SET_BYTES // 32 - 1) + kind, makers.name(access)[:ACCESS_BYTES])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the index lies."""
    return tmp_path / "data" / "explain.sqlite"


def test_links_are_one_chain_however_they_come() -> None:
    """Links in one go, in parts, and by a copy are the same; each depends on domain, place and all tokens before."""
    whole = links("a", "b", "c")
    grown = Links(DOMAIN, makers.tokens("a"))
    grown.first(1)
    copy = grown.copy()
    grown.extend(makers.tokens("b", "c"))
    assert grown.first(3) == whole
    assert grown.first(2) == whole[:2]
    assert (len(grown), len(copy)) == (3, 1)
    others = [links("a", "b", "x")[2], links("x", "b", "c")[2], links("b", "c")[1], links("c")[0]]
    others.append(Links(makers.name("other domain"), makers.tokens("a", "b", "c")).first(3)[2])
    assert len({*others, *whole}) == len(others) + 3


def test_what_was_added_is_found_again(path: Path) -> None:
    """Runs, makes and exact objects come back, with and without regard to access, also after closing."""
    index = ExplainIndex(path, 100)
    chain = links("a", "b", "c")
    index.add(chain[:2], make("one", "mine"))
    index.add(chain, make("two", "theirs"))
    for _ in range(2):
        assert len(index) == 5
        assert [index.run(chain, access) for access in (None, make("", "mine").access, make("", "nobody's").access)] == [
            3,
            2,
            0,
        ]
        assert index.run(chain[2:], make("", "mine").access) == 0
        assert index.makes(chain[1], None) == [make("two", "theirs"), make("one", "mine")]
        assert index.makes(chain[1], make("", "mine").access) == [make("one", "mine")]
        assert index.holds(chain[0], make("one", "mine"))
        assert not index.holds(chain[0], make("one", "theirs"))
        assert not index.holds(chain[2], make("one", "mine"))
        index.close()
        index = ExplainIndex(path, 100)
    index.close()


def test_ordinary_and_transformed_kv_of_one_access_lie_apart(path: Path) -> None:
    """Each kind finds its own, and reads it back as it was; the operator sees both, of one scope and two variants."""
    index = ExplainIndex(path, 100)
    (link,) = links("a")
    plain, changed = make("one", "mine"), make("one", "mine", "snapkv")
    index.add([link], plain)
    index.add([link], changed)
    assert index.makes(link, plain.shelf) == [plain]
    assert index.makes(link, changed.shelf) == [changed]
    assert index.makes(link, None) == [changed, plain]
    assert plain.differing(changed) == changed.differing(plain) == ("variant",)
    assert index.holds(link, changed)
    assert not index.holds(link, make("one", "mine", "other"))
    index.close()


def test_a_variant_is_named_to_a_variant_lookup_and_never_to_an_ordinary_one(path: Path) -> None:
    """An ordinary lookup of the retained tokens is told "absent"; one of another variant "variant"; the operator always why."""
    index = ExplainIndex(path, 100)
    index.add(links("a"), make("one", "mine", "snapkv"))
    cases = [(make("one", "mine"), ("absent",)), (make("one", "mine", "other"), ("variant",))]
    for asked, told in cases:
        question = Question(Links(DOMAIN, makers.tokens("a")), 0, asked)
        assert judge(index, question, asked.shelf).reasons == told
        assert judge(index, question, None).reasons == ("variant",)
    narrow = Question(Links(DOMAIN, makers.tokens("a")), 0, make("one", "my query", "snapkv"))
    assert judge(index, narrow, narrow.make.shelf).reasons == ("absent",)
    assert judge(index, narrow, None).reasons == ("scope",)
    index.close()


def test_a_long_run_is_followed_to_its_first_gap(path: Path) -> None:
    """Runs longer than one question to the file, and gaps anywhere in them."""
    chain = links(*(f"chunk {number}" for number in range(700)))
    index = ExplainIndex(path, 10_000)
    index.add(chain[:599] + chain[600:], make())
    assert index.run(chain, None) == 599
    assert index.run(chain[600:], None) == 100
    assert index.run(chain[599:], None) == 0
    index.add([chain[599]], make("other"))
    assert index.run(chain, None) == 700
    index.close()


def test_the_oldest_go_first_and_the_beginnings_of_prompts_last(path: Path) -> None:
    """The bound holds at every moment; what was stored again is new again; of one prompt the last chunks go first."""
    index = ExplainIndex(path, 4)
    old, kept, long = links("old"), links("kept"), links("1", "2", "3")
    index.add(old, make())
    index.add(kept, make())
    index.add(old, make())
    assert len(index) == 2
    index.add(long, make())
    assert (len(index), index.run(kept, None), index.run(old, None), index.run(long, None)) == (4, 0, 1, 3)
    index.add(links("new"), make())
    index.add(links("newer"), make())
    assert (len(index), index.run(old, None), index.run(long, None)) == (4, 0, 2)
    index.add(links(*(str(number) for number in range(50, 60))), make())
    assert len(index) == 4
    index.close()


def test_entries_of_one_link_are_bounded_for_each_access_alone(path: Path) -> None:
    """The newest of one access stay; what others store under the same link pushes none of mine out."""
    index = ExplainIndex(path, 10_000)
    link = links("a")
    index.add(link, make("mine", "mine"))
    for number in range(3 * MAX_MAKES):
        index.add(link, make(f"set {number}", "theirs"))
    newest = [make(f"set {number}", "theirs") for number in reversed(range(2 * MAX_MAKES, 3 * MAX_MAKES))]
    assert index.makes(link[0], newest[0].access) == newest
    assert index.makes(link[0], make("", "mine").access) == [make("mine", "mine")]
    assert len(index) == MAX_MAKES + 1
    index.close()


def test_sets_without_entries_are_dropped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of component sets is bounded too, even where each object is of another set."""
    monkeypatch.setattr(explain_index, "MAX_SETS", 8)
    index = ExplainIndex(path, 5)
    for number in range(100):
        index.add(links(str(number)), make(f"set {number}"))
    assert len(index) <= 5
    assert index.makes(links("99")[0], None) == [make("set 99")]
    many = ExplainIndex(path.with_name("many"), 1000)
    for number in range(100):
        many.add(links(str(number)), make(f"set {number}"))
    assert many.makes(links("99")[0], None) == [make("set 99")]
    for one in (index, many):
        one.close()
    for file in (path, path.with_name("many")):
        base = sqlite3.connect(file)
        assert base.execute("SELECT count(*) FROM sets").fetchone()[0] <= 9
        base.close()


def test_many_variants_push_out_neither_ordinary_sets_nor_everything(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each manifest is a set of its own: publishing many costs the oldest variants their entries, and no engine its own."""
    monkeypatch.setattr(explain_index, "MAX_SETS", 8)
    index = ExplainIndex(path, 1000)
    engine = make("engine", "mine")
    index.add(links("mine"), engine)
    variants = [make("engine", f"nonce {number}", f"manifest {number}") for number in range(100)]
    for number, variant in enumerate(variants):
        index.add(links(str(number)), variant)
        assert index.holds(links("mine")[0], engine)
    kept = [index.holds(links(str(number))[0], variant) for number, variant in enumerate(variants)]
    assert kept == [False] * (100 - sum(kept)) + [True] * sum(kept)
    assert sum(kept) >= 3
    assert len(index) == sum(kept) + 1
    index.close()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from("abc"), min_size=1, max_size=3), st.sampled_from("12"), st.sampled_from("xy")),
        max_size=25,
    )
)
def test_count_and_answers_follow_a_model(steps: list[tuple[list[str], str, str]]) -> None:
    """Whatever is added in whatever order: the count is that of the file, and answers are those of a plain dictionary."""
    index, model = ExplainIndex(None, 1000), {}
    for at, (texts, parts, access) in enumerate(steps):
        index.add(links(*texts), make(parts, access))
        for depth in range(len(texts)):
            model[tuple(texts[: depth + 1]), parts, access] = at
    assert len(index) == len(model)
    for key in {key for key, _, _ in model}:
        chain = links(*key)
        assert index.run(chain, None) == len(key)
        mine = sorted(((at, parts) for (k, parts, access), at in model.items() if k == key and access == "x"), reverse=True)
        assert index.makes(chain[-1], make("", "x").access) == [make(parts, "x") for _, parts in mine]
    index.close()


DAMAGE: dict[str, Any] = {
    "text": lambda data: b"this is no database at all\n" * 400,
    "zeros": lambda data: bytes(len(data)),
    "page of noise": lambda data: data[:4096] + os.urandom(4096) + data[8192:],
    "truncated": lambda data: data[: len(data) // 2 + 7],
    "header only": lambda data: data[:100],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_moved_aside(path: Path, damage: str) -> None:
    """A file that is damaged in any way is kept under another name, and an empty index takes its place."""
    index = ExplainIndex(path, 1000)
    index.add(links(*(str(number) for number in range(300))), make())
    index.close()
    damaged = DAMAGE[damage](path.read_bytes())
    path.write_bytes(damaged)
    for _ in range(2):
        index = ExplainIndex(path, 1000)
        assert len(index) == 0
        index.add(links("a"), make())
        index.close()
        assert path.with_suffix(".aside").read_bytes() == damaged
        path.write_bytes(damaged)


@pytest.mark.parametrize("statement", ["PRAGMA user_version = 2", "PRAGMA application_id = 7", "DROP TABLE sets"])
def test_file_of_another_version_or_program_is_moved_aside(path: Path, statement: str) -> None:
    """A later build's file, or another program's, is not written to."""
    ExplainIndex(path, 10).close()
    base = sqlite3.connect(path)
    base.execute(statement)
    base.commit()
    base.close()
    index = ExplainIndex(path, 10)
    index.add(links("a"), make())
    index.close()
    assert path.with_suffix(".aside").exists()


def test_damage_while_running_starts_afresh(path: Path) -> None:
    """A file that is damaged under a running gateway costs the answers of the moment, and nothing after it."""
    lost: list[tuple[str, int]] = []
    thread = ExplainThread(path, 1000, lambda what, count: lost.append((what, count)))
    thread.start()
    chain = [f"chunk {number}" for number in range(500)]
    assert thread.take(Note(tuple(links(*chain)), make("one")))
    assert ask(thread, chain).reasons == ("evicted",)
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))
    Path(f"{path}-wal").write_bytes(b"")
    for _ in range(20):
        thread.take(Note(tuple(links(*chain)), make("one")))
        ask(thread, ["x"])
    assert ask(thread, chain).reasons == ("evicted",)
    thread.close(WAIT_S)


def ask(thread: ExplainThread, texts: list[str], stored: Make | None = None) -> Verdict:
    """The client's verdict on a miss of the first of these chunks."""
    found: list[Verdict] = []
    answered = threading.Event()
    question = Question(Links(DOMAIN, makers.tokens(*texts)), 0, stored or make("one"))
    assert thread.take(Ask(question, found.append, lambda _seen: answered.set()))
    assert answered.wait(WAIT_S)
    return found[0]


def test_full_queue_drops_and_counts(path: Path) -> None:
    """What does not fit is dropped and counted at once; what fitted is worked off, in order, before the end."""
    lost: list[tuple[str, int]] = []
    thread = ExplainThread(path, 1000, lambda what, count: lost.append((what, count)), max_queue=2)
    assert [thread.take(Note(tuple(links(str(number))), make())) for number in range(4)] == [True, True, False, False]
    assert lost == [("note", 1), ("note", 1)]
    answers: list[Verdict] = []
    assert not thread.take(Ask(Question(Links(DOMAIN, b""), 0, make()), answers.append, answers.append))
    assert lost[2:] == [("question", 1)]
    thread.start()
    thread.close(WAIT_S)
    assert not thread.take(Note(tuple(links("late")), make()))
    index = ExplainIndex(path, 1000)
    assert [index.run(links(text), None) for text in ("0", "1", "2", "late")] == [1, 1, 0, 0]
    index.close()
    assert answers == []


def test_unusable_place_is_no_failure(path: Path) -> None:
    """Where no file can be made, misses are explained from memory."""
    path.parent.mkdir()
    path.symlink_to(path.parent / "elsewhere")
    thread = ExplainThread(path, 1000, lambda _what, _count: None)
    thread.start()
    thread.take(Note(tuple(links("a")), make("one")))
    assert ask(thread, ["a"]).reasons == ("evicted",)
    thread.close(WAIT_S)
    assert not (path.parent / "elsewhere").exists()


def test_components_are_named_in_the_tables_order() -> None:
    """What differs in everything names everything, scope last."""
    strangers = make("x", "x").differing(make("y", "y", "snapkv"))
    assert strangers[-2:] == ("variant", "scope")
    assert len(strangers) == 10
