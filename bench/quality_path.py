"""What the k16v8 codec costs in quality through the whole path, with the small model. Needs vLLM:

    .venv/vllm/bin/python -m bench.quality_path [--dtype float16] [--save]

For each codec a gateway of its own: one vLLM engine prefills the prefixes and stores them, a fresh engine restores them from there
and runs over the tokens that follow. Those are scored twice, each time against the engine that had computed the prefixes itself:

* pages: the restored pages are read out of the engine, and the model runs on them in float32, as bench.kernels_quality does. This is
  what storing changed, and what the limits are for.
* engine: the hidden states that the engine itself computed over the restored pages, in its own arithmetic. There every change, however
  small, is amplified by rounding; the last row says by how much when nothing is stored at all and only the prompt is cut otherwise.

What is restored raw must give both scores bit for bit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from bench import kernels_quality, records
from kvgate_kernels import ChunkMove, Packer, PageGeometry, PayloadGeometry
from kvgate_vllm.registration import ISA_LAYOUTS
from tests.vllm.connector_support import UNCACHEABLE, FinishedPages, ask_all, connected, forget_local
from tests.vllm.engine import MODEL, Engine, running
from tests.vllm.gateway import GatewayProcess, gateway

PREFIX, SCORED = 2048, 1024
KL_LIMIT: Final = 1e-4
TOP1_LIMIT: Final = 0.997
BYTES_LIMIT: Final = 0.77


def held_out(count: int) -> list[list[int]]:
    """``count`` pieces of held-out text, prefix and scored tokens and one more."""
    from tokenizers import Tokenizer  # type: ignore[import-not-found,unused-ignore]

    text = "\n".join(path.read_text() for path in sorted((MODEL / "held-out").rglob("*")) if path.is_file())
    ids: list[int] = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text).ids
    step = PREFIX + SCORED + 1
    if len(ids) < count * step:
        raise SystemExit("the held-out text is too short for that many pieces")
    return [ids[index * step : (index + 1) * step] for index in range(count)]


@contextmanager
def hidden_states(engine: Engine) -> Iterator[list[Any]]:
    """What the model gives for each token it computes, in order, while this is open."""
    seen: list[Any] = []
    hook = engine.model.register_forward_hook(lambda _model, _given, states: seen.append(states.detach().clone()))
    try:
        yield seen
    finally:
        hook.remove()


@dataclass(frozen=True)
class Scored:
    """Log probabilities [SCORED, vocabulary] after each token behind the prefix, by the engine and on its pages."""

    engine: Any
    pages: Any
    restored: int
    cached: int


def scores(engine: Engine, model: Any, text: Sequence[int], **sampling: Any) -> Scored:
    """Run over the tokens behind a prefix that the engine holds or restores."""
    finished = FinishedPages(engine)
    try:
        with hidden_states(engine) as seen:
            reply = ask_all(engine, [text[: PREFIX + SCORED]], max_tokens=1, **sampling)[0]
    finally:
        finished.close()
    on_pages = kernels_quality.scores(model, read_pages(engine, finished.pages), torch.tensor(text))
    return Scored(logs_of(engine, torch.cat(seen)[:SCORED]), on_pages, reply.restored, reply.cached)


def logs_of(engine: Engine, states: Any) -> Any:
    """Log probabilities over the vocabulary in float32: the output layer has the weights of the embedding."""
    return (states.float() @ engine.model.model.embed_tokens.weight.float().T).double().log_softmax(-1)


def read_pages(engine: Engine, pages: Sequence[Any]) -> kernels_quality.Layers:
    """K and V of the prefix, each [KV heads, tokens, head_dim], from a request's pages in the engine's own order."""
    layers = engine.vllm_config.compilation_config.static_forward_context.values()
    isa = next(layer.isa for layer in layers if hasattr(layer, "isa"))
    _, heads, block, double = pages[0].shape
    dtype = str(pages[0].dtype).removeprefix("torch.")
    geometry = PageGeometry(ISA_LAYOUTS[isa], len(pages), heads, double // 2, block, dtype)
    payload = PayloadGeometry.of(geometry, PREFIX)
    stored = bytearray(payload.payload_bytes)
    packer = Packer(geometry, payload, pages)
    packer.pack([ChunkMove(memoryview(stored), list(range(PREFIX // block)))])
    packer.close()
    whole = torch.frombuffer(stored, dtype=pages[0].dtype).view(len(pages), 2, heads, PREFIX, double // 2)
    return [(layer[0], layer[1]) for layer in whole]


def store(engine: Engine, process: GatewayProcess, texts: Sequence[Sequence[int]]) -> int:
    """Prefill and store every prefix; bytes of the pool that they take."""
    for text in texts:
        ask_all(engine, [text[: PREFIX + 1]], max_tokens=1)
    return int(process.status()["storage"]["pool_used_bytes"])


def through(
    codec: str, model: Any, texts: Sequence[Sequence[int]], options: dict[str, Any]
) -> tuple[list[Scored], list[Scored], int]:
    """Scores of the engine that stored, on its own pages; scores of the one that restored; bytes of the pool."""
    with gateway(codec=codec, pool_bytes="512MiB") as process:
        with connected(process, **options) as engine:
            pool_bytes = store(engine, process, texts)
            # Past the gateway: it must hold the prefixes and no more.
            own = [scores(engine, model, text, **UNCACHEABLE) for text in texts]
        with connected(process, **options) as engine:
            restored = []
            for text in texts:
                forget_local(engine)
                restored.append(scores(engine, model, text))
    if any((one.restored, one.cached) != (0, PREFIX) for one in own):
        raise RuntimeError("the engine did not hold its own prefix")
    if any((one.restored, one.cached) != (PREFIX, PREFIX) for one in restored):
        raise RuntimeError("not all of the prefix was restored from the gateway")
    return own, restored, pool_bytes


def compare(base: Sequence[Any], got: Sequence[Any], texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """KL, top-1 agreement and change of perplexity of ``got`` against ``base``, over all texts."""
    reference, logs = torch.cat(list(base)), torch.cat(list(got))
    target = torch.tensor([token for text in texts for token in text[PREFIX + 1 : PREFIX + SCORED + 1]])[:, None]
    change = (reference.gather(1, target).mean() - logs.gather(1, target).mean()).expm1()
    return {
        "kl": (reference.exp() * (reference - logs)).sum(-1).mean().item(),
        "top1": (reference.argmax(-1) == logs.argmax(-1)).double().mean().item(),
        "ppl_change_percent": change.item() * 100,
        "bit_for_bit": torch.equal(reference, logs),
    }


def row(way: str, own: Sequence[Scored], got: Sequence[Scored], texts: Sequence[Sequence[int]], size: float) -> dict[str, Any]:
    """Both comparisons of one way to store."""
    pages = compare([one.pages for one in own], [one.pages for one in got], texts)
    engines = compare([one.engine for one in own], [one.engine for one in got], texts)
    return {"way": way, "bytes": size, "pages": pages, "engine": engines}


def measure(model: Any, texts: Sequence[Sequence[int]], dtype: str) -> list[dict[str, Any]]:
    """One row a way: restored raw, restored from k16v8, and nothing restored but the prompt computed in other steps."""
    # The scored tokens of one text in one step, everywhere: other steps change low bits.
    options = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "dtype": dtype}
    own, raw, raw_bytes = through("raw", model, texts, options)
    again, coded, coded_bytes = through("k16v8", model, texts, options)
    if not all(torch.equal(one.engine, other.engine) for one, other in zip(own, again, strict=True)):
        raise RuntimeError("the engine does not repeat its own scores: nothing can be compared")
    rows = [row("raw", own, raw, texts, 1.0), row("k16v8", own, coded, texts, coded_bytes / raw_bytes)]
    if not (rows[0]["pages"]["bit_for_bit"] and rows[0]["engine"]["bit_for_bit"]):
        raise RuntimeError("raw is not bit for bit")
    stepped = in_other_steps(texts, options)
    uncached = compare([one.engine for one in own], stepped, texts)
    rows.append({"way": "no cache, steps of 512", "bytes": None, "pages": None, "engine": uncached})
    return rows


def in_other_steps(texts: Sequence[Sequence[int]], options: dict[str, Any]) -> list[Any]:
    """The engine's scores where all is computed, and the prompt cut into steps of 512 tokens."""
    stepped = []
    with running(connector=None, **options | {"max_num_batched_tokens": 512, "enable_prefix_caching": False}) as engine:
        for text in texts:
            with hidden_states(engine) as seen:
                engine.ask(text[: PREFIX + SCORED], max_tokens=1)
            stepped.append(logs_of(engine, torch.cat(seen)[PREFIX : PREFIX + SCORED]))
    return stepped


