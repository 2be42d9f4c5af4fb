"""A screening for people: text for a terminal, and one self-contained HTML page with its plots drawn as SVG."""

from __future__ import annotations

import html
import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import Final

from kvgate.screen.classes import CLASSES, CONNECTOR, DANGEROUS, EXTENDED, PREFIX, ROUTING
from kvgate.screen.screening import Screening

_MARKS: Final = {True: "+", False: "!", None: " "}
_COLORS: Final = {PREFIX: "#1a7f37", EXTENDED: "#0969da", CONNECTOR: "#8250df", ROUTING: "#9a6700", DANGEROUS: "#cf222e"}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 190, 58, 26
_FLOOR: Final = 1e-7  # of the drift axis: nothing drifts less than that
_CSS: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#1f2328;background:#fff}
table{border-collapse:collapse;width:100%}td,th{padding:.3rem .6rem;border-bottom:1px solid #d1d9e0;text-align:left;vertical-align:top}
.class{display:inline-block;padding:.1rem .6rem;border-radius:1rem;color:#fff;font-weight:600}
.good{color:#1a7f37}.bad{color:#cf222e}.plots{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0}figcaption{font-size:.85rem;color:#59636e}
svg{max-width:100%}svg text{font:11px system-ui,sans-serif;fill:#59636e}h2{margin-top:2.5rem}code{background:#f6f8fa;padding:0 .2rem}
"""


def text(screening: Screening) -> str:
    """For a terminal."""
    lines = [f"{screening.name}: {screening.judgement.name}", f"  KV  {screening.origin}"]
    lines += [f"  {reason.rule}  {reason.text}" for reason in screening.judgement.reasons]
    lines += textwrap.wrap(screening.judgement.advice, 110, initial_indent="  ->  ", subsequent_indent="      ")
    width = max(len(answer.question) for answer in screening.answers)
    lines += [""]
    lines += [f"  {_MARKS[one.good]} {one.question.ljust(width)}  {one.answer}" for one in screening.answers]
    return "\n".join(lines)


def summary(screenings: Sequence[Screening]) -> str:
    """Several transforms side by side, one line each."""
    rows = [("transform", "class", "ratio", "KL", "top-1 drift", "read amp.")]
    for one in screenings:
        known = [drift for drift in one.drifts if drift is not None]
        chunks = [found.read_chunks for found in one.measured if found.read_chunks is not None]
        rows.append(
            (
                one.name,
                one.judgement.name,
                f"{statistics.median(found.ratio_bytes for found in one.measured):.3f}",
                f"{statistics.mean(drift.kl for drift in known):.2e}" if known else "-",
                f"{statistics.mean(drift.top1_changed for drift in known):.2%}" if known else "-",
                f"{statistics.mean(chunks):.2f}" if chunks else "-",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def page(screenings: Sequence[Screening]) -> str:
    """One HTML page that needs nothing else."""
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>kvgate screen</title>", f"<style>{_CSS}</style>"]
    parts.append("<h1>Prefix-integrity screening</h1>")
    if len(screenings) > 1:
        parts.append(_overview(screenings))
    parts += [_section(one) for one in screenings]
    return "\n".join([*parts, "</html>"]) + "\n"


def _overview(screenings: Sequence[Screening]) -> str:
    rows = [
        f"<tr><td><a href='#{_e(one.name)}'>{_e(one.name)}</a><td>{_badge(one)}<td>{_e(one.judgement.reasons[0].text)}"
        for one in sorted(screenings, key=lambda one: CLASSES.index(one.judgement.name))
    ]
    return "<table><tr><th>Transform<th>Class<th>Because" + "".join(rows) + "</table>" + _tradeoff(screenings)


def _section(one: Screening) -> str:
    reasons = "".join(f"<li><code>{_e(reason.rule)}</code> {_e(reason.text)}" for reason in one.judgement.reasons)
    manifest = "none"
    if one.named is not None:
        settings = ", ".join(f"{name}={value}" for name, value in one.named.parameters)
        manifest = f"{one.named.algorithm}@{one.named.algorithm_version} ({settings})"
    marks = {True: "<span class=good>✓</span>", False: "<span class=bad>✗</span>", None: ""}
    rows = "".join(f"<tr><td>{_e(a.question)}<td>{marks[a.good]}<td>{_e(a.answer)}" for a in one.answers)
    plots = "".join(plot for plot in (_kept(one), _curve(one), _ratios(one)) if plot)
    return (
        f"<h2 id='{_e(one.name)}'>{_e(one.name)} {_badge(one)}</h2><p>KV: {_e(one.origin)}</p>"
        f"<p>Manifest: <code>{_e(manifest)}</code></p>"
        f"<ul>{reasons}</ul><p>{_e(one.judgement.advice)}</p><table>{rows}</table><div class=plots>{plots}</div>"
    )


def _badge(one: Screening) -> str:
    return f"<span class=class style='background:{_COLORS[one.judgement.name]}'>{_e(one.judgement.name)}</span>"


def _kept(one: Screening) -> str:
    """Heat map: how much of each stretch of the source each layer keeps, on the longest capture."""
    where = max(one.measured, key=lambda found: found.source_tokens)
    if not where.kept_where:
        return ""
    rows, columns = len(where.kept_where), len(where.kept_where[0])
    tall, wide = (_HEIGHT - _BOTTOM) / rows, (_WIDTH - _LEFT) / columns
    cells = "".join(
        f"<rect x='{_LEFT + column * wide:.1f}' y='{layer * tall:.1f}' width='{wide + 0.3:.1f}' height='{tall + 0.3:.1f}'"
        f" fill='#0969da' fill-opacity='{share:.2f}'/>"
        for layer, shares in enumerate(where.kept_where)
        for column, share in enumerate(shares)
        if share > 0
    )
    labels = _text(0, 12, "layer 0") + _text(0, _HEIGHT - _BOTTOM - 4, f"layer {rows - 1}")
    ends = _text(_LEFT, _HEIGHT - 8, "token 0") + _text(_WIDTH, _HEIGHT - 8, f"{where.source_tokens}", "end")
    return _figure(cells + labels + ends, f"Tokens kept of {where.name}: darker is more")


def _curve(one: Screening) -> str:
    """KL along the scored tokens, one line a capture."""
    curves = [drift.curve for drift in one.drifts if drift is not None]
    top = max((max(curve) for curve in curves), default=0.0)
    if not curves:
        return ""
    lines = []
    for curve in curves:
        step = (_WIDTH - _LEFT) / max(1, len(curve) - 1)
        points = " ".join(
            f"{_LEFT + index * step:.1f},{(_HEIGHT - _BOTTOM) * (1 - (value / top if top > 0 else 0)):.1f}"
            for index, value in enumerate(curve)
        )
        lines.append(f"<polyline points='{points}' fill='none' stroke='#cf222e' stroke-width='1.5' stroke-opacity='.6'/>")
    axis = _axis() + _text(_LEFT - 4, 12, f"{top:.1e}", "end") + _text(_LEFT - 4, _HEIGHT - _BOTTOM, "0", "end")
    ends = _text(_LEFT, _HEIGHT - 8, "first scored token") + _text(_WIDTH, _HEIGHT - 8, "last", "end")
    return _figure(axis + "".join(lines) + ends, "KL to the ordinary cache in nats, one line a capture")


def _ratios(one: Screening) -> str:
    """Bytes against raw and read amplification of every capture."""
    tall = min(34.0, (_HEIGHT - _BOTTOM) / len(one.measured))
    top = max([1.0, *(found.read_chunks or 0 for found in one.measured)])
    bars = []
    for index, found in enumerate(one.measured):
        y = index * tall
        figures = (("bytes", found.ratio_bytes, "#0969da"), ("read", found.read_chunks or 0.0, "#9a6700"))
        for row, (label, value, color) in enumerate(figures):
            high = y + row * tall / 2.4
            bars.append(
                f"<rect x='{_LEFT}' y='{high:.1f}' height='{tall / 2.6:.1f}' width='{(_WIDTH - _LEFT - 50) * value / top:.1f}'"
                f" fill='{color}'/>"
            )
            bars.append(_text(_LEFT + (_WIDTH - _LEFT - 50) * value / top + 4, high + tall / 3, f"{label} {value:.2f}"))
        bars.append(_text(_LEFT - 4, y + tall / 2, found.name[:9], "end"))
    return _figure("".join(bars), "Bytes against raw, and read amplification from stored chunks")


def _tradeoff(screenings: Sequence[Screening]) -> str:
    """All transforms: bytes against drift."""
    spots = []
    for one in screenings:
        known = [drift.kl for drift in one.drifts if drift is not None]
        if known:
            spots.append((one, statistics.median(found.ratio_bytes for found in one.measured), statistics.mean(known)))
    if not spots:
        return ""
    top = math.ceil(max(-3.0, *(math.log10(max(kl, _FLOOR)) for _, _, kl in spots)))
    low, high = math.log10(_FLOOR), _HEIGHT - _BOTTOM - 12
    marks, label_y = [], 0.0
    for one, ratio, kl in sorted(spots, key=lambda spot: -spot[2]):
        x = _LEFT + (_WIDTH - _LEFT - 90) * min(ratio, 1.0)
        y = 8 + high * (top - math.log10(max(kl, _FLOOR))) / (top - low)
        label_y = max(y + 4, label_y + 12)  # names of neighbours stand below each other
        marks.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{_COLORS[one.judgement.name]}'/>")
        marks.append(_text(x + 8, label_y, one.name))
    axis = _axis() + _text(_LEFT - 4, 12, f"1e{top}", "end") + _text(_LEFT - 4, _HEIGHT - _BOTTOM, f"{_FLOOR:.0e}", "end")
    ends = _text(_LEFT, _HEIGHT - 8, "0 bytes") + _text(_WIDTH - 90, _HEIGHT - 8, "as raw", "end")
    return _figure(axis + "".join(marks) + ends, "Mean KL (nats, logarithmic) against stored bytes; the colour is the class")


def _axis() -> str:
    bottom = _HEIGHT - _BOTTOM
    return f"<path d='M{_LEFT} 0V{bottom}H{_WIDTH}' fill='none' stroke='#d1d9e0'/>"


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{_e(words)}</text>"


def _figure(inside: str, caption: str) -> str:
    box = f"viewBox='0 0 {_WIDTH + 20} {_HEIGHT}' width='{_WIDTH + 20}' height='{_HEIGHT}'"
    return (
        f"<figure><svg {box} role=img aria-label='{_e(caption)}'>{inside}</svg><figcaption>{_e(caption)}</figcaption></figure>"
    )


def _e(words: str) -> str:
    return html.escape(words, quote=True)
