"""The first rule that applies must give the class, whatever else was measured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kvgate.screen.classes import CLASSES, CONNECTOR, DANGEROUS, EXTENDED, PREFIX, ROUTING, judge
from kvgate.screen.measure import Measured
from kvgate.screen.quality import Drift
from kvgate.screen.results import Named, Result

ORDINARY = Measured(
    name="made up",
    source_tokens=64,
    kept_tokens=64.0,
    kept_least=64,
    kept_most=64,
    tail_tokens=0,
    ratio_bytes=1.0,
    reload="",
    shape="",
    ordinary=True,
    repeat_same=True,
    query_dependent=False,
    query_in_key=None,
    anchors_kept=1.0,
    all_positions=True,
    read_blocks=1.0,
    read_chunks=1.0,
    kept_where=(),
)
NAMED = Named("some", "1", (), None)
KV = torch.zeros(1, 2, 1, 64, 8)
NO_DRIFT = Drift(kl=0.0, kl_95=0.0, top1_changed=0.0, perplexity_change=0.0, curve=(0.0,))


def result(**changes: Any) -> Result:
    """A result with a manifest."""
    values: dict[str, Any] = {"kv": KV, "token_ids": (1,) * 64, "positions": None, "named": NAMED}
    return Result(**(values | changes))


def measured(**changes: Any) -> Measured:
    """What was measured of an ordinary cache, with changes."""
    return dataclasses.replace(ORDINARY, **changes)


DROPPED: dict[str, Any] = {"ordinary": False, "all_positions": False}


@pytest.mark.parametrize(
    ("found", "made", "name", "rules"),
    [
        ({}, {}, PREFIX, ["P1"]),
        ({}, {"named": None}, PREFIX, ["P1"]),
        ({"ordinary": False}, {"codec": "k16v8", "named": None}, PREFIX, ["P1"]),
        (DROPPED, {}, EXTENDED, ["E1"]),
        (DROPPED | {"query_dependent": True, "query_in_key": True}, {}, EXTENDED, ["E1", "E2"]),
        ({"ordinary": False}, {}, EXTENDED, ["E3"]),
        (DROPPED | {"reload": "a reason"}, {}, CONNECTOR, ["C1"]),
        ({"reload": "a reason"}, {"codec": "k8v8", "named": None}, CONNECTOR, ["C1"]),
        (DROPPED | {"reload": "a reason"}, {"selection": True}, ROUTING, ["R2"]),
        (DROPPED | {"reload": "gives no KV"}, {"kv": None}, ROUTING, ["R1"]),
        ({"repeat_same": False}, {}, DANGEROUS, ["D1"]),
        (DROPPED | {"query_dependent": True, "query_in_key": False}, {}, DANGEROUS, ["D2"]),
        (DROPPED, {"named": None}, DANGEROUS, ["D3"]),
        (DROPPED | {"reload": "a reason"}, {"named": None}, DANGEROUS, ["D3"]),
        ({"repeat_same": False}, {"selection": True}, DANGEROUS, ["D1"]),
    ],
)
def test_each_rule_gives_its_class(found: dict[str, Any], made: dict[str, Any], name: str, rules: list[str]) -> None:
    """A measurement gives the class of the first rule that applies, with every reason of that class."""
    judgement = judge(result(**made), [measured(**found)], [NO_DRIFT])
    assert (judgement.name, [reason.rule for reason in judgement.reasons]) == (name, rules)
    assert judgement.advice
    assert judgement.name in CLASSES


def test_the_worst_capture_decides() -> None:
    """One capture on which the result can't be repeated is enough."""
    found = [measured(), measured(repeat_same=False), measured()]
    assert judge(result(), found, [None] * 3).name == DANGEROUS


@pytest.mark.parametrize("drift", [{"kl": 0.01}, {"top1_changed": 0.05}])
def test_a_codec_that_drifts_is_not_taken_for_the_ordinary_cache(drift: dict[str, float]) -> None:
    """A declared codec beyond the limits needs a key of its own."""
    far = dataclasses.replace(NO_DRIFT, **drift)  # type: ignore[arg-type]
    judgement = judge(result(codec="k16v8", named=None), [measured(ordinary=False)], [far])
    assert (judgement.name, judgement.reasons[0].rule) == (EXTENDED, "E4")


def test_no_amount_of_quality_makes_a_dangerous_result_safe() -> None:
    """Drift is no excuse and no remedy: what can't be named stays dangerous without any."""
    assert judge(result(named=None), [measured(**DROPPED)], [NO_DRIFT]).name == DANGEROUS
