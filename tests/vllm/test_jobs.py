"""Background jobs must have ended, or been cancelled, before anyone goes on without them: a drain, or pages that are freed."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from kvgate_vllm import loading
from kvgate_vllm.jobs import Job, JobThread
from kvgate_vllm.state import engine_state

WAIT_S = 10.0


def test_drained_jobs_have_ended() -> None:
    """What waits runs to its end; what does not end is cancelled, and said so while it still runs."""
    thread, go_on = JobThread("test", 4), threading.Event()
    ran: list[str] = []
    assert thread.submit(Job("a", lambda _job: ran.append("a")))
    assert thread.drain(WAIT_S)
    assert ran == ["a"]
    assert thread.submit(Job("b", lambda job: ran.append("cancelled" if go_on.wait(WAIT_S) and job.cancelled else "b")))
    assert not thread.drain(0.05)
    go_on.set()
    thread.close(WAIT_S)
    assert ran == ["a", "cancelled"]


@pytest.mark.parametrize("name", ["sleep", "discard"])
def test_copies_end_before_an_engine_frees_its_pages(name: str) -> None:
    """Whatever the level: the connector is called first, and only an engine with our connector has one."""
    events: list[str] = []

    class Worker:
        def __init__(self, connector: str) -> None:
            self.vllm_config = SimpleNamespace(
                parallel_config=type("ParallelConfig", (), {})(),
                kv_transfer_config=SimpleNamespace(kv_connector=connector, kv_connector_extra_config={}),
            )

        def free(self, level: int = 1) -> str:
            events.append(f"freed at {level}")
            return "result"

    setattr(Worker, name, Worker.free)
    loading._wrap_freeing(Worker, name)
    loading._wrap_freeing(Worker, name)  # once is enough
    worker = Worker("KVGateConnector")
    engine_state(worker.vllm_config).on_pages_going.append(lambda: events.append("drained"))
    assert getattr(worker, name)(level=1) == "result"
    assert getattr(Worker("AnotherConnector"), name)(2) == "result"
    assert events == ["drained", "freed at 1", "freed at 2"]
