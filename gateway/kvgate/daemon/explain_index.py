"""The explain index: link of the explain chain → what was stored under it. SQLite in the data directory, one thread.

It holds digests only: no token, salt or name can be read out of it. It is bounded, and it may be lost: then misses are "absent" until
their prompts are stored again.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from kvgate.contract.digests import DIGEST_BYTES
from kvgate.daemon.reasons import ACCESS_BYTES, ORDINARY_PART, SET_BYTES, VARIANT_AT, Make

log = structlog.get_logger(__name__)

SCHEMA_VERSION: Final = 1
APPLICATION_ID: Final = 0x6B766778  # "kvgx"
LINK_BYTES: Final = 16
"""Half of a link's digest: as with access, a collision would give a wrong name, nothing more."""
MAX_MAKES: Final = 16
"""Entries of one link and one access: the newest stay."""
MAX_READ: Final = 64
MAX_SETS: Final = 16_384
BUSY_S: Final = 5.0
_ASKED: Final = 256

_TABLES: Final = f"""
CREATE TABLE sets (id INTEGER PRIMARY KEY, parts BLOB NOT NULL UNIQUE CHECK (length(parts) = {SET_BYTES}));
CREATE TABLE entries (
    age INTEGER PRIMARY KEY AUTOINCREMENT,
    link BLOB NOT NULL CHECK (length(link) = {LINK_BYTES}),
    access BLOB NOT NULL CHECK (length(access) = {ACCESS_BYTES}),
    parts INTEGER NOT NULL,
    UNIQUE (link, access, parts)
);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
_COLUMNS: Final = [("age", "link", "access", "parts"), ("id", "parts")]
_TRIM_LINK: Final = f"""
DELETE FROM entries WHERE age IN
    (SELECT age FROM entries WHERE link = ? AND access = ? ORDER BY age DESC LIMIT -1 OFFSET {MAX_MAKES})
"""
_DROP_UNNAMED: Final = "DELETE FROM sets WHERE id NOT IN (SELECT parts FROM entries)"
_TRIM_SETS: Final = f"""
DELETE FROM entries WHERE parts NOT IN
    (SELECT sets.id FROM sets JOIN entries ON entries.parts = sets.id GROUP BY sets.id
     ORDER BY substr(sets.parts, {VARIANT_AT + 1}, {DIGEST_BYTES}) = ? DESC, max(entries.age) DESC LIMIT ?)
