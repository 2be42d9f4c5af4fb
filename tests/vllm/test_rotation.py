"""The deployment secret is rotated under a live engine: its cache lasts through the window, and what is stored since stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.connector_support import ask_all, assert_nothing_held, assert_same_or_tie, connected, forget_local, reconnect
from tests.vllm.engine import EnginePool, prompt_tokens
from tests.vllm.gateway import started
from tests.vllm.test_lmcache_killed import LMCacheGateway

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = prompt_tokens(800, skip=300)
LONGER = prompt_tokens(1300, skip=300)


@pytest.fixture(scope="module")
def process(engines: EnginePool) -> Iterator[LMCacheGateway]:
    """One gateway with the folder as L2 and a secret file of its own."""
    engines.close()  # vLLM has one worker connector a process, so one engine at a time
    with started(lambda root: LMCacheGateway(root, backend="lmcache", **{"secret-file": str(root / "old.secret")})) as made:
        yield made


def test_rotation_keeps_the_cache(process: LMCacheGateway) -> None:
    """In the window a prompt of before is restored, from both secrets where it goes on; after it what was stored since."""
    old, new = str(process.root / "old.secret"), str(process.root / "new.secret")
    with connected(process, extra={"register_ms": 10_000}) as engine:
        first = ask_all(engine, [PROMPT], salt="ours")[0]
        assert first.restored == 0
        assert_nothing_held(process)

        process.restart(secret_file=new, previous_secret_files=old)
        reconnect(engine)
        forget_local(engine)
        again = ask_all(engine, [PROMPT], salt="ours")[0]
        assert again.restored == 768
        assert_same_or_tie(again, first, "after the rotation")
        assert ask_all(engine, [PROMPT], salt="theirs")[0].restored == 0
        forget_local(engine)
        longer = ask_all(engine, [LONGER], salt="ours")[0]
        assert longer.restored == 768
        forget_local(engine)
        assert ask_all(engine, [LONGER], salt="ours")[0].restored == 1280
        assert_nothing_held(process)

        process.restart(previous_secret_files="")
        reconnect(engine)
        forget_local(engine)
        assert ask_all(engine, [PROMPT], salt="ours")[0].restored == 0
        forget_local(engine)
        assert ask_all(engine, [PROMPT], salt="ours")[0].restored == 768
        forget_local(engine)
        assert ask_all(engine, [LONGER], salt="ours")[0].restored == 1280
        assert_nothing_held(process)
