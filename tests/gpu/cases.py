"""The cases, most important first. Each starts its own gateway and engines, and leaves nothing running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.gpu.models import make_model
from tests.gpu.processes import Gateway
from tests.gpu.suite import KJV, LORA, PYTHON, Suite, ask, changed_copy, dump, job, random_prompt, text_prompt

CLASS = "any-attention"


@contextmanager
def gateway(suite: Suite, name: str, **flags: str) -> Iterator[Gateway]:
    """A started gateway with LMCache under it."""
    made = Gateway(suite.folder(name), suite.logs, **({"backend": "lmcache", "pool_bytes": "4GiB"} | flags))
    try:
        suite.facts[f"{suite.case}.gateway_s"] = made.start()
        yield made
    finally:
        made.stop()


def restart(suite: Suite, running: Gateway) -> None:
    """Gateway and LMCache end and start again: what comes now comes from L2."""
    running.stop()
    suite.facts[f"{suite.case}.gateway_again_s"] = running.start()


def restore(suite: Suite) -> None:
    """Store; restart engine, gateway and LMCache; restore: same pages, same text as from the engine's own cache, and right misses."""
    one, two = text_prompt(4), text_prompt(2, file=1)
    tuned = {"name": "tuned", "source": str(KJV), "path": str(suite.folder("adapter") / "tuned")}
    other = tuned | {"source": str(PYTHON), "reload": True}
    with gateway(suite, "restore", numerics_classes=CLASS) as running:
        steps = [{"describe": 1}]
        steps += [ask(prompt, pages=True) for prompt in (one, two)] + [ask(one), ask(two)]
        steps += [ask(one, adapter=tuned, pages=True), ask(one, adapter=tuned)]
        what, first, second, local, local_two, adapted, local_adapted = suite.engines.run(job(running, steps, **LORA), "store")
        suite.facts["engine"] = what
        suite.check("registered", "'registered': True" in str(what["kvgate"]), dump(what["kvgate"]))
        suite.check("nothing_restored_at_first", first["restored"] == second["restored"] == 0, dump(first["report"]))
        suite.check("local_cache_works", local["cached"] == 1024, f"{local['cached']} tokens cached locally")
        restart(suite, running)
        # An engine that runs steps ahead loads an adapter with the first request that needs it: that one is computed.
        steps = [
            ask(one, pages=True),
            ask(two, pages=True),
            ask(one, adapter=tuned),
            {"forget": 1},
            ask(one, adapter=tuned, pages=True),
        ]
        steps += [ask(one, adapter=other, pages=True), ask(one, salt="another"), {"forget": 1}, ask(one, pages=True)]
        again, again_two, loading, _, again_adapted, reloaded, salted, _, third = suite.engines.run(
            job(running, steps, **LORA), "restore"
        )
        suite.same("adapter_loading_text", loading, local_adapted)
        for name, got, stored, wanted in (
            ("base", again, first, local),
            ("base_two", again_two, second, local_two),
            ("adapter", again_adapted, adapted, local_adapted),
            ("after_forgetting", third, first, local),
        ):
            whole(suite, name, got, stored, wanted)
        suite.missed("other_adapter_same_name", reloaded, running, "adapter")
        suite.check("other_adapter_pages", reloaded["pages"] != again_adapted["pages"], "each adapter has its own pages")
        suite.missed("other_salt", salted, running, "scope")
        suite.same("other_salt_text", salted, local)
        _must_miss(suite, running, one)
        _declared_equal(suite, running, one)


def whole(suite: Suite, name: str, got: dict[str, Any], stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """``got`` was restored: all of it, with the pages of ``stored`` and the text of ``wanted``."""
    suite.restored(name, got)
    suite.check(f"{name}_pages", got.get("pages") == stored.get("pages"), "the pages hold the bytes that were stored")
    suite.same(f"{name}_text", got, wanted)


def adapters(suite: Suite) -> None:
    """KV of an adapter after a restart of the engine, and not of another adapter under its name."""
    prompt = text_prompt(4)
    tuned = {"name": "tuned", "source": str(KJV), "path": str(suite.folder("adapter") / "tuned")}
    other = tuned | {"source": str(PYTHON), "reload": True}
    with gateway(suite, "adapters") as running:
        steps = [ask(prompt, adapter=tuned, pages=True), ask(prompt, adapter=tuned)]
        first, local = suite.engines.run(job(running, steps, **LORA), "adapter, store")
        steps = [ask(prompt, adapter=tuned), {"forget": 1}, ask(prompt, adapter=tuned, pages=True), ask(prompt, adapter=other)]
        loading, _, again, reloaded = suite.engines.run(job(running, steps, **LORA), "adapter, restore")
        suite.same("loading_text", loading, local)
        whole(suite, "adapter", again, first, local)
        suite.missed("other_adapter_same_name", reloaded, running, "adapter")


def _must_miss(suite: Suite, running: Gateway, prompt: list[int]) -> None:
    changed = changed_copy(suite, "changed")
    (got,) = suite.engines.run(job(running, [ask(prompt)], changed, **LORA), "changed weights")
    suite.missed("changed_weights", got, running, "base")
    turned: dict[str, Any] = {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 10001.0}}}
    (got,) = suite.engines.run(job(running, [ask(prompt)], **LORA, **turned), "changed RoPE")
    suite.missed("changed_rope", got, running, "rope")
    what, got = suite.engines.run(
        job(running, [{"describe": 1}, ask(prompt)], **LORA, attention_backend="TRITON_ATTN"), "Triton"
    )
    suite.facts["triton"] = what
    suite.missed("other_attention", got, running, "numerics")


