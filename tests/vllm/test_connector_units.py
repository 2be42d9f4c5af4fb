"""The connector's pure parts must keep to boundaries, settings and bounds."""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate_vllm.chunks import chunk_blocks, confirmed_tokens, promisable_chunks
from kvgate_vllm.jobs import Job, JobThread
from kvgate_vllm.lookups import HELD, MISS, NOT_READ, Lookups
from kvgate_vllm.metadata import AdapterRef, LoadOp, LoadResult, StepMetadata, StoreOp, WorkerReport
from kvgate_vllm.settings import ConnectorSettings, SettingsError
from kvgate_vllm.tracking import Track

LEASE = b"secret lease".ljust(32, b".")


@pytest.mark.parametrize(("prompt", "chunks"), [(0, 0), (1, 0), (255, 0), (256, 0), (257, 1), (512, 1), (513, 2), (2000, 7)])
def test_only_chunks_before_the_last_token_are_promised(prompt: int, chunks: int) -> None:
    """256 tokens promise nothing, 257 one chunk of 256."""
    assert promisable_chunks(prompt, 256) == chunks


@given(st.integers(0, 10_000), st.integers(1, 1024))
def test_a_promise_leaves_a_token_to_compute(prompt: int, chunk: int) -> None:
    """However long the prompt: what is promised ends before its last token, and one more chunk would not."""
    promised = promisable_chunks(prompt, chunk) * chunk
    assert promised == 0 or promised <= prompt - 1
    assert promised + chunk > prompt - 1


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 5000))
def test_confirmed_tokens_never_include_what_is_in_flight_or_not_computed(computed: int, in_flight: int, tokens: int) -> None:
    """Never negative, never a token in flight, never the newest token."""
    confirmed = confirmed_tokens(computed, in_flight, tokens)
    assert 0 <= confirmed <= max(0, computed - in_flight)
    assert confirmed <= tokens - 1


@given(st.integers(0, 40), st.integers(0, 6), st.integers(0, 6), st.integers(1, 8))
def test_blocks_of_chunks_are_whole_or_nothing(count: int, first: int, more: int, per_chunk: int) -> None:
    """A table too short for the chunks gives None, never fewer blocks."""
    blocks = list(range(count))
    span = chunk_blocks(blocks, first, first + more, per_chunk)
    if span is None:
        assert (first + more) * per_chunk > count
    else:
        assert span == tuple(range(first * per_chunk, (first + more) * per_chunk))


def load_op(**changes: Any) -> LoadOp:
    """A load of chunks 1 and 2, of which the first 64 tokens are held."""
    fields: dict[str, Any] = {
        "number": 7,
        "request_id": "r",
        "lease": LEASE,
        "first": 1,
        "last": 3,
        "blocks": tuple(range(100, 116)),
        "adapter": AdapterRef(1, b"adapter digest"),
        "skip_tokens": 64,
        "asynchronous": True,
    }
    return LoadOp(**(fields | changes))


def test_held_blocks_are_not_among_those_a_load_writes() -> None:
    """A failed first chunk reports only the blocks behind the tokens that vLLM held already."""
    op = load_op()
    assert op.blocks_of(1) == tuple(range(100, 108))
    assert op.blocks_to_load(1, 32) == tuple(range(102, 108))
    assert op.blocks_to_load(2, 32) == tuple(range(108, 116))


def test_metadata_travels_and_prints_no_secret() -> None:
    """Metadata survives pickling between processes, and its text holds neither lease nor adapter digest."""
    store = StoreOp(8, "r", LEASE, 0, 1, tuple(range(8)), None)
    meta = StepMetadata(loads=[load_op()], stores=[store], preempted=("p",), draining=("d",))
    assert pickle.loads(pickle.dumps(meta)) == meta
    text = repr(meta) + repr(WorkerReport(handle=LEASE, adapters={b"adapter digest": 1}))
    assert "secret lease" not in text
    assert "adapter digest" not in text


reports = st.builds(
    WorkerReport,
    handle=st.none(),
    loads=st.dictionaries(st.integers(0, 3), st.builds(LoadResult, ranks=st.just(1), failed=st.none() | st.integers(0, 9))),
    stores=st.dictionaries(st.integers(0, 3), st.just(1)),
    adapters=st.dictionaries(st.sampled_from([b"a", b"b"]), st.just(1)),
)


