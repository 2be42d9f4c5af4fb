"""One vLLM engine in one process, for snapkv.py: reads a job as JSON from a file, writes lines of a report as JSON.

argv: job file, result file. ``step`` of the job: "publish" (compute, compact, decode, remember), "check" (everything again, after a
restart of everything), or "other model" (an engine whose RoPE differs).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.reference import ReferenceModel
from kvgate.client.artifacts import Artifact, Prefix
from kvgate.client.sdk import Gateway, GatewayRefused, NotStored, VariantCapability
from kvgate.contract.manifest import query_digest, source_prefix
from kvgate.contract.model import Parameter
from kvgate.transforms.artifact import make_artifact
from kvgate.transforms.recency import Recency
from kvgate.transforms.snapkv import SnapKV
from kvgate.transforms.window import read_window

WINDOW = 32
MAX_TOKENS = 24
TIE = 0.26
"""Largest difference of two logits that bfloat16 can turn around at their magnitude."""
SETTLE_S = 30.0
RATIOS = (Fraction(1, 2), Fraction(1, 4))
ROOT = "of another model, adapter, salt or stored form"


class Engine:
    """A vLLM engine, and asking it."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm: Any = LLM(
            model=job["model"],
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=3072,
            max_num_seqs=4,
            seed=0,
            block_size=32,
            enable_lora=True,
            max_lora_rank=8,
            hf_overrides=job["hf_overrides"],
            kv_transfer_config={
                "kv_connector": "KVGateConnector",
                "kv_connector_module_path": "kvgate_vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"endpoint": job["endpoint"], "capture_queries": job["captures"]},
            },
        )
        self._count = 0

    def tokens(self, text: str) -> list[int]:
        """Token ids of ``text``."""
        return list(self._llm.get_tokenizer().encode(text))

    def ask(self, prompt: Sequence[int], kv: Any = None, *, adapter: str = "", salt: str = "") -> dict[str, Any]:
        """Generate greedily; waits until what was computed is stored."""
        from vllm.lora.request import LoRARequest

        from vllm import SamplingParams

        self._count += 1
        request = {"prompt_token_ids": list(prompt)} | ({"cache_salt": salt} if salt else {})
        parameters = SamplingParams(
            temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, extra_args={"kv_transfer_params": kv} if kv else None
        )
        engine, lora = self._llm.llm_engine, LoRARequest("tuned", 1, adapter) if adapter else None
        engine.add_request(str(self._count), request, parameters, lora_request=lora)
        output = None
        until = time.monotonic() + SETTLE_S
        core = engine.engine_core.engine_core
        while engine.has_unfinished_requests() or core.scheduler.has_requests():
            finished = [
                one for one in (engine.step() if engine.has_unfinished_requests() else core.step_fn() and ()) if one.finished
            ]
            output = finished[-1] if finished else output
            time.sleep(0.001)
            if time.monotonic() > until:
                raise RuntimeError("the engine did not finish")
        if output is None:
            raise RuntimeError("the engine finished without an answer")
        told = (output.kv_transfer_params or {}).get("kvgate", {})
        return {
            "restored": told.get("restored_tokens", 0),
            "error": told.get("error", ""),
            "reference": told.get("reference", ""),
            "capture": told.get("capture", ""),
            "cached": output.num_cached_tokens or 0,
            "ids": list(output.outputs[0].token_ids),
            "text": output.outputs[0].text,
        }

    def forget(self) -> None:
        """Empty vLLM's own prefix cache: what is restored then came from the gateway."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("blocks are still held")


class Steps:
    """What is done in one engine, and the lines it adds to the report: what, how it must be, whether it was, and what was seen."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.lines: list[dict[str, Any]] = []
        self._job = job
        self._folder = Path(job["captures"]).parent
        self._engine = Engine(job)
        self._prompt = self._engine.tokens(job["text"])[: job["source_tokens"]] + self._engine.tokens(job["question"])
        self._source = self._prompt[: job["source_tokens"]]
        self._tail = self._prompt[job["source_tokens"] :]
        self._sdk = Gateway(job["endpoint"])
        file = self._folder / "published.json"
        self._published: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def line(self, what: str, wanted: str, right: bool, seen: str, reference: str = "") -> None:
        """One fact. ``reference``: of a miss that the gateway is to explain."""
        self.lines.append({"what": what, "wanted": wanted, "right": right, "seen": seen, "reference": reference})

    def fetch(self) -> Prefix:
        """The source's KV, once it is stored."""
        until = time.monotonic() + SETTLE_S
        while True:
            try:
                return self._sdk.fetch(self._source)
            except NotStored:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def artifacts(self) -> tuple[Prefix, dict[str, Artifact]]:
        """The prompt computed with its queries captured, and every artifact that is made of it here."""
        captured = self._engine.ask(self._prompt, {"kvgate_capture": WINDOW})
        prefix = self.fetch()
        window = read_window(Path(self._job["captures"]), captured["capture"], self._prompt)
        made = {f"snapkv {ratio}": make_artifact(prefix, SnapKV(ratio, WINDOW), window=window) for ratio in RATIOS}
        made["recency 1/2"] = make_artifact(prefix, Recency(RATIOS[0]), scope="prefix")
        return prefix, made

    def publish(self) -> None:
        """Before the restart."""
        plain = self._engine.ask(self._prompt)
        _, made = self.artifacts()
        model = ReferenceModel(Path(self._job["model"]))
        remembered: dict[str, dict[str, Any]] = {}
        for name, artifact in made.items():
            self.not_found(f"{name}, not published yet", artifact)
            capability = self._sdk.publish(artifact)
            remembered[name] = {"capability": capability.hex, "ids": list(capability.token_ids)}
            self.served(name, capability, artifact, model)
        literal = self.matrix(made, {name: capability_of(one) for name, one in remembered.items()})
        kept = {"plain": plain["ids"], "literal": literal["ids"], "variants": remembered}
        (self._folder / "published.json").write_text(json.dumps(kept))

    def check(self) -> None:
        """After the restart of engine, gateway and LMCache."""
        capabilities = {name: capability_of(one) for name, one in self._published["variants"].items()}
        model = ReferenceModel(Path(self._job["model"]))
        original = self._engine.ask(self._prompt)
        right = original["restored"] == len(self._source)
        self.line(
            "the original full prompt",
            "hit",
            right and original["ids"] == self._published["plain"],
            hit(original),
        )
        _, made = self.artifacts()
        for name, capability in capabilities.items():
            self.served(name, capability, made[name], model)
        self.matrix(made, capabilities)

    def other_model(self) -> None:
        """An engine whose keys are turned by another RoPE."""
        for name, one in self._published["variants"].items():
            answer = self._engine.ask([*one["ids"], *self._tail], {"kvgate_variant": one["capability"]})
            self.line(f"{name} → engine with another RoPE", "error", ROOT in answer["error"], answer["error"])

    def served(self, name: str, capability: VariantCapability, artifact: Artifact, model: ReferenceModel) -> None:
        """Decoded in vLLM from what is stored; held against another implementation on the arrays that were not."""
        self._engine.forget()
        answer = self._engine.ask([*capability.token_ids, *self._tail], capability.kv_transfer_params)
        wanted = model.decode(artifact.keys, artifact.values, self._tail, MAX_TOKENS, answer["ids"])
        other = [at for at, pair in enumerate(zip(answer["ids"], wanted.tokens, strict=False)) if pair[0] != pair[1]]
        ties = [round(wanted.gaps[at], 4) for at in other]
        right = (
            answer["restored"] == len(capability.token_ids)
            and len(answer["ids"]) == MAX_TOKENS
            and all(gap <= TIE for gap in ties)
        )
        note = (
            f", that text but for ties of the logits: gaps {ties} at tokens {other}"
            if other
            else ", the text decoded before it was stored"
        )
        self.line(f"{name}: decode from the restored artifact", "same text", right, hit(answer) + note)

    def matrix(self, made: dict[str, Artifact], capabilities: dict[str, VariantCapability]) -> dict[str, Any]:
        """The rows of the design's matrix that concern variants. Returns the ordinary answer to the retained tokens."""
        literal = self.ordinary_rows(capabilities["snapkv 1/2"])
        self.manifest_rows(made["snapkv 1/2"])
        self.capability_rows(capabilities)
        return literal

    def ordinary_rows(self, capability: VariantCapability) -> dict[str, Any]:
        """Ordinary prompts beside an artifact. Returns the answer to its retained tokens."""
        kept = [*capability.token_ids, *self._tail]
        self._engine.forget()
        whole = self._engine.ask(self._prompt)
        self.line("ordinary + SnapKV of it → original full prompt", "hit", whole["restored"] == len(self._source), hit(whole))
        self._engine.ask(kept, capability.kv_transfer_params)
        literal = self._engine.ask(kept)
        if self._job["step"] == "publish":
            # vLLM itself may hold the tokens at the front that both prompts begin with, as ordinary KV.
            common = next(at for at, pair in enumerate(zip(kept, self._prompt, strict=False)) if pair[0] != pair[1])
            right = literal["restored"] == 0 and literal["cached"] <= common
            self.line("SnapKV → ordinary lookup of the retained tokens", "miss", right, hit(literal), literal["reference"])
        else:
            # Computed once it is an ordinary prompt like any other, with an entry of its own.
            right = literal["restored"] > 0 and literal["ids"] == self._published["literal"]
            self.line("retained tokens, ordinary → their own entry", "hit", right, hit(literal))
        return literal

    def manifest_rows(self, artifact: Artifact) -> None:
        """The exact manifest is found; any other is not, or is refused."""
        found = self._sdk.find(artifact.manifest, artifact.source, artifact.token_ids)
        again = self._engine.ask([*found.token_ids, *self._tail], found.kv_transfer_params)
        self.line(
            "query A → query A, same manifest",
            "hit",
            again["error"] == "" and again["cached"] >= len(found.token_ids),
            hit(again),
        )
        source, manifest = artifact.source, artifact.manifest
        settings = {one.name: one.value for one in manifest.parameters} | {"ratio": "3/4"}
        other_ratio = tuple(Parameter(name=name, value=value) for name, value in sorted(settings.items()))
        changes: list[tuple[str, dict[str, Any]]] = [
            ("query A → query B", {"query": query_digest(source.token_key, self._tail[::-1])}),
            ("ratio 1/2 → ratio 3/4", {"parameters": other_ratio}),
            ("algorithm v1 → v2", {"algorithm_version": "2"}),
            ("other retained positions", {"retained": dataclasses.replace(manifest.retained, positions=b"\1" * 32)}),
            ("other position map", {"position_map": b"\1" * 32}),
        ]
        for what, change in changes:
            self.not_found(what, dataclasses.replace(artifact, manifest=dataclasses.replace(manifest, **change)))
        other = [*self._source[:-1], self._source[-1] ^ 1]
        named = self._sdk.source(other)
        moved = dataclasses.replace(manifest, source_prefix=named.prefix)
        self.not_found("source A → source B, same retained ids", dataclasses.replace(artifact, manifest=moved, source=named))
        lying = dataclasses.replace(manifest, source_prefix=source_prefix(b"\1" * 32, manifest.source_tokens, None))
        self.refused(
            "a manifest that names another source than it is given",
            dataclasses.replace(artifact, manifest=lying),
            "source_prefix",
        )
        self.refused(
            "a manifest of another model",
            dataclasses.replace(artifact, manifest=dataclasses.replace(manifest, model=b"\1" * 32)),
            "model",
        )
        form = dataclasses.replace(manifest, payload_format=b"\1" * 32)
        self.refused("a manifest of another layout or codec", dataclasses.replace(artifact, manifest=form), "payload_format")
        wide = dataclasses.replace(manifest, query=None, scope="prefix")
        self.refused("scope prefix for a transform that is not listed", dataclasses.replace(artifact, manifest=wide), "scope")

    def capability_rows(self, capabilities: dict[str, VariantCapability]) -> None:
        """A capability is good for its own request alone."""
        capability = capabilities["snapkv 1/2"]
        kept = [*capability.token_ids, *self._tail]
        altered = bytearray(capability.data)
        altered[-1] ^= 1
        quarter = [*capabilities["snapkv 1/4"].token_ids, *self._tail]
        recent = [*capabilities["recency 1/2"].token_ids, *self._tail]
        for what, reason, answer in (
            (
                "altered capability, or another domain's",
                "not good here",
                self._engine.ask(kept, {"kvgate_variant": altered.hex()}),
            ),
            ("capability of SnapKV, ids of recency", "begin with", self._engine.ask(recent, capability.kv_transfer_params)),
            (
                "capability of ratio 1/2, ids of ratio 1/4",
                "must go on",
                self._engine.ask(quarter, capability.kv_transfer_params),
            ),
            ("another cache salt", ROOT, self._engine.ask(kept, capability.kv_transfer_params, salt="another")),
            ("adapter kjv", ROOT, self._engine.ask(kept, capability.kv_transfer_params, adapter=self._job["adapter"])),
        ):
            self.line(what, "error", reason in answer["error"] and not answer["ids"], answer["error"])

    def not_found(self, what: str, artifact: Artifact) -> None:
        """Nothing may be found under this manifest."""
        try:
            self._sdk.find(artifact.manifest, artifact.source, artifact.token_ids)
        except GatewayRefused as error:
            self.line(what, "miss", error.failure.field == "tokens", error.failure.problem)
        else:
            self.line(what, "miss", False, "found")

    def refused(self, what: str, artifact: Artifact, field: str) -> None:
        """The gateway must not even open such an artifact, for this reason."""
        try:
            self._sdk.find(artifact.manifest, artifact.source, artifact.token_ids)
        except GatewayRefused as error:
            self.line(what, "refused", field in error.failure.field, f"{error.failure.field} {error.failure.problem}")
        else:
            self.line(what, "refused", False, "found")


def capability_of(remembered: dict[str, Any]) -> VariantCapability:
    """A capability as it was written down."""
    return VariantCapability.from_hex(remembered["capability"], remembered["ids"])


def hit(answer: dict[str, Any]) -> str:
    """What was restored, in words."""
    return answer["error"] or f"{answer['restored']} restored, {answer['cached']} cached"


def main() -> None:
    """Run one job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    steps = Steps(job)
    {"publish": steps.publish, "check": steps.check, "other model": steps.other_model}[job["step"]]()
    Path(sys.argv[2]).write_text(json.dumps(steps.lines))


if __name__ == "__main__":
    main()
