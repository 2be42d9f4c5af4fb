"""``kvgate screen``: may the result of a transform be shared, and by which key?"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import traceback
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvgate.screen.results import ScreenError

if TYPE_CHECKING:
    from kvgate.screen.captures import Capture
    from kvgate.screen.quality import Judge
    from kvgate.screen.results import Subject
    from kvgate.screen.screening import Screening

REFERENCES: Final = ("full", "recency", "anchors-recency", "random", "snapkv", "query-aware", "k16v8", "k8v8")
_EPILOG: Final = f"""\
TRANSFORM is a reference transform ({", ".join(REFERENCES)}), `all` of them, or your own as module:name.
Without --model and --capture the KV is made up: every question but drift is answered, in seconds. Each screening says where its KV
came from.

examples:
  kvgate screen all
  kvgate screen snapkv --model MODEL_DIR --text held-out.txt --report snapkv.html
  kvgate screen mypackage.transforms:MyTransform --capture prefix.kv --json -
docs/screening.md states the questions, the classes and the rules.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``screen`` and its flags."""
    parser = commands.add_parser(
        "screen",
        help="screen a KV transform: may its results be shared, and by which key",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("transform", metavar="TRANSFORM", nargs="+", help="what to screen, see below")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="folder of a model that transformers can load: gives KV, queries and drift"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", action="append", default=[], help="held-out text, only with --model"
    )
    parser.add_argument("--capture", type=Path, metavar="FILE", action="append", default=[], help="captured KV; repeatable")
    parser.add_argument("--save-captures", type=Path, metavar="DIR", help="keep what --model captured, for later screenings")
    parser.add_argument(
        "--keep",
        type=_share,
        metavar="RATIO",
        help="kept share: of reference transforms that drop tokens (default 1/2), and the argument ratio of your own (default: its own"
        " default, else 1/2)",
    )
    parser.add_argument("--captures", type=_count, default=3, metavar="N", help="prefixes to capture with --model (default 3)")
    parser.add_argument("--prefix-tokens", type=_count, default=1536, metavar="N", help="the longest prefix (default 1536)")
    parser.add_argument("--window-tokens", type=_count, default=32, metavar="N", help="tokens of the query (default 32)")
    parser.add_argument("--scored-tokens", type=_count, default=256, metavar="N", help="tokens behind the query (default 256)")
    parser.add_argument("--chunk-tokens", type=_count, default=256, metavar="N", help="the gateway's chunk (default 256)")
    parser.add_argument("--block-tokens", type=_count, default=16, metavar="N", help="the engine's block (default 16)")
    parser.add_argument("--json", metavar="FILE", help="write the screenings as JSON; - for the terminal, instead of text")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write an HTML page with plots")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a transform that raises")


def run(args: argparse.Namespace) -> int:
    """0: screened, whatever the class. 1: could not be screened. 2: used wrongly."""
    missing = [name for name in ("torch", "kvgate_kernels") if importlib.util.find_spec(name) is None]
    if args.model is not None and importlib.util.find_spec("transformers") is None:
        missing.append("transformers")
    if missing:
        names = " and ".join(missing)
        print(f"kvgate screen: needs {names}: install kvgate[kernels], torch and, for --model, transformers", file=sys.stderr)
        return 1
    try:
        screenings = _screen(args)
        _write(args, screenings)
    except ScreenError as error:
        if args.debug and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"kvgate screen: {error}", file=sys.stderr)
        return 1
    return 0


def _screen(args: argparse.Namespace) -> list[Screening]:
    from kvgate.screen import screening
    from kvgate.screen.quality import Judge

    if args.text and args.model is None:
        raise ScreenError("--text needs --model: without one the text would not be looked at")
    subjects = _subjects(args)
    for subject in subjects:
        if subject.note:
            print(f"kvgate screen: {subject.note}", file=sys.stderr)
    model = Judge(args.model) if args.model is not None else None
    captures = _captures(args, model)
    ordinary = {one.name: model.ordinary(one) for one in captures if one.scored} if model is not None else None
    live = sys.stderr.isatty()

    def step(what: str) -> None:
        if live:
            sys.stderr.write(f"\r\x1b[K{what}")
            sys.stderr.flush()

    found = [
        screening.screen(subject, captures, block_tokens=args.block_tokens, model=model, ordinary=ordinary, step=step)
        for subject in subjects
    ]
    step("")
    return found


def _subjects(args: argparse.Namespace) -> list[Subject]:
    from kvgate.screen import subjects

    known = subjects.references(args.keep)
    found = []
    for name in dict.fromkeys(args.transform):
        if name == "all":
            found += list(known.values())
        elif ":" in name:
            found.append(subjects.own(name, args.keep))
        elif name in known:
            found.append(known[name])
        else:
            raise ScreenError(f"{name}: no reference transform ({', '.join(known)}) and not module:name")
    return found


def _captures(args: argparse.Namespace, model: Judge | None) -> list[Capture]:
    from kvgate.screen import captures
    from kvgate.screen.quality import pieces

    found = [captures.load(path) for path in args.capture]
    if model is not None and args.text:
        if args.window_tokens > args.scored_tokens:
            raise ScreenError("--scored-tokens must be at least --window-tokens")
        length = args.prefix_tokens + args.window_tokens + args.scored_tokens
        texts = pieces(model, args.text, length, args.captures)
        for index, ids in enumerate(texts):
            # Not all of one length, so that the compression ratio has a spread to show.
            prefix = max(args.chunk_tokens, args.prefix_tokens - index % 3 * args.chunk_tokens)
            other = texts[index - 1][: args.window_tokens] if len(texts) > 1 else ids[: args.window_tokens]
            behind = prefix + args.window_tokens + args.scored_tokens
            name = f"text {index + 1}"
            found.append(model.capture(name, ids[:behind], other, prefix_tokens=prefix, chunk_tokens=args.chunk_tokens))
    elif model is not None and not found:
        raise ScreenError("--model needs --text or --capture")
    if not found:
        sizes = {"tokens": 6 * args.chunk_tokens, "chunk": args.chunk_tokens}
        found = [captures.random_capture(f"made up {number}", **sizes) for number in (1, 2)]
    if args.save_captures is not None:
        args.save_captures.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number, capture in enumerate(found, 1):
            captures.save(args.save_captures / f"capture-{number}.kv", capture)
    return found


def _write(args: argparse.Namespace, screenings: Sequence[Screening]) -> None:
    from kvgate.screen import report

    value = json.dumps([one.to_json() for one in screenings], indent=1, ensure_ascii=False)
    if args.json == "-":
        print(value)
    else:
        print("\n\n".join(report.text(one) for one in screenings))
        if len(screenings) > 1:
            print("\n" + report.summary(screenings))
    try:
        if args.json and args.json != "-":
            Path(args.json).write_text(value + "\n")
        if args.report is not None:
            args.report.write_text(report.page(screenings))
    except OSError as error:
        raise ScreenError(f"{error.filename}: {error.strerror}") from error


def _share(text: str) -> Fraction:
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1, such as 1/4 or 0.25")
    return share


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 1 << 20:
        raise argparse.ArgumentTypeError(f"must be from 1 to {1 << 20}")
    return number
