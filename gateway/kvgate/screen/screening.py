"""One screening from end to end: captures in, answers and a class out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from kvgate import __version__
from kvgate.screen.captures import Capture
from kvgate.screen.classes import KL_LIMIT, TOP1_LIMIT, Judgement, judge
from kvgate.screen.measure import ANCHOR_TOKENS, Measured, take
from kvgate.screen.quality import Drift, Judge
from kvgate.screen.results import Named, Result, ScreenError, Subject, broken
from kvgate.transforms.base import PrefixKv, TransformError, Window
from kvgate.transforms.rotary import Rotary

SCHEMA: Final = "kvgate-screening-1"


@dataclass(frozen=True, slots=True)
class Answer:
    """One question of the screening. ``good``: None where neither answer is better, or where it was not measured."""

    question: str
    answer: str
    good: bool | None = None


@dataclass(frozen=True, slots=True)
class Screening:
    """Everything found out about one transform."""

    name: str
    named: Named | None
    judgement: Judgement
    answers: tuple[Answer, ...]
    measured: tuple[Measured, ...]
    drifts: tuple[Drift | None, ...]
    chunk_tokens: int
    block_tokens: int
    origins: tuple[str, ...]

    @property
    def origin(self) -> str:
        """Where the KV came from."""
        return "; ".join(dict.fromkeys(self.origins))

    def to_json(self) -> dict[str, Any]:
        """As a JSON object. It holds no token and no KV."""
        return {
            "schema": SCHEMA,
            "build": f"kvgate {__version__}",
            "transform": self.name,
            "kv": self.origin,
            "manifest": self.named.to_json() if self.named is not None else None,
            "class": self.judgement.name,
            "reasons": [asdict(reason) for reason in self.judgement.reasons],
            "advice": self.judgement.advice,
            "answers": [asdict(answer) for answer in self.answers],
            "limits": {"kl": KL_LIMIT, "top1_changed": TOP1_LIMIT},
            "chunk_tokens": self.chunk_tokens,
            "block_tokens": self.block_tokens,
            "captures": [
                asdict(one) | {"kv": origin, "drift": asdict(drift) if drift is not None else None}
                for one, origin, drift in zip(self.measured, self.origins, self.drifts, strict=True)
            ],
        }


def screen(
    subject: Subject,
    captures: Sequence[Capture],
    *,
    block_tokens: int,
    model: Judge | None = None,
    ordinary: Mapping[str, Any] | None = None,
    step: Callable[[str], None] = lambda _what: None,
) -> Screening:
    """Screen ``subject`` on all captures. ``ordinary``: the scores of each capture by name, where several subjects share them.

    Raises ``ScreenError`` where the transform refuses a capture or breaks.
    """
    if not captures:
        raise ScreenError("there is nothing to screen on")
    measured: list[Measured] = []
    drifts: list[Drift | None] = []
    result = None
    guarded = _guarded(subject)
    for capture in captures:
        step(f"{subject.name}: {capture.name}")
        try:
            one, result = take(guarded, capture, block_tokens)
        except TransformError as error:
            raise ScreenError(f"{subject.name} refuses {capture.name}: {error}") from error
        except ScreenError:
            raise
        except Exception as error:
            raise broken(subject.name, "gave a result that can't be measured", error) from error
        measured.append(one)
        drift = None
        if model is not None and capture.scored:
            base = ordinary[capture.name] if ordinary is not None else model.ordinary(capture)
            drift = model.drift(capture, result, base)
        drifts.append(drift)
    assert result is not None, "captures are not empty"
    judgement = judge(result, measured, drifts)
    answers = _answers(measured, drifts, result.named, block_tokens)
    chunk_tokens = captures[0].source.chunk_tokens
    return Screening(
        name=subject.name,
        named=result.named,
        judgement=judgement,
        answers=answers,
        measured=tuple(measured),
        drifts=tuple(drifts),
        chunk_tokens=chunk_tokens,
        block_tokens=block_tokens,
        origins=tuple(capture.origin for capture in captures),
    )


def _guarded(subject: Subject) -> Subject:
    """The subject, whose run says in one line what it raised."""

    def run(source: PrefixKv, rotary: Rotary, window: Window | None) -> Result:
        try:
            return subject.run(source, rotary, window)
        except (TransformError, ScreenError):
            raise
        except Exception as error:  # a user's code: whatever it raises
            raise broken(subject.name, "raised an error", error) from error

    return replace(subject, run=run)


def _answers(
    measured: Sequence[Measured], drifts: Sequence[Drift | None], named: Named | None, block_tokens: int
) -> tuple[Answer, ...]:
    reload = next((one.reload for one in measured if one.reload), "")
    shape = next((one.shape for one in measured if one.shape), "")
    depends = any(one.query_dependent for one in measured)
    names_query = named is not None and named.query is not None
    in_key = not any(one.query_in_key is False for one in measured)
    anchors = [one.anchors_kept for one in measured if one.anchors_kept is not None]
    tails = [one.tail_tokens for one in measured]
    ratios = [one.ratio_bytes for one in measured]
    blocks = [one.read_blocks for one in measured if one.read_blocks is not None]
    chunks = [one.read_chunks for one in measured if one.read_chunks is not None]
    known = [drift for drift in drifts if drift is not None]
    heads = max(one.kept_most - one.kept_least for one in measured)
    found = [
        Answer(
            "Reloadable?", "yes: payload and other pages gave every byte back" if not reload else f"no: {reload}", not reload
        ),
        Answer("Shape and layout kept?", "yes" if not shape else f"no: {shape}", not shape),
        _yes("Same bytes on repeating the same query?", all(one.repeat_same for one in measured)),
        Answer("Query-dependent?", _depends_text(measured)),
        Answer(
            "Is the query in the key?",
            "yes: the manifest names it"
            if names_query and in_key
            else "no: it names none"
            if named is not None
            else "no manifest",
            in_key if depends else None,
        ),
        Answer(
            f"Anchor tokens kept? (first {ANCHOR_TOKENS}, all layers and heads)",
            f"{min(anchors):.0%}" if anchors else "not told: the result names no positions",
            min(anchors) == 1 if anchors else None,
        ),
        Answer(
            "Partial blocks?", f"yes: up to {max(tails)} tokens beyond whole chunks" if any(tails) else "no", not any(tails)
        ),
        Answer(
            "Compression ratio and its spread (bytes against raw)",
            f"{statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}; heads differ by {heads} tokens",
        ),
        Answer(
            f"Read amplification, from pages of {block_tokens} / from stored chunks",
            f"{statistics.mean(blocks):.2f} / {statistics.mean(chunks):.2f}" if blocks else "not told: no positions",
        ),
        Answer("KL to the ordinary cache (nats; mean, 95th percentile)", _drift_text(known)),
        Answer("Top-1 drift", f"{statistics.mean(one.top1_changed for one in known):.2%}" if known else "not measured"),
        Answer(
            "Change of perplexity",
            f"{statistics.mean(one.perplexity_change for one in known):+.2%}" if known else "not measured",
        ),
    ]
    return tuple(found)


def _yes(question: str, answer: bool) -> Answer:
    return Answer(question, "yes" if answer else "no", answer)


def _depends_text(measured: Sequence[Measured]) -> str:
    if any(one.query_dependent for one in measured):
        return "yes"
    if not all(one.repeat_same for one in measured):
        return "can't be told: one query gives different bytes already"
    return "not measured: a capture has no second window" if any(one.query_dependent is None for one in measured) else "no"


def _drift_text(known: Sequence[Drift]) -> str:
    if not known:
        return "not measured"
    mean, high = statistics.mean(one.kl for one in known), statistics.mean(one.kl_95 for one in known)
    return f"{mean:.2e}, {high:.2e}"