def _declared_equal(suite: Suite, running: Gateway, prompt: list[int]) -> None:
    declared: dict[str, Any] = {"extra": {"numerics_class": CLASS}}
    first, local = suite.engines.run(job(running, [ask(prompt, pages=True), ask(prompt)], **declared), "Flash, declared")
    suite.check("declared_first", first["restored"] == 0, "an engine of a class shares nothing with a strict one")
    got, _ = suite.engines.run(
        job(running, [ask(prompt, pages=True), {"describe": 1}], attention_backend="TRITON_ATTN", **declared),
        "Triton, declared",
    )
    suite.restored("declared_other_attention", got)
    suite.check("declared_pages", got.get("pages") == first.get("pages"), "the pages hold the bytes that were stored")
    suite.same("declared_text", got, local)


def runners(suite: Suite) -> None:
    """Each model runner restores what it stored; by default they share nothing."""
    prompt = text_prompt(3)
    with gateway(suite, "runners") as running:
        for version in ("1", "0"):
            name = {"1": "v2", "0": "v1"}[version]
            env = {"VLLM_USE_V2_MODEL_RUNNER": version}
            steps: list[dict[str, Any]] = [
                {"describe": 1},
                ask(prompt, pages=True),
                ask(prompt),
                {"forget": 1},
                ask(prompt, pages=True),
            ]
            what, first, local, _, again = suite.engines.run(job(running, steps), f"runner {name}", env=env)
            suite.check(f"{name}_is_it", f"'runner': '{name}'" in str(what["kvgate"]), dump(what))
            if name == "v1":
                suite.missed("v1_after_v2", first, running, "numerics")
            whole(suite, name, again, first, local)


def wide(suite: Suite) -> None:
    """KV of an 8B model's geometry: many layers, eight heads of 128, payloads of 32 MiB."""
    model = make_model(suite.work / "thin", "thin", device="cuda" if suite.facts.get("make_on_gpu") else "cpu")
    one, two = random_prompt(11, 1), random_prompt(6, 2)
    options: dict[str, Any] = {"max_model_len": 4096}
    with gateway(suite, "wide", pool_bytes="8GiB") as running:
        steps = [ask(one, pages=True), ask(one), ask(two, pages=True), ask(two)]
        first, local, second, local_two = suite.engines.run(job(running, steps, model, **options), "8B geometry, store")
        restart(suite, running)
        steps = [{"describe": 1}, ask(one, pages=True), ask(two, pages=True), {"forget": 1}, ask(one, pages=True)]
        what, again, again_two, _, third = suite.engines.run(job(running, steps, model, **options), "8B geometry, restore")
        suite.facts["wide"] = what
        for name, got, stored, wanted in (
            ("one", again, first, local),
            ("two", again_two, second, local_two),
            ("warm", third, first, local),
        ):
            whole(suite, name, got, stored, wanted)


def graphs(suite: Suite) -> None:
    """A compiled engine with CUDA graphs restores what another such engine stored; an eager one shares nothing with it."""
    prompt = text_prompt(4)
    with gateway(suite, "graphs") as running:
        steps = [{"describe": 1}, ask(prompt, pages=True), ask(prompt)]
        what, first, local = suite.engines.run(job(running, steps, enforce_eager=False), "graphs, store", within_s=240)
        suite.facts["graphs"] = what
        (again,) = suite.engines.run(
            job(running, [ask(prompt, pages=True)], enforce_eager=False), "graphs, restore", within_s=240
        )
        whole(suite, "graphs", again, first, local)
        (eager,) = suite.engines.run(job(running, [ask(prompt)]), "eager after graphs")
        suite.missed("eager", eager, running, "numerics")


def processes(suite: Suite) -> None:
    """An engine with processes of its own, as ``vllm serve`` has them, shares with one in a single process."""
    prompt = text_prompt(4)
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    with gateway(suite, "processes") as running:
        steps = [ask(prompt), ask(prompt)]
        first, local = suite.engines.run(job(running, steps), "one process")
        steps = [ask(prompt), {"forget": 1}, ask(prompt)]
        again, _, third = suite.engines.run(job(running, steps), "own processes", within_s=180, env=env)
        suite.check("first", first["restored"] == 0, dump(first["report"]))
        suite.restored("own_processes", again)
        suite.same("text", again, local)
        suite.restored("again", third)


def codec(suite: Suite) -> None:
    """A gateway with the k16v8 codec: restored on the GPU, keys exact, and the text follows."""
    prompt = text_prompt(4)
    with gateway(suite, "codec", codec="k16v8") as running:
        steps = [ask(prompt), ask(prompt), {"forget": 1}, ask(prompt)]
        _, local, _, again = suite.engines.run(job(running, steps), "k16v8")
        suite.restored("k16v8", again)
        differing = sum(a != b for a, b in zip(again["tokens"], local["tokens"], strict=True))
        suite.check(
            "k16v8_text",
            differing == 0 or None,
            f"{differing} of {len(local['tokens'])} tokens differ: values are coded in 8 bits",
        )
