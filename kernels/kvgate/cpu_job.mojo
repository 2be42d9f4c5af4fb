"""One call's work as the host lays it out: 64-bit words, described in bindings/kvgate_kernels/native.py."""
from kvgate.cpu_copy import at

comptime LAYOUT_VEC = 0
comptime LAYOUT_AMX = 1
comptime LAYOUT_ROWS = 2  # every layout whose rows of head_dim lie whole; strides say where

comptime CODEC_RAW = 0
comptime CODEC_INT8 = 1
comptime CODEC_E4M3 = 2


@fieldwise_init
struct Job(Copyable, Movable):
    """Geometry in elements and bytes, and the addresses of the address tables."""

    var heads: Int
    var dim: Int
    var block_tokens: Int
    var chunk_tokens: Int
    var components: Int
    var layout: Int
    var element_bytes: Int
    var is_bf16: Bool
    var codec: Int
    var block_stride: Int
    var component_stride: Int
    var head_stride: Int
    var token_stride: Int
    var layer_bytes: Int
    var blocks: Int
    var pages: Int  # [layers] addresses
    var payloads: Int  # [moves] addresses
    var tables: Int  # [moves][blocks] block ids
    var skips: Int  # [moves] blocks to leave alone
    var faults: Int  # [moves] set to 1 where a value was not finite

    @staticmethod
    def read(address: UInt64) -> Job:
        """The job at an address."""
        var w = at[DType.int64](Int(address))
        return Job(
            heads=Int(w[unsafe_offset=0]),
            dim=Int(w[unsafe_offset=1]),
            block_tokens=Int(w[unsafe_offset=2]),
            chunk_tokens=Int(w[unsafe_offset=3]),
            components=Int(w[unsafe_offset=4]),
            layout=Int(w[unsafe_offset=5]),
            element_bytes=Int(w[unsafe_offset=6]),
            is_bf16=w[unsafe_offset=7] != 0,
            codec=Int(w[unsafe_offset=8]),
            block_stride=Int(w[unsafe_offset=9]),
            component_stride=Int(w[unsafe_offset=10]),
            head_stride=Int(w[unsafe_offset=11]),
            token_stride=Int(w[unsafe_offset=12]),
            layer_bytes=Int(w[unsafe_offset=13]),
            blocks=Int(w[unsafe_offset=14]),
            pages=Int(w[unsafe_offset=15]),
            payloads=Int(w[unsafe_offset=16]),
            tables=Int(w[unsafe_offset=17]),
            skips=Int(w[unsafe_offset=18]),
            faults=Int(w[unsafe_offset=19]),
        )

    def block_id(self, move: Int, index: Int) -> Int:
        """The engine's id of a chunk's index-th block."""
        return Int(at[DType.int64](self.tables)[unsafe_offset=move * self.blocks + index])

    def page(self, layer: Int) -> Int:
        """Where a layer's block 0 begins."""
        return Int(at[DType.int64](self.pages)[unsafe_offset=layer])

    def payload(self, move: Int, layer: Int) -> Int:
        """Where a layer begins in a payload."""
        return Int(at[DType.int64](self.payloads)[unsafe_offset=move]) + layer * self.layer_bytes

    def skipped(self, move: Int) -> Int:
        """Blocks in front that are held already."""
        return Int(at[DType.int64](self.skips)[unsafe_offset=move])

    def row_bytes(self) -> Int:
        """Bytes of one row of head_dim elements."""
        return self.dim * self.element_bytes

    def tokens_in(self, index: Int) -> Int:
        """Tokens of the chunk that its index-th block holds."""
        return min(self.block_tokens, self.chunk_tokens - index * self.block_tokens)

    def half(self, page: Int, block: Int, component: Int, head: Int) -> Int:
        """Where one block's K or V of one head begins; for LAYOUT_ROWS its token 0."""
        var base = page + block * self.block_stride + head * self.head_stride
        return base + component * self.component_stride
