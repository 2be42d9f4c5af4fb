"""The rules: from what was measured to how a result may be shared. Pure; docs/screening.md states them in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvgate.screen.measure import Measured
from kvgate.screen.quality import Drift
from kvgate.screen.results import Result

PREFIX: Final = "safe for prefix reuse"
EXTENDED: Final = "safe only with an extended key"
CONNECTOR: Final = "safe only with a custom connector"
ROUTING: Final = "routing only"
DANGEROUS: Final = "dangerous for sharing"
CLASSES: Final = (PREFIX, EXTENDED, CONNECTOR, ROUTING, DANGEROUS)

KL_LIMIT: Final = 1e-3
"""Nats: a declared codec above this is not taken for the ordinary cache."""
TOP1_LIMIT: Final = 0.01
"""Share of tokens whose most likely successor a declared codec may change."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A rule that applied, and what made it apply."""

    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """The class, the reasons for it, and what would make it a better one."""

    name: str
    reasons: tuple[Reason, ...]
    advice: str


def judge(result: Result, measured: Sequence[Measured], drifts: Sequence[Drift | None]) -> Judgement:
    """The first class, from the worst up, one of whose rules applies on any capture."""
    for find, name in ((_dangerous, DANGEROUS), (_routing, ROUTING), (_connector, CONNECTOR)):
        reasons = find(result, measured)
        if reasons:
            return Judgement(name, tuple(reasons), _ADVICE[name, reasons[0].rule])
    reasons = _extended(result, measured, drifts)
    if reasons:
        return Judgement(EXTENDED, tuple(reasons), _ADVICE[EXTENDED, reasons[0].rule])
    text = "the result is the ordinary cache, bit for bit"
    if result.codec != "raw":
        text = f"every token is kept, and codec {result.codec} is part of the representation and so of every address"
    return Judgement(PREFIX, (Reason("P1", text),), "Share it as ordinary KV is shared.")


def _dangerous(result: Result, measured: Sequence[Measured]) -> list[Reason]:
    reasons = []
    if not all(one.repeat_same for one in measured):
        reasons.append(Reason("D1", "the same input gave other bytes: no key can name the result"))
    if any(one.query_in_key is False for one in measured):
        reasons.append(Reason("D2", "two queries gave two results under one manifest: it does not name the query"))
    if result.named is None and not _ordinary_or_codec(result, measured):
        reasons.append(Reason("D3", "the bytes are not what the tokens say, and there is no manifest to tell"))
    return reasons


def _routing(result: Result, measured: Sequence[Measured]) -> list[Reason]:
    if result.kv is None:
        return [Reason("R1", "the transform gives no KV")]
    if result.selection:
        return [Reason("R2", "the result points into the ordinary objects and has no bytes of its own")]
    return []


def _connector(result: Result, measured: Sequence[Measured]) -> list[Reason]:
    problems = dict.fromkeys(one.reload for one in measured if one.reload)
    return [Reason("C1", problem) for problem in problems]


def _extended(result: Result, measured: Sequence[Measured], drifts: Sequence[Drift | None]) -> list[Reason]:
    reasons = []
    if not all(one.all_positions for one in measured):
        reasons.append(
            Reason(
                "E1", "not every token is there as it was: the result depends on tokens that its own chunk chain does not name"
            )
        )
    if any(one.query_dependent for one in measured):
        reasons.append(Reason("E2", "the result depends on the query; its manifest names it"))
    if result.codec == "raw" and not all(one.ordinary for one in measured) and not reasons:
        reasons.append(Reason("E3", "all tokens are kept with other bytes than the ordinary cache has"))
    if result.codec != "raw":
        far = [one for one in drifts if one is not None and (one.kl > KL_LIMIT or one.top1_changed > TOP1_LIMIT)]
        if far:
            text = f"codec {result.codec} drifts beyond KL {KL_LIMIT} nats or {TOP1_LIMIT:.0%} of top-1"
            reasons.append(Reason("E4", text))
    return reasons


def _ordinary_or_codec(result: Result, measured: Sequence[Measured]) -> bool:
    coded = result.codec != "raw" and all(one.all_positions for one in measured)
    return coded or all(one.ordinary for one in measured)


_MANIFEST: Final = (
    "Publish it as a variant: kvgate's manifest names source, kept positions, position map, parameters and query."
)
_ADVICE: Final = {
    (DANGEROUS, "D1"): "Fix the source of chance, or name its seed in the parameters; until then scope `request` only.",
    (DANGEROUS, "D2"): "Name the query in the manifest (uses_query), and use scope `query` or `request`.",
    (
        DANGEROUS,
        "D3",
    ): "Give it a manifest. Without one the gateway keeps it to the holder of its capability (scope `request`).",
    (ROUTING, "R1"): "Use it to choose what to read, and store nothing under a key.",
    (
        ROUTING,
        "R2",
    ): "Use it to choose which pages to read, and store nothing under a key; the ordinary objects stay shareable.",
    (
        CONNECTOR,
        "C1",
    ): "Make it a rectangle of whole chunks in the cache's own type at positions 0, 1, 2…, or write a connector that restores it.",
    (EXTENDED, "E1"): _MANIFEST,
    (EXTENDED, "E2"): _MANIFEST,
    (EXTENDED, "E3"): _MANIFEST,
    (EXTENDED, "E4"): "Keep the codec to engines that ask for it: it is in the representation, so their addresses differ.",
}