@given(reports, reports)
def test_reports_add_up(one: WorkerReport, other: WorkerReport) -> None:
    """Ranks are counted, and a chunk that failed on any rank has failed, in whichever order they are merged."""
    merged = one.aggregate(other)
    assert merged == other.aggregate(one)
    for number in one.loads.keys() | other.loads.keys():
        results = [report.loads[number] for report in (one, other) if number in report.loads]
        failures = [result.failed for result in results if result.failed is not None]
        assert merged.loads[number] == LoadResult(len(results), min(failures, default=None))
    assert sum(merged.stores.values()) == len(one.stores) + len(other.stores)


def test_an_empty_report_is_false() -> None:
    """vLLM drops what is false: nothing to say costs nothing."""
    assert not WorkerReport()
    assert WorkerReport(handle=LEASE)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"endpont": "x"}, "endpont"),
        ({"bind_ms": 0}, "bind_ms"),
        ({"bind_ms": -1}, "bind_ms"),
        ({"bind_ms": True}, "bind_ms"),
        ({"load_ms": "5"}, "load_ms"),
        ({"save_queue_ops": 1.5}, "save_queue_ops"),
        ({"async_load": 1}, "async_load"),
        ({"endpoint": None}, "endpoint"),
    ],
)
def test_bad_settings_are_refused_by_name(extra: dict[str, Any], named: str) -> None:
    """A wrong or unknown setting stops the engine's start with a message that names it."""
    with pytest.raises(SettingsError, match=named):
        ConnectorSettings.of(extra)


def test_settings_of_the_plugin_pass() -> None:
    """Keys that the plugin reads are not unknown here."""
    assert ConnectorSettings.of({"adapter_max_bytes": 5, "bind_ms": 20}).bind_ms == 20


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 1025])
def test_a_credential_must_be_there_and_bounded(tmp_path: Path, content: bytes) -> None:
    """An empty or oversize credential file is refused, and its content is not repeated."""
    file = tmp_path / "c"
    file.write_bytes(content)
    with pytest.raises(SettingsError) as refused:
        ConnectorSettings.of({"credential_file": str(file)}).credential()
    assert "xxx" not in str(refused.value)


def test_a_credential_is_the_line(tmp_path: Path) -> None:
    """The line end that editors add is not part of the credential."""
    file = tmp_path / "c"
    file.write_bytes(b"tenant token\n")
    assert ConnectorSettings.of({"credential_file": str(file)}).credential() == b"tenant token"
    with pytest.raises(SettingsError):
        ConnectorSettings.of({"credential_file": str(tmp_path / "none")}).credential()


def test_jobs_run_in_order_and_are_bounded() -> None:
    """Jobs of one thread run one after the other; beyond the bound a job is refused, and room comes back."""
    thread, gate, ran = JobThread("test", 2), threading.Event(), list[str]()
    started = threading.Event()

    def first(_job: Job) -> None:
        started.set()
        assert gate.wait(10)
        ran.append("a")

    assert thread.submit(Job("a", first))
    assert started.wait(10)
    assert thread.submit(Job("b", lambda _job: ran.append("b")))
    assert thread.submit(Job("c", lambda _job: ran.append("c")))
    assert not thread.submit(Job("d", lambda _job: ran.append("d")))
    assert thread.busy("a")
    assert not thread.busy("d")
    gate.set()
    thread.close(10)
    assert ran == ["a", "b", "c"]
    assert not thread.submit(Job("e", lambda _job: ran.append("e")))


def test_cancel_waits_for_the_piece_under_way_and_lets_no_other_begin() -> None:
    """When cancel returns, no page of the request is being read or will be."""
    thread = JobThread("test", 8)
    reading, go_on, pieces = threading.Event(), threading.Event(), list[int]()

    def work(job: Job) -> None:
        for piece in range(3):
            if not job.begin_reading():
                return
            reading.set()
            assert go_on.wait(10)
            pieces.append(piece)
            job.end_reading()

    assert thread.submit(Job("r", work))
    assert thread.submit(Job("r", work))
    assert reading.wait(10)
    cancelled = threading.Thread(target=thread.cancel, args=(["r"],))
    cancelled.start()
    cancelled.join(0.05)
    assert cancelled.is_alive(), "cancel returned while a page was being read"
    go_on.set()
    cancelled.join(10)
    assert not cancelled.is_alive()
    seen = list(pieces)
    thread.close(10)
    assert pieces == seen == [0]


