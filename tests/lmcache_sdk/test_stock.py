"""What LMCache does by itself with the same function: the compacted entry is served to whoever sends the retained ids."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.sdk.request import create_request

from tests.lmcache_sdk.test_bridge import KV, Answers, every_second
from tests.storage.servers import Server, free_port

MODEL = "toy/sdk"
CHUNK, BLOCK, LAYERS, HEADS, DIM = 16, 4, 2, 2, 16
CALL_S = 30.0
PROMPT = list(range(1000, 1000 + 4 * CHUNK))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A stock ``lmcache server`` on loopback: its two addresses."""
    folder = tmp_path_factory.mktemp("stock")
    port, http_port = free_port(), free_port()
    pool = f"lmcache_l1_pool_stock_{os.getpid()}_{port}"
    words = ["server", "--host", "127.0.0.1", "--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http_port)]
    words += ["--chunk-size", str(CHUNK), "--supported-transfer-mode", "auto", "--disable-observability"]
    words += ["--l1-size-gb", "0.25", "--no-l1-use-lazy", "--shm-name", pool, "--eviction-policy", "LRU"]
    started = Server([str(Path(sys.executable).with_name("lmcache")), *words], port, folder / "lmcache.log")
    yield f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{http_port}"
    started.kill()
    (Path("/dev/shm") / pool).unlink(missing_ok=True)


class Worker:
    """A CPU worker that has computed and stored the prompt, and a scheduler's plain lookup, by LMCache's own classes."""

    def __init__(self, url: str) -> None:
        import zmq
        from lmcache.v1.multiprocess.transfer_context.worker_transfer import create_transfer_context
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self.wire: Any = RequestClientFactory.create(url, context=zmq.Context())
        self.pages = {f"layer.{at}": torch.randn(2, 64, BLOCK, HEADS, DIM).to(torch.bfloat16) for at in range(LAYERS)}
        self.transfer: Any = create_transfer_context(
            self.pages, instance_id=os.getpid(), req_client=self.wire, mode="lmcache_driven"
        )
        self.transfer.register(self.pages, MODEL, 1, CHUNK // BLOCK, CALL_S, layout_hints={"kv_layout": "NHD"})

    def store(self, tokens: list[int]) -> torch.Tensor:
        """Store the KV of ``tokens``; it, as the SDK gives it."""
        blocks = list(range(1, 1 + len(tokens) // BLOCK))
        event = self.transfer.create_recorded_event()
        key = self._key(tokens, "store", worker=0)
        assert self.transfer.submit_store("store", key, self.pages, [blocks], event, CHUNK // BLOCK).result(timeout=CALL_S)
        self.wire.end_session("store").result(timeout=CALL_S)
        parts = [page[:, blocks].reshape(2, -1, HEADS * DIM) for page in self.pages.values()]
        return torch.stack(parts, 1)

    def lookup(self, tokens: list[int], name: str) -> int:
        """How many chunks a plain lookup, as vLLM's connector makes it, is promised."""
        self.wire.lookup(self._key(tokens, name, worker=None), 1).result(timeout=CALL_S)
        found = self.wire.wait_prefetch_status(name, CALL_S).result(timeout=2 * CALL_S)
        self.wire.end_session(name).result(timeout=CALL_S)
        return int(found or 0)

    def close(self) -> None:
        """Unregister and hang up."""
        self.transfer.unregister().result(timeout=CALL_S)
        self.wire.close()

    def _key(self, tokens: list[int], name: str, worker: int | None) -> Any:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        return IPCCacheServerKey(MODEL, 1, worker, tuple(tokens), 0, len(tokens), name, "", None, 1)


@pytest.mark.slow
def test_stock_serves_the_compacted_entry_to_a_plain_lookup(server: tuple[str, str]) -> None:
    """With LMCache alone the function that kvgate keeps private makes an entry that any prompt of those ids is served."""
    from lmcache.sdk import kvcache

    url, http_url = server
    worker = Worker(url)
    whole = worker.store(PROMPT)
    retained = PROMPT[::2]
    until = time.monotonic() + CALL_S
    while worker.lookup(PROMPT, f"before {time.monotonic()}") != 4:
        assert time.monotonic() < until, "the prompt was not stored"
        time.sleep(0.1)
    assert worker.lookup(retained, "retained before") == 0
    context = kvcache.connect(url=url, http_url=http_url, model_name=MODEL)
    stream = create_request([context], Answers(), PROMPT)
    stream.modify_kv(every_second)
    assert worker.lookup(retained, "retained after") == 2
    served = context.retrieve(retained)
    assert served is not None
    assert torch.equal(served, whole[:, :, ::2])
    assert torch.equal(stream.retrieve(KV), served)
    context.close()
    worker.close()
