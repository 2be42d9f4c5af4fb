"""What the cases share: processes, folders, the time that is left, and the list of what was found."""

from __future__ import annotations

import json
import random
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.gpu.processes import ROOT, Engines, Gateway, ProcessError

MODEL: Final = ROOT / "tests" / "models" / "docs-llama-7m"
KJV: Final = MODEL / "adapters" / "kjv"
PYTHON: Final = MODEL / "adapters" / "python"
LORA: Final[dict[str, Any]] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 2}
TRANSFER: Final = ["auto"]
"""Who copies, in jobs that don't say: the first entry."""
PATIENCE: Final = {"bind_ms": 2000.0, "acquire_ms": 10000.0, "load_ms": 20000.0, "store_ms": 20000.0}
"""Who is slow here is not wrong. The start of an engine waits as long as it does by default."""
TIE: Final = 0.26
"""Largest difference of two logits that bfloat16 can turn around: two steps at their magnitude (16 to 32)."""
TAIL: Final = 9
"""Tokens of a prompt beyond its whole chunks: fewer than a block, so that vLLM's own cache and a restore leave the same rest."""


@dataclass(frozen=True)
class Finding:
    """One statement that was put to the test. ``ok`` None: it could not be, and ``note`` says why."""

    name: str
    ok: bool | None
    note: str
    seconds: float


@dataclass
class Suite:
    """One run. ``until`` is when no new engine may be started any more, by ``time.monotonic``."""

    work: Path
    logs: Path
    until: float
    engines: Engines
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    case: str = ""
    _began: float = 0.0

    def run(self, name: str, case: Callable[[Suite], None], need_s: float) -> None:
        """Run one case; whatever it raises ends this case only."""
        self.case, self._began = name, time.monotonic()
        if self._began + need_s > self.until:
            self.check("run", None, f"no time: needs {need_s:.0f} s, {self.until - self._began:.0f} s left")
            return
        try:
            case(self)
        except (ProcessError, TimeoutError) as error:
            self.check("run", False, str(error))
        except Exception:  # noqa: BLE001 - the text is the finding
            self.check("run", False, traceback.format_exc()[-2500:])

    def check(self, what: str, ok: bool | None, note: str = "") -> None:
        """Write down whether ``what`` holds."""
        now = time.monotonic()
        self.findings.append(Finding(f"{self.case}.{what}", ok, note, round(now - self._began, 1)))
        word = {True: "ok  ", False: "BAD ", None: "skip"}[ok]
        print(f"{word} {self.case}.{what}  [{now - self._began:.1f} s]  {note}", flush=True)
        self._began = now

    def same(self, what: str, got: dict[str, Any], wanted: dict[str, Any]) -> None:
        """The same tokens; or a first other one at a tie, with its gaps."""
        if got["tokens"] == wanted["tokens"]:
            self.check(what, True, "same tokens")
            return
        at = next(i for i, pair in enumerate(zip(got["tokens"], wanted["tokens"], strict=False)) if pair[0] != pair[1])
        gaps = (got["gaps"][at], wanted["gaps"][at])
        self.check(what, min(gaps) <= TIE, f"token {at} differs: gaps of the two best logits {gaps[0]} and {gaps[1]}")

    def restored(self, what: str, got: dict[str, Any]) -> None:
        """All whole chunks of the prompt came from the gateway."""
        whole = (got["prompt_tokens"] - 1) // 256 * 256
        note = f"{got['restored']} of {whole} tokens restored, {got['cached']} cached, TTFT {got['ttft_ms']} ms"
        self.check(what, got["restored"] == whole, f"{note} {got['report']}")

    def missed(self, what: str, got: dict[str, Any], gateway: Gateway, reason: str) -> None:
        """Nothing was restored, and the gateway says that this is why."""
        reasons = gateway.reasons(got)
        self.check(
            what, got["restored"] == 0 and got["cached"] == 0 and reasons == [reason], f"reasons {reasons} {got['report']}"
        )

    def folder(self, name: str) -> Path:
        """An empty folder."""
        path = self.work / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path


def text_prompt(chunks: int, file: int = 0) -> list[int]:
    """Token ids of held-out text: whole chunks and a short tail."""
    from tokenizers import Tokenizer  # type: ignore[import-not-found,unused-ignore]

    text = (MODEL / "held-out" / f"python-docs-{file}.txt").read_text(encoding="utf-8")[2000:14000]
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text).ids
    return list(ids[: chunks * 256 + TAIL])


def random_prompt(chunks: int, seed: int, vocabulary: int = 1024) -> list[int]:
    """Random token ids: whole chunks and a short tail."""
    numbers = random.Random(seed)
    return [numbers.randrange(3, vocabulary) for _ in range(chunks * 256 + TAIL)]


def ask(prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    """A step that asks."""
    return {"ask": list(prompt), **more}


def job(gateway: Gateway | None, steps: list[dict[str, Any]], model: Path = MODEL, **more: Any) -> dict[str, Any]:
    """A job on the small model, eager, with FlashAttention; ``more``: options, and ``extra`` for the connector."""
    extra = {"transfer": TRANSFER[0], **PATIENCE} | more.pop("extra", {})
    options = {"enforce_eager": True, "attention_backend": "FLASH_ATTN"} | more
    connector = None if gateway is None else {"endpoint": gateway.endpoint} | extra
    return {"model": str(model), "options": options, "connector": connector, "steps": steps}


def changed_copy(suite: Suite, name: str) -> Path:
    """A copy of the small model with the lowest bit of its last weight changed."""
    copy = suite.folder(name) / "model"
    shutil.copytree(MODEL, copy, ignore=shutil.ignore_patterns("held-out", "adapters"))
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    return copy


def dump(value: Any) -> str:
    """A fact as one line."""
    return json.dumps(value, sort_keys=True)
