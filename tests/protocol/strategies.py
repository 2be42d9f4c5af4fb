"""A hypothesis strategy for every message of the control protocol."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvgate.contract.record import Record
from kvgate.protocol import messages as m
from tests.contract.strategies import (
    adapter_sets,
    base_sets,
    digests,
    models,
    optional,
    plans,
    representations,
    texts,
    u64s,
)

positive = st.integers(1, 2**64 - 1)
chunk_numbers = st.integers(0, m.MAX_CHUNKS)
booleans = st.booleans()
tokens16 = st.binary(min_size=m.TOKEN_BYTES, max_size=m.TOKEN_BYTES)
handles = st.binary(min_size=m.HANDLE_BYTES, max_size=m.HANDLE_BYTES)
leases = st.binary(min_size=m.LEASE_BYTES, max_size=m.LEASE_BYTES)
digest_lists = st.lists(digests, max_size=4).map(b"".join)
references = st.binary(min_size=8, max_size=8).map(bytes.hex)
scopes = st.sampled_from(("request", "query", "prefix", "global"))
batches = st.lists(chunk_numbers, min_size=1, max_size=5).map(tuple)
numbers = st.lists(u64s, max_size=5).map(tuple)
adapters = adapter_sets | base_sets


def many(item: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A tuple of a few."""
    return st.lists(item, max_size=4).map(tuple)


PARTS: dict[type[Record], st.SearchStrategy[Any]] = {
    m.PayloadSlot: st.builds(m.PayloadSlot, chunk=u64s, offset=u64s, length=u64s, digest=digests),
    m.ReservedSlot: st.builds(
        m.ReservedSlot,
        chunk=u64s,
        status=st.sampled_from(("slot", "resident", "busy", "full")),
        reservation=u64s,
        offset=u64s,
        length=u64s,
    ),
    m.WrittenPayload: st.builds(m.WrittenPayload, reservation=u64s, digest=digests),
}
"""Records that messages are made of and that are no messages themselves."""

MESSAGES: dict[type[Record], st.SearchStrategy[Any]] = {
    m.Hello: st.builds(
        m.Hello,
        role=st.sampled_from(("worker", "scheduler", "admin", "client")),
        build=texts,
        wire_lowest=u64s,
        wire_highest=u64s,
        schema_lowest=u64s,
        schema_highest=u64s,
        credential=optional(st.binary(max_size=1024)),
    ),
    m.Welcome: st.builds(m.Welcome, build=texts, wire=u64s, schema=u64s, boot=tokens16, chunk_tokens=positive, codec=texts),
    m.Failure: st.builds(m.Failure, code=st.sampled_from(m.FAILURES), field=texts, problem=texts, remedy=texts),
    m.Done: st.builds(m.Done),
    m.RegisterWorker: st.builds(
        m.RegisterWorker,
        engine=tokens16,
        generation=u64s,
        pp_rank=u64s,
        tp_rank=u64s,
        block_tokens=positive,
        model=models(),
        representation=representations(),
        plan=plans(),
    ),
    m.Registered: st.builds(m.Registered, handle=handles, sealed=booleans, missing_ranks=u64s),
    m.OpenEngine: st.builds(m.OpenEngine, handle=handles),
    m.Opened: st.builds(m.Opened, domain=digests, token_key=digests, salt_key=digests, chunk_tokens=positive),
    m.RegisterAdapter: st.builds(m.RegisterAdapter, handle=handles, adapter=adapters),
    m.AdapterRegistered: st.builds(m.AdapterRegistered, adapter=digests, confirmed=booleans),
    m.ConfirmAdapter: st.builds(m.ConfirmAdapter, adapter=adapters),
    m.Revoke: st.builds(m.Revoke, handle=handles),
    m.Bind: st.builds(
        m.Bind,
        handle=handles,
        adapter=optional(digests),
        salt=optional(digests),
        scope=scopes,
        scope_key=optional(digests),
        manifest=optional(digests),
        tokens=digest_lists,
    ),
    m.Bound: st.builds(m.Bound, lease=leases, present=u64s, probing=booleans, reference=references, addresses=digest_lists),
    m.Acquire: st.builds(m.Acquire, lease=leases, first=chunk_numbers, last=chunk_numbers, deadline_ms=st.integers(1, 600_000)),
    m.Acquired: st.builds(m.Acquired, end=chunk_numbers),
    m.Extend: st.builds(m.Extend, lease=leases, first=chunk_numbers, tokens=digest_lists),
    m.Extended: st.builds(m.Extended, chunks=u64s),
    m.Release: st.builds(m.Release, lease=leases),
    m.Explain: st.builds(m.Explain, lease=leases),
    m.Explained: st.builds(
        m.Explained, reasons=st.lists(st.sampled_from(m.MISS_REASONS), max_size=10).map(tuple), chunk=chunk_numbers
    ),
    m.Load: st.builds(m.Load, lease=leases, chunks=batches),
    m.LoadPlan: st.builds(m.LoadPlan, ticket=u64s, pool=texts, pool_bytes=u64s, slots=many(PARTS[m.PayloadSlot])),
    m.FinishLoad: st.builds(m.FinishLoad, ticket=u64s, mismatched=numbers),
    m.LoadVerdict: st.builds(m.LoadVerdict, valid=booleans),
    m.Reserve: st.builds(m.Reserve, lease=leases, chunks=batches),
    m.Reserved: st.builds(m.Reserved, pool=texts, pool_bytes=u64s, slots=many(PARTS[m.ReservedSlot])),
    m.Commit: st.builds(m.Commit, written=many(PARTS[m.WrittenPayload]), aborted=numbers),
    m.Committed: st.builds(m.Committed, visible=u64s),
}
"""Every message."""

messages = st.one_of(*MESSAGES.values())