def test_a_failing_job_does_not_end_the_thread() -> None:
    """After a job that raised, the next one runs."""
    thread, done = JobThread("test", 8), threading.Event()

    def fail(_job: Job) -> None:
        raise RuntimeError("on purpose")

    assert thread.submit(Job("a", fail))
    assert thread.submit(Job("b", lambda _job: done.set()))
    assert done.wait(10)
    thread.close(10)
    assert not thread.busy("a")


@pytest.mark.parametrize(("before", "after"), [(128, 256), (256, 128)])
def test_a_request_is_not_bound_with_digests_of_another_chunk_size(before: int, after: int) -> None:
    """After a restart with other chunks, digests of the old ones would name chunks whose tokens they do not cover: no bind."""
    request = SimpleNamespace(request_id="r", num_tokens=600, all_token_ids=list(range(600)), cache_salt=None)
    track = Track(request=request, chunk_tokens=before, uncacheable=None, adapter=None, salt=None)
    key = bytes(range(32))
    track.token_digests_to(key, track.full_chunks)
    nothing: Any = SimpleNamespace()
    lookups = Lookups(
        nothing, nothing, ConnectorSettings(), time.monotonic, block_tokens=32, in_background=True, in_step_allowed=True
    )
    opened: Any = SimpleNamespace(keys=SimpleNamespace(chunk_tokens=after, token_key=key, salt_key=key))
    assert not lookups.bind(track, opened)
    assert (track.binding, track.chunk_tokens) == (None, before)
    assert track.uncacheable == "uncacheable: the gateway's chunks have another size now"


class Bound:
    """The binding of a prompt of which the gateway has nothing."""

    lost, adapter, reference, missed, worth_asking = False, None, "0" * 16, ["absent"], 0

    def __init__(self) -> None:
        self.explaining = False
        self.done: Future[None] = Future()
        self.done.set_result(None)

    def explain(self) -> None:
        """Note that it was asked for."""
        self.explaining = True


class BindsAtOnce(Lookups):
    """Lookups whose gateway has answered the bind already."""

    def bind(self, track: Track, _opened: object) -> bool:
        """See ``Lookups``."""
        bound: Any = Bound()
        track.chunk_tokens, track.binding = 256, bound
        return True


def asked(prompt_tokens: int, *, reads: bool = True) -> tuple[Lookups, Track]:
    """A request that has arrived at a gateway of chunks of 256, and the lookups that know it."""
    request = SimpleNamespace(
        request_id="r",
        num_tokens=prompt_tokens,
        num_prompt_tokens=prompt_tokens,
        all_token_ids=list(range(prompt_tokens)),
        skip_reading_prefix_cache=not reads,
    )
    track = Track(request=request, chunk_tokens=0, uncacheable=None, adapter=None, salt=None)
    opened = SimpleNamespace(keys=SimpleNamespace(chunk_tokens=256))
    session: Any = SimpleNamespace(current=lambda: opened)
    state: Any = SimpleNamespace(uncacheable_reason=lambda _request: None)
    lookups = BindsAtOnce(
        session, state, ConnectorSettings(), time.monotonic, block_tokens=32, in_background=True, in_step_allowed=True
    )
    lookups.arrive(track)
    return lookups, track


def test_what_vllm_holds_is_no_miss() -> None:
    """All that could be restored is in vLLM's own prefix cache: the reply says so. Where vLLM gave it away before the request ran,
    the gateway is asked, and the reply tells of that; a miss is not taken back by what a preempted request finds of itself."""
    lookups, track = asked(600)
    assert lookups.matched_tokens(track, 576) == MISS
    assert track.report() == {"restored_tokens": 0, "outcome": HELD}
    assert lookups.matched_tokens(track, 0) == MISS
    missed = {"restored_tokens": 0, "outcome": "miss", "reference": "0" * 16, "miss": ["absent"]}
    assert track.report() == missed
    assert lookups.matched_tokens(track, 576) == MISS
    assert track.report() == missed


def test_what_may_not_be_read_is_no_miss() -> None:
    """A request that must not be served from a cache is not looked up, and told that."""
    lookups, track = asked(600, reads=False)
    assert lookups.matched_tokens(track, 0) == MISS
    assert track.report() == {"restored_tokens": 0, "outcome": NOT_READ}
    _, track = asked(256, reads=False)
    assert track.report()["outcome"] == "short"