"""


class UnusableFile(Exception):
    """The file is none of ours, of another schema version, or damaged; the message is the word for the log."""


class ExplainIndex:
    """Used by one thread only. ``add`` becomes durable with ``commit``; questions see what was added at once."""

    def __init__(self, path: Path | None, max_entries: int) -> None:
        """Open or make the file (None: in memory); what can't be used is moved aside. Raises ``sqlite3.Error`` or ``OSError``."""
        self._path = path
        self._max_entries = max_entries
        self._sets: dict[bytes, int] = {}
        try:
            self._base = _open(path)
        except (UnusableFile, sqlite3.DatabaseError) as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            self._move_aside(str(error) if isinstance(error, UnusableFile) else type(error).__name__)
            self._base = _open(path)
        self._count = self._number("SELECT count(*) FROM entries")

    def __len__(self) -> int:
        return self._count

    def add(self, links: Sequence[bytes], make: Make) -> None:
        """Note that ``make`` is stored under ``links``; what is there already becomes the newest again."""
        number = self._set_number(make.parts)
        # The first chunks of a prompt last: they must not be the first that age pushes out.
        rows = [(link[:LINK_BYTES], make.shelf, number) for link in reversed(links)]
        before = self._base.total_changes
        self._base.executemany("DELETE FROM entries WHERE link = ? AND access = ? AND parts = ?", rows)
        replaced = self._base.total_changes - before
        self._base.executemany("INSERT INTO entries (link, access, parts) VALUES (?, ?, ?)", rows)
        before = self._base.total_changes
        self._base.executemany(_TRIM_LINK, [row[:2] for row in rows])
        self._count += len(rows) - replaced - (self._base.total_changes - before)
        if self._count > self._max_entries:
            self._trim()

    def remove(self, links: Sequence[bytes]) -> None:
        """Forget everything under ``links``."""
        before = self._base.total_changes
        self._base.executemany("DELETE FROM entries WHERE link = ?", [(link[:LINK_BYTES],) for link in links])
        self._count -= self._base.total_changes - before

    def commit(self) -> None:
        """Make everything added so far survive the process."""
        self._base.commit()

    def roll_back(self) -> None:
        """Forget what was added since the last commit."""
        self._base.rollback()
        self._sets.clear()
        self._count = self._number("SELECT count(*) FROM entries")

    def start_afresh(self, why: str) -> None:
        """The file turned out to be damaged: move it aside and begin an empty one."""
        self._base.close()
        self._sets.clear()
        self._move_aside(why)
        self._base = _open(self._path)
        self._count = 0

    def close(self) -> None:
        """Commit and close."""
        self._base.commit()
        self._base.close()

    def holds(self, link: bytes, make: Make) -> bool:
        """Whether exactly this was stored under ``link`` once."""
        found = self._base.execute(
            "SELECT 1 FROM entries JOIN sets ON sets.id = entries.parts WHERE link = ? AND access = ? AND sets.parts = ?",
            (link[:LINK_BYTES], make.shelf, make.parts),
        )
        return found.fetchone() is not None

    def run(self, links: Sequence[bytes], access: bytes | None) -> int:
        """How many of ``links``, from the first on without a gap, anything (of ``access``) is known under."""
        for at in range(0, len(links), _ASKED):
            asked = [link[:LINK_BYTES] for link in links[at : at + _ASKED]]
            marks = ", ".join("?" * len(asked))
            condition, values = (" AND access = ?", [access]) if access is not None else ("", [])
            rows = self._base.execute(f"SELECT DISTINCT link FROM entries WHERE link IN ({marks}){condition}", asked + values)
            known = {row[0] for row in rows}
            gap = next((index for index, link in enumerate(asked) if link not in known), None)
            if gap is not None:
                return at + gap
        return len(links)

    def makes(self, link: bytes, access: bytes | None) -> list[Make]:
        """What was stored under ``link`` (with ``access``), the newest first, at most ``MAX_READ``."""
        condition, values = (" AND access = ?", [access]) if access is not None else ("", [])
        rows = self._base.execute(
            "SELECT sets.parts, access FROM entries JOIN sets ON sets.id = entries.parts"
            f" WHERE link = ?{condition} ORDER BY age DESC LIMIT {MAX_READ}",
            [link[:LINK_BYTES], *values],
        )
        return [Make.on(shelf, parts) for parts, shelf in rows]

    def _set_number(self, parts: bytes) -> int:
        number = self._sets.get(parts)
        if number is None:
            if len(self._sets) >= MAX_SETS:
                self._trim_sets()
            self._base.execute("INSERT OR IGNORE INTO sets (parts) VALUES (?)", (parts,))
            number = self._sets[parts] = self._number("SELECT id FROM sets WHERE parts = ?", parts)
        return number

    def _trim(self) -> None:
        """Drop the oldest, some more than need be, so that this is not done for each further entry."""
        drop = self._count - self._max_entries + self._max_entries // 100
        before = self._base.total_changes
        self._base.execute("DELETE FROM entries WHERE age IN (SELECT age FROM entries ORDER BY age LIMIT ?)", (drop,))
        self._count -= self._base.total_changes - before

    def _trim_sets(self) -> None:
        """Drop sets that no entry names, then the oldest with their entries, to half: of variants first.

        Each manifest is a set of its own, so whoever publishes many brings many: that must cost neither others nor ordinary KV theirs.
        """
        self._sets.clear()
        self._base.execute(_DROP_UNNAMED)
        if self._number("SELECT count(*) FROM sets") <= MAX_SETS // 2:
            return
        before = self._base.total_changes
        self._base.execute(_TRIM_SETS, (ORDINARY_PART, MAX_SETS // 2))
        self._count -= self._base.total_changes - before
        self._base.execute(_DROP_UNNAMED)

    def _number(self, question: str, *values: bytes) -> int:
        return int(self._base.execute(question, values).fetchone()[0])

    def _move_aside(self, why: str) -> None:
        if self._path is None:
            return
        aside = self._path.with_suffix(".aside")
        log.warning("explain.started_afresh", reason=why, old_file=aside.name)
        self._path.replace(aside)  # the one moved aside before it is lost: there is at most one
        for ending in ("-wal", "-shm"):
            Path(f"{self._path}{ending}").unlink(missing_ok=True)


def _open(path: Path | None) -> sqlite3.Connection:
    fresh = path is None or _make_private(path)
    base = sqlite3.connect(path or ":memory:", timeout=BUSY_S)
    try:
        base.execute("PRAGMA journal_mode = WAL")
        base.execute("PRAGMA synchronous = NORMAL")
        base.execute("PRAGMA journal_size_limit = 8388608")
        base.execute("PRAGMA cache_size = -16384")  # KiB
        if fresh:
            base.executescript(_TABLES)
        _check(base)
    except BaseException:
        base.close()
        raise
    return base


def _make_private(path: Path) -> bool:
    """Make the file before SQLite would, with mode 0600, which its companions take over; True where it was not there or empty."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        return os.fstat(descriptor).st_size == 0
    finally:
        os.close(descriptor)


def _check(base: sqlite3.Connection) -> None:
    def pragma(name: str) -> object:
        return base.execute(f"PRAGMA {name}").fetchone()[0]

    if pragma("application_id") != APPLICATION_ID:
        raise UnusableFile("not an explain index")
    if pragma("user_version") != SCHEMA_VERSION:
        raise UnusableFile("another schema version")
    columns = [tuple(row[1] for row in base.execute(f"PRAGMA table_info({table})")) for table in ("entries", "sets")]
    if columns != _COLUMNS or pragma("quick_check(1)") != "ok":
        raise UnusableFile("damaged")
