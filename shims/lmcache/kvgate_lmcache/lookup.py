"""Asks the L2 adapters whether they have an object, without reading it.

LMCache's own way in (a prefetch) loads what it finds. One level lower each adapter has ``submit_lookup_and_lock_task`` and
``query_lookup_and_lock_result``: `EXISTS` on Redis, a file's existence in a folder. The lock it takes there is given back
at once. For a folder that way costs two thread switches per object, so a folder is asked directly: one `stat`, which also
tells a file of the wrong length from the object.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvgate.storage.backend import ObjectRef

from .adapters import L2Adapter, L2Adapters
from .clock import Deadline
from .internals import server_name
from .keys import layout, object_key
from .lengths import Lengths

# An adapter that hangs must not collect unanswered questions without end.
_MAX_ABANDONED = 256
_POLL_S = (0.0002, 0.0005, 0.001, 0.002, 0.005)

Answers = list[bool | None]


@dataclass(slots=True)
class _Question:
    """One lookup task under way at one adapter, for the refs at ``places`` of the call."""

    at: L2Adapter
    errors_before: int
    task: int
    keys: list[Any]
    places: list[int]

    def answer(self) -> Answers | None:
        """What the adapter has, its locks given back; None: no answer yet.

        An operation that failed looks like "nothing there": after an error the adapter's noes count as not known.
        """
        bitmap = self.at.adapter.query_lookup_and_lock_result(self.task)
        if bitmap is None:
            return None
        found = [bool(bitmap.test(index)) for index in range(len(self.keys))]
        locked = [key for key, has in zip(self.keys, found, strict=True) if has]
        if locked:
            self.at.adapter.submit_unlock(locked)
        no = False if self.at.errors == self.errors_before else None
        return [has or no for has in found]


class L2Lookup:
    """Existence in L2. Questions left unanswered at a deadline are followed up by ``sweep``, so that no lock stays."""

    def __init__(self, adapters: L2Adapters, on_damage: Callable[[Any, Any], None]) -> None:
        """``on_damage(adapter, key)`` is told of files that have the object's name and another length."""
        self._adapters = adapters
        self._on_damage = on_damage
        self._lock = threading.Lock()
        self._abandoned: list[_Question] = []
        adapters.on_gone(self._forget)

    @property
    def abandoned(self) -> int:
        """Questions without an answer whose caller has gone."""
        return len(self._abandoned)

    def exists(self, refs: Sequence[ObjectRef], deadline: Deadline) -> Answers:
        """Per ref: some adapter has it, no adapter has it, or None if not every adapter could say so in time."""
        found = self.exists_in(self._adapters.live, refs, deadline)
        return [has or None for has in found] if self._adapters.away else found

    def exists_in(self, live: Sequence[L2Adapter], refs: Sequence[ObjectRef], deadline: Deadline) -> Answers:
        """The same of these adapters alone."""
        found = self._in_folders(live, refs, deadline)
        asked = [place for place, has in enumerate(found) if has is not True]
        servers = [at for at in live if at.folder is None]
        if servers and asked:
            elsewhere = self._in_servers(servers, [refs[place] for place in asked], deadline)
            for place, has in zip(asked, elsewhere, strict=True):
                found[place] = has if has or found[place] is not None else None
        return found

    def absent_in_folders(self, refs: Sequence[ObjectRef], deadline: Deadline) -> set[int]:
        """Places of refs that no adapter has, where that can be said without asking a server: all L2s are folders."""
        live = self._adapters.live
        if any(at.folder is None for at in live):
            return set()
        return {place for place, has in enumerate(self._in_folders(live, refs, deadline)) if has is False}

    def unsafe_to_fetch(self, refs: Sequence[ObjectRef], deadline: Deadline) -> set[int]:
        """Places of refs for which a `resp` adapter might be sent a GET of another length than the value has."""
        return {
            place
            for at in self._adapters.live
            if at.lengths is not None
            for place, has in enumerate(self._by_length(at, at.lengths, refs, deadline))
            if has is None or at.out_of_step
        }

    def sweep(self) -> bool:
        """Take late answers and give their locks back; whether questions are still open."""
        with self._lock:
            self._abandoned = [question for question in self._abandoned if question.answer() is None]
            return bool(self._abandoned)

    def _forget(self, gone: L2Adapter) -> None:
        with self._lock:
            self._abandoned = [question for question in self._abandoned if question.at is not gone]

    def _in_folders(self, live: Sequence[L2Adapter], refs: Sequence[ObjectRef], deadline: Deadline) -> Answers:
        found: Answers = [False] * len(refs)
        for at in live:
            if at.folder is None:
                continue
            folder, name_of = at.folder
            for place, ref in enumerate(refs):
                if found[place]:
                    continue
                if deadline.passed():
                    found[place] = None  # a folder on a server that hangs
                    continue
                key = object_key(ref)
                try:
                    size = os.stat(f"{folder}/{name_of(key)}").st_size  # noqa: PTH116  # a Path costs more than the stat
                except FileNotFoundError:
                    continue
                except OSError:
                    found[place] = None
                    continue
                if size == ref.object_bytes:
                    found[place] = True
                else:
                    self._on_damage(at.adapter, key)
        return found

    def _by_length(self, at: L2Adapter, lengths: Lengths, refs: Sequence[ObjectRef], deadline: Deadline) -> Answers:
        """What the server of a `resp` adapter has, in exactly the length asked; another length is removed from it."""
        names = [server_name(object_key(ref)) for ref in refs]
        found = lengths.of(names, deadline)
        if found is None:
            at.errors += 1  # have it looked after
            return [None] * len(refs)
        wrong = [place for place, length in enumerate(found) if length not in (0, refs[place].object_bytes)]
        answers: Answers = [length == ref.object_bytes for length, ref in zip(found, refs, strict=True)]
        if wrong:
            gone = lengths.drop([names[place] for place in wrong], deadline)
            for place in wrong:
                self._on_damage(at.adapter, object_key(refs[place]))
                answers[place] = False if gone else None
        return answers

    def _in_servers(self, servers: Sequence[L2Adapter], refs: Sequence[ObjectRef], deadline: Deadline) -> Answers:
        if self.abandoned > _MAX_ABANDONED:
            return [None] * len(refs)
        found: Answers = [False] * len(refs)
        open_questions = _ask([at for at in servers if at.lengths is None], refs)
        for at in servers:
            if at.lengths is not None:
                has_them = self._by_length(at, at.lengths, refs, deadline)
                found = [
                    before or (has if before is not None else has or None) for before, has in zip(found, has_them, strict=True)
                ]
        pause = 0
        while open_questions:
            still_open = []
            for question in open_questions:
                answers = question.answer()
                if answers is None:
                    still_open.append(question)
                    continue
                for place, has in zip(question.places, answers, strict=True):
                    found[place] = found[place] or (has if found[place] is not None else has or None)
            open_questions = still_open
            if not open_questions or deadline.passed():
                break
            time.sleep(min(_POLL_S[min(pause, len(_POLL_S) - 1)], deadline.left_s()))
            pause += 1
        unsure = {place for question in open_questions for place in question.places}
        if open_questions:
            with self._lock:
                self._abandoned.extend(open_questions)
        return [has or (None if place in unsure else has) for place, has in enumerate(found)]


def _ask(servers: Sequence[L2Adapter], refs: Sequence[ObjectRef]) -> list[_Question]:
    by_size: dict[int, list[int]] = defaultdict(list)
    for place, ref in enumerate(refs):
        by_size[ref.object_bytes].append(place)
    questions = []
    for object_bytes, places in by_size.items():
        keys = [object_key(refs[place]) for place in places]
        for at in servers:
            errors = at.errors
            task = at.adapter.submit_lookup_and_lock_task(keys, {0: layout(object_bytes)})
            questions.append(_Question(at, errors, task, keys, places))
    return questions
