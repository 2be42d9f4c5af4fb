"""Partition plans: which worker holds which rectangle of layers × KV heads, in absolute numbers."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from kvgate.contract import specs
from kvgate.contract.digests import Kind
from kvgate.contract.errors import ContractError
from kvgate.contract.record import IdentityRecord, Record, frozen

MAX_WORKERS = 1024


@frozen
class Rectangle(Record):
    """Layers ``[layer_start, layer_end)`` × KV heads ``[head_start, head_end)`` of one KV group, numbered over the whole model."""

    group: int = specs.uint(maximum=63)
    layer_start: int = specs.uint(maximum=4096)
    layer_end: int = specs.uint(maximum=4096)
    head_start: int = specs.uint(maximum=4096)
    head_end: int = specs.uint(maximum=4096)

    def validate(self) -> None:
        if self.layer_start >= self.layer_end:
            raise ContractError("layer_end", "the rectangle holds no layer", "layer_end must be above layer_start")
        if self.head_start >= self.head_end:
            raise ContractError("head_end", "the rectangle holds no head", "head_end must be above head_start")

    @property
    def layers(self) -> int:
        """How many layers."""
        return self.layer_end - self.layer_start

    @property
    def heads(self) -> int:
        """How many KV heads."""
        return self.head_end - self.head_start

    def overlaps(self, other: Rectangle) -> bool:
        """Whether both hold a common cell."""
        return (
            self.group == other.group
            and self.layer_start < other.layer_end
            and other.layer_start < self.layer_end
            and self.head_start < other.head_end
            and other.head_start < self.head_end
        )


@frozen
class Extent(Record):
    """Size of one KV group: all its layers and KV heads."""

    layers: int = specs.uint(minimum=1, maximum=4096)
    kv_heads: int = specs.uint(minimum=1, maximum=4096)


@frozen
class Place(Record):
    """One worker's place: its ranks, and the index of its rectangle in the plan (one entry a KV group it holds)."""

    pp_rank: int = specs.uint(maximum=MAX_WORKERS)
    tp_rank: int = specs.uint(maximum=MAX_WORKERS)
    rectangle: int = specs.uint(maximum=MAX_WORKERS)


