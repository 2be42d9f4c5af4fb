"""Partition plans: every cell once, copies declared, everyone's place said; all else is refused by name."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.contract.errors import ContractError
from kvgate.contract.plan import MAX_WORKERS, PartitionPlan, Rectangle, even_plan
from tests.contract.sample import changed, sample
from tests.contract.strategies import plans, rectangles

Cell = tuple[int, int, int]


def cells(rectangle: Rectangle) -> set[Cell]:
    """The cells of one rectangle, one by one."""
    r = rectangle
    return {(r.group, layer, head) for layer in range(r.layer_start, r.layer_end) for head in range(r.head_start, r.head_end)}


def all_cells(plan: PartitionPlan) -> list[Cell]:
    """The cells of all rectangles, with repetitions."""
    return [cell for rectangle in plan.rectangles for cell in cells(rectangle)]


def model_cells(plan: PartitionPlan) -> set[Cell]:
    """The cells of the model."""
    return {
        (group, layer, head)
        for group, extent in enumerate(plan.extents)
        for layer in range(extent.layers)
        for head in range(extent.kv_heads)
    }


@given(plans())
def test_a_plan_holds_every_cell_exactly_once(plan: PartitionPlan) -> None:
    """Counted cell by cell."""
    found = all_cells(plan)
    assert len(found) == len(set(found))
    assert set(found) == model_cells(plan)


@given(plans())
def test_every_worker_has_a_place_and_every_rectangle_its_holders(plan: PartitionPlan) -> None:
    """Each rank holds at most one rectangle of a group and at least one in all; each rectangle has as many holders as declared."""
    holders = dict.fromkeys(range(len(plan.rectangles)), 0)
    for pp in range(plan.pipeline_parallel):
        for tp in range(plan.tensor_parallel):
            held = plan.rectangles_of(pp, tp)
            groups = [plan.rectangles[index].group for index in held]
            assert held
            assert len(groups) == len(set(groups))
            for index in held:
                holders[index] += 1
    assert set(holders.values()) == {plan.replication}
    assert plan.rectangles_of(plan.pipeline_parallel, 0) == ()


@given(plans(), st.data())
def test_a_rectangle_moved_by_one_makes_the_plan_wrong(plan: PartitionPlan, data: st.DataObject) -> None:
    """No plan stays valid when one edge of one rectangle moves: cells would be lost, doubled or outside."""
    index = data.draw(st.integers(0, len(plan.rectangles) - 1))
    edge = data.draw(st.sampled_from(("layer_start", "layer_end", "head_start", "head_end")))
    step = data.draw(st.sampled_from((-1, 1)))
    rectangle = plan.rectangles[index]
    written = plan.to_json()
    written["rectangles"][index][edge] = getattr(rectangle, edge) + step
    with pytest.raises(ContractError):
        PartitionPlan.from_json(written)


@given(plans(), st.data())
def test_a_plan_without_one_of_its_parts_is_wrong(plan: PartitionPlan, data: st.DataObject) -> None:
    """Dropping a rectangle or a place, or naming one twice, is refused."""
    name = data.draw(st.sampled_from(("rectangles", "places")))
    items = plan.to_json()[name]
    at = data.draw(st.integers(0, len(items) - 1))
    for wrong in (items[:at] + items[at + 1 :], items[: at + 1] + items[at:]):
        with pytest.raises(ContractError):
            PartitionPlan.from_json(plan.to_json() | {name: wrong})


@given(plans(), st.integers(1, 8))
def test_replication_is_what_the_places_say(plan: PartitionPlan, declared: int) -> None:
    """Another number of copies than there are is refused."""
    if declared != plan.replication:
        with pytest.raises(ContractError, match="replication"):
            dataclasses.replace(plan, replication=declared)


@given(plans(), st.randoms(use_true_random=False))
def test_one_order_only(plan: PartitionPlan, random: Any) -> None:
    """The same rectangles and places in another order are refused: one plan has one encoding."""
    for name in ("rectangles", "places"):
        items = plan.to_json()[name]
        random.shuffle(items)
        if items != plan.to_json()[name]:
            with pytest.raises(ContractError):
                PartitionPlan.from_json(plan.to_json() | {name: items})


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"plan.rectangles[0].head_end": 2}, "rectangles[1]", "overlaps"),
    ({"plan.rectangles[0].layer_end": 3}, "rectangles[2]", "overlaps"),
    ({"plan.rectangles[3].layer_end": 3}, "rectangles", "group 0 uncovered"),
    ({"plan.rectangles[7].layer_end": 3}, "rectangles", "group 1 uncovered"),
    ({"plan.rectangles[4].layer_start": 1}, "rectangles", "not in order"),
    ({"plan.rectangles[6].layer_start": 3, "plan.rectangles[7].layer_start": 3}, "rectangles", "group 1 uncovered"),
    ({"plan.extents[1].kv_heads": 3}, "rectangles", "group 1 uncovered"),
    ({"plan.extents[1].layers": 3}, "rectangles[6]", "outside the model"),
    ({"plan.extents[0].kv_heads": 1}, "rectangles[1]", "outside the model"),
    ({"plan.rectangles[7].head_end": 3}, "rectangles[7]", "outside the model"),
    ({"plan.rectangles[7].group": 2}, "rectangles[7].group", "no extent"),
    ({"plan.rectangles[7].group": 64}, "rectangles[7].group", "range"),
    ({"plan.rectangles[0].group": 1}, "rectangles", "not in order"),
    ({"plan.rectangles[0].layer_end": 0}, "rectangles[0].layer_end", "holds no layer"),
    ({"plan.rectangles[1].head_start": 2}, "rectangles[1].head_end", "holds no head"),
    ({"plan.rectangles[0].layer_start": -1}, "rectangles[0].layer_start", "range"),
    ({"plan.rectangles[0].head_end": 4097}, "rectangles[0].head_end", "range"),
    ({"plan.extents": [{"layers": 4, "kv_heads": 2}]}, "rectangles[4].group", "no extent"),
    ({"plan.extents": []}, "extents", "0 items"),
    ({"plan.rectangles": []}, "rectangles", "0 items"),
    ({"plan.places": []}, "places", "0 items"),
    ({"plan.extents[0].layers": 0}, "extents[0].layers", "range"),
    ({"plan.replication": 2}, "replication", "held by 1 workers"),
    ({"plan.replication": 0}, "replication", "range"),
    ({"plan.places[0].rectangle": 8}, "places[0].rectangle", "not a rectangle"),
    ({"plan.places[0].rectangle": 1025}, "places[0].rectangle", "range"),
    ({"plan.places[0].rectangle": 4}, "places[1]", "two rectangles of one group"),
    ({"plan.places[0].rectangle": 1}, "replication", "rectangle 0 is held by 0 workers"),
    ({"plan.places[0].tp_rank": 2}, "places[0]", "outside the plan"),
    ({"plan.places[7].pp_rank": 2}, "places[7]", "outside the plan"),
    ({"plan.places[0].rectangle": 4, "plan.places[1].rectangle": 0}, "places", "not in order"),
    ({"plan.pipeline_parallel": 3}, "places", "worker without a rectangle"),
    ({"plan.tensor_parallel": 3}, "places", "worker without a rectangle"),
    ({"plan.tensor_parallel": 1}, "places[2]", "outside the plan"),
    ({"plan.pipeline_parallel": 1}, "places[4]", "outside the plan"),
    ({"plan.tensor_parallel": 1024, "plan.pipeline_parallel": 1024}, "places", "worker without a rectangle"),
    ({"plan.tensor_parallel": 1025}, "tensor_parallel", "range"),
]


@pytest.mark.parametrize(("patch", "field", "problem"), REFUSED, ids=lambda part: str(part)[:48])
def test_a_wrong_plan_is_refused_by_name(patch: dict[str, Any], field: str, problem: str) -> None:
    """The error names the rectangle or place and what is wrong with it."""
    with pytest.raises(ContractError) as caught:
        PartitionPlan.from_json(changed(sample(), patch)["plan"])
    assert caught.value.field == field
    assert problem in caught.value.problem


def test_two_workers_on_one_rectangle_are_no_silent_copies() -> None:
    """Both ranks on rectangle 0 and none on rectangle 1 is refused, though each rank has a place."""
    plan = even_plan(layers=2, kv_heads=2, pipeline=((0, 2),), tensor_parallel=2)
    both = tuple(dataclasses.replace(place, rectangle=0) for place in plan.places)
    with pytest.raises(ContractError, match="replication"):
        dataclasses.replace(plan, places=both)


@given(rectangles(limit=6), rectangles(limit=6))
def test_overlap_is_a_common_cell(one: Rectangle, other: Rectangle) -> None:
    """``overlaps`` says what the cells say, both ways."""
    assert one.overlaps(other) == other.overlaps(one) == bool(cells(one) & cells(other))


@given(rectangles(limit=12))
def test_a_rectangle_knows_its_size(rectangle: Rectangle) -> None:
    """Layers times heads is the number of cells."""
    assert rectangle.layers * rectangle.heads == len(cells(rectangle))


def stages(layers: int, parts: int) -> tuple[tuple[int, int], ...]:
    """``layers`` in ``parts`` stages, the first ones larger."""
    size, extra = divmod(layers, parts)
    return tuple(itertools.pairwise(index * size + min(index, extra) for index in range(parts + 1)))


@pytest.mark.parametrize("layers", [1, 2, 4, 7, 32, 61])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("pipeline_parallel", [1, 2, 4])
def test_even_plans(layers: int, kv_heads: int, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Where one of heads and workers divides the other: every cell once, neighbours hold the copies; refused elsewhere."""
    if layers < pipeline_parallel:
        return
    arguments: dict[str, Any] = {
        "layers": layers,
        "kv_heads": kv_heads,
        "pipeline": stages(layers, pipeline_parallel),
        "tensor_parallel": tensor_parallel,
    }
    if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        with pytest.raises(ContractError, match="tensor_parallel"):
            even_plan(**arguments)
        return
    plan = even_plan(**arguments)
    assert sorted(all_cells(plan)) == sorted(model_cells(plan))
    assert plan.replication == max(1, tensor_parallel // kv_heads)
    for tp in range(tensor_parallel):
        (index,) = plan.rectangles_of(pipeline_parallel - 1, tp)
        rectangle = plan.rectangles[index]
        # The head that a worker holds is the one that an engine gives to this rank.
        assert rectangle.head_start == tp * kv_heads // tensor_parallel
        assert rectangle.heads == max(1, kv_heads // tensor_parallel)
        assert (rectangle.layer_start, rectangle.layer_end) == arguments["pipeline"][-1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_heads": 0},
        {"kv_heads": -1},
        {"tensor_parallel": 0},
        {"tensor_parallel": 10**9},
        {"tensor_parallel": MAX_WORKERS},
        {"layers": 0},
        {"layers": 5},
        {"layers": 3},
        {"pipeline": ()},
        {"pipeline": ((0, 2),)},
        {"pipeline": ((0, 2), (3, 4))},
        {"pipeline": ((0, 3), (2, 4))},
        {"pipeline": ((2, 4), (0, 2))},
        {"pipeline": ((0, 4), (4, 4))},
        {"kv_heads": 5000},
    ],
    ids=str,
)
def test_an_even_plan_of_wrong_numbers_is_refused(wrong: dict[str, Any]) -> None:
    """No division by zero, no huge plan, no gap and no overlap between stages: an error of the contract."""
    arguments: dict[str, Any] = {"layers": 4, "kv_heads": 2, "pipeline": ((0, 2), (2, 4)), "tensor_parallel": 2}
    assert even_plan(**arguments).pipeline_parallel == 2
    with pytest.raises(ContractError) as caught:
        even_plan(**arguments | wrong)
    if "tensor_parallel" in wrong:
        assert caught.value.field == "tensor_parallel"