def shown(found: dict[str, Any] | None) -> str:
    """Three columns."""
    if found is None:
        return f"{'':27s}"
    return f"{found['kl']:10.2e} {found['top1']:7.4f} {found['ppl_change_percent']:8.4f}"


def main() -> int:
    """Prints the tables; --save keeps them, each dtype apart. Status 1 where k16v8 passes one of its limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--dtype", action="append", choices=["bfloat16", "float16"], help="repeatable; default: both")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    texts = held_out(options.texts)
    transformers: Any = importlib.import_module("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    path = records.RESULTS / "quality-path.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    within = True
    for dtype in options.dtype or ["bfloat16", "float16"]:
        rows = measure(model, texts, dtype)
        result[dtype] = {
            "texts": options.texts,
            "rows": rows,
            "commit": records.commit(),
            "date": records.now(),
            "versions": records.versions(),
        }
        print(f"\n{dtype}: {options.texts} texts, {PREFIX} tokens restored, {SCORED} scored each")
        three = f"{'KL':>10s} {'top-1':>7s} {'ΔPPL %':>8s}"
        print(f"{'':30s} {'pages':>27s}   {'engine':>27s}\n{'way':22s} {'bytes':>7s} {three}   {three}")
        for found in rows:
            size = "" if found["bytes"] is None else f"{found['bytes']:.4f}"
            print(f"{found['way']:22s} {size:>7s} {shown(found['pages'])}   {shown(found['engine'])}")
        size, pages = rows[1]["bytes"], rows[1]["pages"]
        within &= size <= BYTES_LIMIT and pages["kl"] <= KL_LIMIT and pages["top1"] >= TOP1_LIMIT
    if options.save:
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(path.name)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
