"""The stored objects of a chunk: one a rectangle of the plan."""

from __future__ import annotations

from kvgate.contract.address import shard_address
from kvgate.daemon.leases import Lease, Place
from kvgate.daemon.registry import Registration
from kvgate.storage.backend import ObjectRef


def shard_refs(registration: Registration, chunk: bytes, domain: bytes | None = None) -> list[ObjectRef]:
    """The stored objects of one chunk, one a rectangle of the plan, in the plan's order. ``domain`` None: the registration's."""
    form, domain = registration.form, domain or registration.domain
    return [
        ObjectRef(shard_address(chunk, rectangle), object_bytes, domain)
        for rectangle, object_bytes in zip(form.plan.rectangles, form.object_bytes, strict=True)
    ]


def shard_ref(registration: Registration, chunk: bytes, rectangle: int, domain: bytes | None = None) -> ObjectRef:
    """One of them: that of the plan's ``rectangle``-th."""
    form = registration.form
    address = shard_address(chunk, form.plan.rectangles[rectangle])
    return ObjectRef(address, form.object_bytes[rectangle], domain or registration.domain)


def refs_in(lease: Lease, place: Place, index: int) -> list[ObjectRef]:
    """Those of the lease's chunk ``index`` in one of its places."""
    return shard_refs(lease.registration, place.chunks[index], place.domain)
