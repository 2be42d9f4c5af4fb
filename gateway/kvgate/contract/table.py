"""The one table of what is identity and what is not. ``docs/contract.md`` holds the same rows; tests iterate over these.

An identity field changes an address when it alone changes; an excluded one has no place to be given in: any record refuses it by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

COMPONENTS: Final = (
    "base",
    "adapter",
    "rope",
    "numerics",
    "engine",
    "payload layout",
    "codec",
    "plan",
    "variant",
    "scope",
)
"""What a miss can name."""


@dataclass(frozen=True, slots=True)
class IdentityField:
    """One field that every address below ``level`` depends on.

    ``path`` is the dotted path that errors name too; ``[]`` stands for every index of an array. ``components`` are what a miss that
    comes from this field names; none where no stored object can be told to differ by it alone (other tokens are simply other data).
    """

    path: str
    level: str
    components: tuple[str, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class Excluded:
    """Something that must not change an address. ``names`` are spellings that every record refuses as unknown fields."""

    what: str
    names: tuple[str, ...]
    reason: str


def _rows(level: str, *rows: tuple[str, str, str]) -> tuple[IdentityField, ...]:
    return tuple(
        IdentityField(path, level, tuple(part for part in components.split(", ") if part), meaning)
        for path, components, meaning in rows
    )


_MODEL: Final = _rows(
    "root",
    ("model.base.artifacts[].role", "base", "what the loader opened the file as"),
    ("model.base.artifacts[].size_bytes", "base", "size of the file"),
    ("model.base.artifacts[].digest", "base", "BLAKE3-256 of the file"),
    (
        "model.architecture.settings[].name",
        "base",
        "a setting of the effective model configuration, or of how an adapter is applied",
    ),
    ("model.architecture.settings[].value", "base", "its value as exact text"),
    ("model.adapter.artifacts[].role", "adapter", "what the adapter loader opened the file as; no adapter is an explicit null"),
    ("model.adapter.artifacts[].size_bytes", "adapter", "size of the adapter file"),
    ("model.adapter.artifacts[].digest", "adapter", "BLAKE3-256 of the adapter file"),
    ("model.rope.kind", "rope", "rotary embedding as the engine applies it: default, yarn, llama3, none, …"),
    ("model.rope.theta", "rope", "base of the rotation, as exact text"),
    ("model.rope.rotary_dim", "rope", "rotated dimensions of a head"),
    ("model.rope.style", "rope", "which dimensions are rotated together"),
    ("model.rope.max_positions", "rope", "positions the scaling is computed for"),
    ("model.rope.parameters[].name", "rope", "a scaling setting"),
    ("model.rope.parameters[].value", "rope", "its value as exact text"),
    ("model.weight_quantization", "base", "quantisation method of the weights"),
    ("model.kv_quantization.cache_dtype", "base", "how the engine itself stores KV in its pages"),
    ("model.kv_quantization.scales", "base", "digest of the KV scales, or null"),
    ("model.multimodal", "base", "digest of the multimodal preprocessing, or null"),
    ("model.numerics.attention_backend", "numerics", "attention kernels"),
    ("model.numerics.isa", "numerics", "instruction set or GPU architecture"),
    ("model.numerics.compute_dtype", "numerics", "dtype of the computation"),
    ("model.numerics.execution", "numerics", "eager or compiled, and how"),
    ("model.numerics.lora_max_rank", "numerics", "largest LoRA rank, or null with LoRA off"),
    ("model.numerics.tensor_parallel", "numerics", "workers that split a layer"),
    ("model.numerics.pipeline_parallel", "numerics", "pipeline stages"),
    ("model.numerics.other[].name", "numerics", "another setting that changes low bits"),
    ("model.numerics.other[].value", "numerics", "its value as exact text"),
    ("model.numerics.engine.name", "engine", "the engine"),
    ("model.numerics.engine.version", "engine", "its version"),
    ("model.numerics.engine.build", "engine", "its build"),
    ("model.numerics.engine.torch", "engine", "the torch build under it"),
    (
        "model.numerics.name",
        "numerics, engine",
        "a declared class of engines, in place of all rows of numerics and engine above",
    ),
)

_STORED_FORM: Final = _rows(
    "root",
    ("representation.layout", "payload layout", "order of the payload's elements"),
    ("representation.layout_version", "payload layout", "version of that order"),
    ("representation.chunk_tokens", "payload layout", "tokens in a chunk"),
    ("representation.codec", "codec", "how payload bytes are coded"),
    ("representation.k_format.dtype", "codec", "element type of K"),
    ("representation.k_format.group", "codec", "values that share a scale of K, or null"),
    ("representation.k_format.scale_dtype", "codec", "type of those scales, or null"),
    ("representation.v_format.dtype", "codec", "element type of V"),
    ("representation.v_format.group", "codec", "values that share a scale of V, or null"),
    ("representation.v_format.scale_dtype", "codec", "type of those scales, or null"),
    ("representation.groups[].layers", "payload layout", "layers of a KV group"),
    ("representation.groups[].kv_heads", "payload layout", "KV heads of the group"),
    ("representation.groups[].head_dim_k", "payload layout", "size of a K vector"),
    ("representation.groups[].head_dim_v", "payload layout", "size of a V vector"),
    ("representation.groups[].window", "payload layout", "sliding window in tokens, or null"),
    ("plan.extents[].layers", "plan", "layers of a KV group"),
    ("plan.extents[].kv_heads", "plan", "KV heads of the group"),
    ("plan.pipeline_parallel", "plan", "pipeline stages"),
    ("plan.tensor_parallel", "plan", "workers of a stage"),
    ("plan.replication", "plan", "workers that hold an equal copy of each rectangle"),
    ("plan.rectangles[].group", "plan", "KV group of a rectangle"),
    ("plan.rectangles[].layer_start", "plan", "its first layer, counted in the group over the whole model"),
    ("plan.rectangles[].layer_end", "plan", "the layer after its last"),
    ("plan.rectangles[].head_start", "plan", "its first KV head"),
    ("plan.rectangles[].head_end", "plan", "the KV head after its last"),
    ("plan.places[].pp_rank", "plan", "stage of a worker"),
    ("plan.places[].tp_rank", "plan", "rank of the worker in its stage"),
    ("plan.places[].rectangle", "plan", "the rectangle it holds"),
)

_ACCESS: Final = _rows(
    "root",
    ("access.domain", "scope", "opaque id of the isolation domain"),
    ("access.salt", "scope", "keyed digest of the request's cache salt, or null"),
    ("access.scope", "scope", "how far the object may be reused"),
    ("access.scope_key", "scope", "request nonce or query digest of the two narrow scopes, or null"),
    ("variant.manifest", "variant", "digest of the transform manifest; null for ordinary KV"),
)

_CHAIN: Final = (
    *_rows(
        "chunk",
        ("chunk.parent", "", "address of the chunk before, or the root"),
        ("chunk.index", "", "position of the chunk in the request"),
        ("chunk.token_key", "scope", "token key of the isolation domain"),
        ("chunk.tokens[]", "", "every token of the chunk, in order"),
        ("chunk.extras[].kind", "", "a multimodal item or a prompt embedding in the chunk"),
        ("chunk.extras[].digest", "", "its full digest"),
        ("chunk.extras[].offset_tokens", "", "where it starts"),
        ("chunk.extras[].length_tokens", "", "how many tokens it covers"),
    ),
    *_rows(
        "shard",
        ("shard.chunk", "", "the chunk address"),
        ("shard.rectangle.group", "plan", "KV group of the rectangle"),
        ("shard.rectangle.layer_start", "plan", "its first layer"),
        ("shard.rectangle.layer_end", "plan", "the layer after its last"),
        ("shard.rectangle.head_start", "plan", "its first KV head"),
        ("shard.rectangle.head_end", "plan", "the KV head after its last"),
    ),
)

IDENTITY: Final[tuple[IdentityField, ...]] = (
    *_rows("root", ("schema", "", "version of this contract; it is in the context string of every digest")),
    *_MODEL,
    *_STORED_FORM,
    *_ACCESS,
    *_CHAIN,
)
"""Every identity field, from the request descriptor down to the shard."""

MANIFEST: Final[tuple[IdentityField, ...]] = _rows(
    "variant",
    ("manifest.algorithm", "variant", "what was done to the KV"),
    ("manifest.algorithm_version", "variant", "version of that; it grows with every change that may give other KV"),
    ("manifest.parameters[].name", "variant", "a setting of the algorithm"),
    ("manifest.parameters[].value", "variant", "its value as exact text"),
    ("manifest.source_prefix", "variant", "digest of the source: all its tokens, and the root they were chained from"),
    ("manifest.source_tokens", "variant", "tokens of the source"),
    ("manifest.retained.per", "variant", "whether one list of kept positions holds per model, layer, or head"),
    ("manifest.retained.layers", "variant", "lists of the kept positions: layers"),
    ("manifest.retained.heads", "variant", "lists of the kept positions: heads of a layer"),
    ("manifest.retained.tokens", "variant", "kept positions in each list; 0 where nothing was kept as it was"),
    ("manifest.retained.positions", "variant", "digest of the kept original positions"),
    ("manifest.position_map", "variant", "digest of where each of them is now"),
    ("manifest.query", "variant, scope", "digest of the query that the choice depends on, or null"),
    ("manifest.payload_format", "variant", "digest of the representation"),
    ("manifest.model", "variant", "digest of the model contract, adapter included"),
    ("manifest.scope", "variant, scope", "how far the artifact may be shared"),
)
"""Every field of a transform manifest; its digest is ``variant.manifest``. ``query`` shows in the scope too where that is ``query``."""

EXCLUDED: Final[tuple[Excluded, ...]] = (
    Excluded("request id", ("request_id", "req_id"), "two requests with one prefix are meant to share"),
    Excluded(
        "sampling parameters",
        ("sampling_params", "temperature", "top_p", "top_k", "seed", "max_tokens", "stop"),
        "they choose tokens; KV depends on the tokens chosen, and those are in the chain",
    ),
    Excluded("text of the prompt", ("prompt", "messages", "chat_template"), "the tokens made from it are in the chain"),
    Excluded(
        "scheduling limits",
        ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "async_scheduling"),
        "batch shape may move low bits inside one identity, as it does in the engine's own prefix cache",
    ),
    Excluded(
        "memory budget",
        ("gpu_memory_utilization", "num_gpu_blocks", "kv_cache_memory_bytes", "swap_space"),
        "how much is kept says nothing about what it is",
    ),
    Excluded("host and port", ("host", "port", "endpoint", "hostname"), "where an engine listens says nothing about its KV"),
    Excluded(
        "path and file names",
        ("path", "file", "filename", "download_dir", "revision"),
        "files are identified by what is in them; a path can be given other bytes",
    ),
    Excluded("model name", ("model_name", "served_model_name"), "one name can stand for other weights tomorrow"),
    Excluded(
        "adapter name and number",
        ("adapter_name", "lora_name", "lora_path", "lora_int_id"),
        "an adapter reloaded under its old name is another adapter",
    ),
    Excluded(
        "order in which files were opened", (), "an artifact set is a multiset: the loader may open its files in any order"
    ),
    Excluded(
        "the engine's block size",
        ("block_size", "block_tokens"),
        "payloads are stored in canonical order, so engines with other blocks can share",
    ),
    Excluded(
        "the engine's page layout",
        ("page_layout", "kv_cache_layout"),
        "it picks the kernel that packs; stored bytes are in canonical order",
    ),
    Excluded(
        "worker and device numbers",
        ("rank", "local_rank", "worker_id", "device", "data_parallel_rank", "data_parallel_size"),
        "rectangles are absolute numbers of layers and heads",
    ),
    Excluded(
        "registration",
        ("handle", "lease", "engine_id", "generation", "weight_epoch"),
        "what two engines loaded decides, not which of them loaded it",
    ),
    Excluded(
        "raw tenant name and raw salt",
        ("tenant", "tenant_id", "user", "cache_salt", "credential"),
        "they enter only as keyed digests, so that an address tells nothing",
    ),
    Excluded(
        "storage",
        ("backend", "l2", "pool", "pool_bytes", "offset"),
        "an object is the same object wherever it lies",
    ),
    Excluded("time", ("created_at", "timestamp", "ttl_s"), "age does not change what bytes mean"),
    Excluded("wire version and product build", ("wire", "gateway_version"), "gateway and workers are upgraded one by one"),
)
"""Everything that must not change an address, and why."""