@frozen
class PartitionPlan(IdentityRecord):
    """Distinct rectangles that cover every cell exactly once, and who holds each.

    ``replication`` workers hold an equal copy of each rectangle: 1, or more where KV heads are fewer than tensor-parallel
    workers. It is declared, and must be what ``places`` say.
    """

    KIND: ClassVar[Kind] = Kind.PLAN

    extents: tuple[Extent, ...] = specs.array(specs.record(Extent), minimum=1, maximum=64)
    pipeline_parallel: int = specs.uint(minimum=1, maximum=MAX_WORKERS)
    tensor_parallel: int = specs.uint(minimum=1, maximum=MAX_WORKERS)
    replication: int = specs.uint(minimum=1, maximum=MAX_WORKERS)
    rectangles: tuple[Rectangle, ...] = specs.array(specs.record(Rectangle), minimum=1, maximum=MAX_WORKERS)
    places: tuple[Place, ...] = specs.array(specs.record(Place), minimum=1, maximum=MAX_WORKERS)

    def validate(self) -> None:
        self._check_rectangles()
        self._check_places()

    def _check_rectangles(self) -> None:
        order = [(r.group, r.layer_start, r.head_start) for r in self.rectangles]
        if order != sorted(order):
            raise ContractError("rectangles", "are not in order", "sort by group, first layer, first head")
        cells = Counter[int]()
        for index, rectangle in enumerate(self.rectangles):
            if rectangle.group >= len(self.extents):
                raise ContractError(f"rectangles[{index}].group", "has no extent")
            extent = self.extents[rectangle.group]
            if rectangle.layer_end > extent.layers or rectangle.head_end > extent.kv_heads:
                raise ContractError(f"rectangles[{index}]", "reaches outside the model", "see 'extents'")
            cells[rectangle.group] += rectangle.layers * rectangle.heads
            if any(rectangle.overlaps(other) for other in self.rectangles[:index]):
                raise ContractError(f"rectangles[{index}]", "overlaps another", "declare copies with 'replication'")
        for group, extent in enumerate(self.extents):
            # No overlaps and nothing outside: equal counts mean every cell is covered.
            if cells[group] != extent.layers * extent.kv_heads:
                raise ContractError("rectangles", f"leave cells of group {group} uncovered")

    def _check_places(self) -> None:
        seen: set[tuple[int, int, int]] = set()
        holders = Counter[int]()
        for index, place in enumerate(self.places):
            if place.pp_rank >= self.pipeline_parallel or place.tp_rank >= self.tensor_parallel:
                raise ContractError(f"places[{index}]", "names a rank outside the plan")
            if place.rectangle >= len(self.rectangles):
                raise ContractError(f"places[{index}].rectangle", "is not a rectangle of the plan")
            key = (place.pp_rank, place.tp_rank, self.rectangles[place.rectangle].group)
            if key in seen:
                raise ContractError(f"places[{index}]", "gives a worker two rectangles of one group")
            seen.add(key)
            holders[place.rectangle] += 1
        if len({key[:2] for key in seen}) != self.pipeline_parallel * self.tensor_parallel:
            raise ContractError("places", "leave a worker without a rectangle")
        if [(p.pp_rank, p.tp_rank, p.rectangle) for p in self.places] != sorted(
            (p.pp_rank, p.tp_rank, p.rectangle) for p in self.places
        ):
            raise ContractError("places", "are not in order", "sort by pp rank, tp rank, rectangle")
        for rectangle in range(len(self.rectangles)):
            if holders[rectangle] != self.replication:
                raise ContractError("replication", f"rectangle {rectangle} is held by {holders[rectangle]} workers")

    def rectangles_of(self, pp_rank: int, tp_rank: int) -> tuple[int, ...]:
        """Indexes of the rectangles one worker holds."""
        return tuple(p.rectangle for p in self.places if (p.pp_rank, p.tp_rank) == (pp_rank, tp_rank))


def even_plan(*, layers: int, kv_heads: int, pipeline: tuple[tuple[int, int], ...], tensor_parallel: int) -> PartitionPlan:
    """The plan of an engine with one KV group: ``pipeline`` gives each stage's layers, heads are split evenly over ``tensor_parallel``.

    With fewer heads than workers each head is held by ``tensor_parallel // kv_heads`` of them. Raises ``ContractError`` where
    neither number divides the other.
    """
    for name, value in (("kv_heads", kv_heads), ("tensor_parallel", tensor_parallel)):
        if value < 1:
            raise ContractError(name, "is not positive")
    if len(pipeline) * tensor_parallel > MAX_WORKERS:
        raise ContractError("tensor_parallel", "gives too many workers", f"at most {MAX_WORKERS}")
    wide = max(kv_heads, tensor_parallel)
    if wide % min(kv_heads, tensor_parallel):
        raise ContractError("tensor_parallel", "does not divide the KV heads evenly")
    splits = min(kv_heads, tensor_parallel)
    per_split, replication = kv_heads // splits, tensor_parallel // splits
    rectangles = [
        Rectangle(group=0, layer_start=a, layer_end=b, head_start=s * per_split, head_end=(s + 1) * per_split)
        for a, b in pipeline
        for s in range(splits)
    ]
    places = [
        Place(pp_rank=pp, tp_rank=tp, rectangle=pp * splits + tp // replication)
        for pp in range(len(pipeline))
        for tp in range(tensor_parallel)
    ]
    return PartitionPlan(
        extents=(Extent(layers=layers, kv_heads=kv_heads),),
        pipeline_parallel=len(pipeline),
        tensor_parallel=tensor_parallel,
        replication=replication,
        rectangles=tuple(rectangles),
        places=tuple(places),
    )
