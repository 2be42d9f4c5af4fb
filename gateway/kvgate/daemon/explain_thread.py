"""The one thread that reads and writes the explain index, behind a bounded queue: nobody ever waits for it to take something."""

from __future__ import annotations

import queue
import random
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from kvgate.daemon.explain_index import ExplainIndex
from kvgate.daemon.reasons import UNEXPLAINED, Make, Question, Verdict, judge

log = structlog.get_logger(__name__)

MAX_QUEUE: Final = 4096
BATCH_ITEMS: Final = 256
"""Items between two commits, unless the queue runs empty first: this many are lost at worst by a kill -9."""
IDLE_S: Final = 1.0
GATHER_S: Final = (0.005, 0.025)
"""Shortest and longest wait, by chance, between the first item of a batch and the work: it then falls on whoever asks next, and not on
the request that caused it, whose next answers would tell by their time what the operator's verdict found."""


@dataclass(frozen=True, slots=True)
class Note:
    """``make`` was stored under ``links``."""

    links: tuple[bytes, ...]
    make: Make


@dataclass(frozen=True, slots=True)
class Drop:
    """Whatever was stored under ``links`` is gone, and meant to be."""

    links: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """A miss to explain. ``told`` gets what the requester may know, ``seen`` what the operator may; both on this thread."""

    question: Question
    told: Callable[[Verdict], None]
    seen: Callable[[Verdict], None]


Item = Note | Drop | Ask


class ExplainThread:
    """Takes notes and questions, in order. ``lost(what)`` is called, on any thread, for what was dropped or failed."""

    def __init__(self, path: Path, max_entries: int, lost: Callable[[str, int], None], *, max_queue: int = MAX_QUEUE) -> None:
        self._path = path
        self._max_entries = max_entries
        self._lost = lost
        self._queue: queue.Queue[Item] = queue.Queue(max_queue)
        self._stopping = threading.Event()
        self._entries = 0
        self._thread = threading.Thread(target=self._run, name="kvgate-explain", daemon=True)

    @property
    def entries(self) -> int:
        """Entries in the index, as of the last batch."""
        return self._entries

    def start(self) -> None:
        """Begin; the file is opened on the thread."""
        self._thread.start()

    def take(self, item: Item) -> bool:
        """Queue an item; False, and counted, where the queue is full or the thread ends."""
        if not self._stopping.is_set():
            try:
                self._queue.put_nowait(item)
            except queue.Full:
                pass  # counted below, as after the end
            else:
                return True
        self._lost("question" if isinstance(item, Ask) else "note", 1)
        return False

    def close(self, wait_s: float) -> None:
        """Work off what is queued, commit, and end; waits at most ``wait_s``."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        index = self._open()
        while True:
            batch = self._batch()
            if not batch and self._stopping.is_set():
                break
            index = self._work(index, batch)
            self._entries = len(index)
        try:
            index.close()
        except sqlite3.Error as error:
            log.error("explain.not_closed", error=type(error).__name__)

    def _open(self) -> ExplainIndex:
        try:
            return ExplainIndex(self._path, self._max_entries)
        except (sqlite3.Error, OSError) as error:
            return self._in_memory(error)

    def _in_memory(self, error: Exception) -> ExplainIndex:
        log.error(
            "explain.not_persisted",
            error=type(error).__name__,
            remedy="check data_dir, then restart the gateway",
        )
        return ExplainIndex(None, self._max_entries)

    def _work(self, index: ExplainIndex, batch: list[Item]) -> ExplainIndex:
        """Work a batch off; returns the index to go on with. Each question is answered, whatever happens."""
        done = 0
        try:
            for item in batch:
                self._one(index, item)
                done += 1
            index.commit()
            return index
        except sqlite3.OperationalError as error:
            # Full disk, or locked by another gateway of the same data_dir: what was stored meanwhile is not explained, that is all.
            log.warning("explain.write_failed", error=error.sqlite_errorname)
            return self._after_failure(index.roll_back, index, batch, done)
        except sqlite3.DatabaseError as error:
            word = type(error).__name__
            return self._after_failure(lambda: index.start_afresh(word), index, batch, done)

    def _after_failure(self, mend: Callable[[], None], index: ExplainIndex, batch: list[Item], done: int) -> ExplainIndex:
        self._lost("note", sum(isinstance(item, Note) for item in batch))
        for item in batch[done:]:
            if isinstance(item, Ask):
                item.told(UNEXPLAINED)
                item.seen(UNEXPLAINED)
        try:
            mend()
        except (sqlite3.Error, OSError) as error:
            return self._in_memory(error)
        return index

    @staticmethod
    def _one(index: ExplainIndex, item: Item) -> None:
        if isinstance(item, Note):
            index.add(item.links, item.make)
            return
        if isinstance(item, Drop):
            index.remove(item.links)
            return
        # The requester's answer goes out before anything is looked at that it must not depend on.
        item.told(judge(index, item.question, item.question.make.shelf))
        item.seen(judge(index, item.question, None))

    def _batch(self) -> list[Item]:
        try:
            batch = [self._queue.get(timeout=0.0 if self._stopping.is_set() else IDLE_S)]
        except queue.Empty:
            return []
        self._stopping.wait(random.uniform(*GATHER_S))
        while len(batch) < BATCH_ITEMS:
            try:
                batch.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return batch
