"""The k16v8 arithmetic, one source for CPU and GPU. docs/kernels.md states it; the torch reference defines it bit for bit.

Elements travel as their 16-bit patterns. IS_BF16 tells bfloat16 from float16. E4M3 tells fp8 codes from int8 codes.
"""
from std.math import max, min, round
from std.memory import bitcast

comptime GROUP = 32
comptime SMALLEST_SCALE = Float32(1.1754943508222875e-38)  # 2**-126
comptime SCALE_NAN = UInt16(0x7FC0)


def infinity_bits[IS_BF16: Bool]() -> UInt16:
    """The pattern of +infinity; magnitudes from it on are not finite."""
    comptime if IS_BF16:
        return UInt16(0x7F80)
    else:
        return UInt16(0x7C00)


def nan_bits[IS_BF16: Bool]() -> UInt16:
    """The one NaN pattern that decoding writes."""
    comptime if IS_BF16:
        return UInt16(0x7FC0)
    else:
        return UInt16(0x7E00)


@inline(.always)
def to_float32[W: SIMDLength, //, IS_BF16: Bool](bits: SIMD[DType.uint16, W]) -> SIMD[DType.float32, W]:
    """Exact widening."""
    comptime if IS_BF16:
        return bitcast[DType.float32, W](bits.cast[DType.uint32]() << 16)
    else:
        return bitcast[DType.float16, W](bits).cast[DType.float32]()


@inline(.always)
def to_bits16[W: SIMDLength, //, IS_BF16: Bool](x: SIMD[DType.float32, W]) -> SIMD[DType.uint16, W]:
    """Narrowing to the nearest, ties to even, kept finite; NaN becomes nan_bits."""
    comptime most = Float32(3.3895313892515355e38) if IS_BF16 else Float32(65504.0)
    var u = bitcast[DType.uint32, W](x)
    var nan = (u & 0x7FFFFFFF).gt(SIMD[DType.uint32, W](0x7F800000))
    var y = nan.select(SIMD[DType.float32, W](0), x)
    y = min(max(y, SIMD[DType.float32, W](-most)), SIMD[DType.float32, W](most))
    var narrow: SIMD[DType.uint16, W]
    comptime if IS_BF16:
        # By integers: the hardware cast exists on few CPUs, and without it the compiler's own is 16 times slower.
        var v = bitcast[DType.uint32, W](y)
        narrow = ((v + 0x7FFF + ((v >> 16) & 1)) >> 16).cast[DType.uint16]()
    else:
        narrow = bitcast[DType.uint16, W](y.cast[DType.float16]())
    return nan.select(SIMD[DType.uint16, W](nan_bits[IS_BF16]()), narrow)


@inline(.always)
def group_scale[IS_BF16: Bool, E4M3: Bool](largest: UInt16) -> Float32:
    """The scale of a group whose largest finite magnitude has this pattern: rounded up to bfloat16, at least 2**-126."""
    comptime limit = Float32(448.0) if E4M3 else Float32(127.0)
    var m = to_float32[IS_BF16](SIMD[DType.uint16, 1](largest))[0]
    var s = max(m / limit, SMALLEST_SCALE)
    return bitcast[DType.float32, 1](((bitcast[DType.uint32, 1](s) + 0xFFFF) >> 16) << 16)


@inline(.always)
def scale_bits(scale: Float32) -> UInt16:
    """A scale as stored; it is a bfloat16 already."""
    return (bitcast[DType.uint32, 1](scale) >> 16).cast[DType.uint16]()


@inline(.always)
def scale_value(bits: UInt16) -> Float32:
    """A stored scale."""
    return bitcast[DType.float32, 1](bits.cast[DType.uint32]() << 16)


@inline(.always)
def encode[W: SIMDLength, //, E4M3: Bool](x: SIMD[DType.float32, W], inverse: Float32) -> SIMD[DType.uint8, W]:
    """Codes of finite values under a group's inverse scale."""
    var scaled = x * inverse
    comptime if E4M3:
        return _to_e4m3(min(max(scaled, SIMD[DType.float32, W](-448.0)), SIMD[DType.float32, W](448.0)))
    else:
        var q = min(max(round(scaled), SIMD[DType.float32, W](-127.0)), SIMD[DType.float32, W](127.0))
        return bitcast[DType.uint8, W](q.cast[DType.int32]().cast[DType.int8]())


@inline(.always)
def decode[W: SIMDLength, //, E4M3: Bool](codes: SIMD[DType.uint8, W], scale: Float32) -> SIMD[DType.float32, W]:
    """The float32 values that codes stand for; a NaN scale gives NaN."""
    comptime if E4M3:
        return _from_e4m3(codes) * scale
    else:
        return bitcast[DType.int8, W](codes).cast[DType.int32]().cast[DType.float32]() * scale


@inline(.always)
def _to_e4m3[W: SIMDLength](x: SIMD[DType.float32, W]) -> SIMD[DType.uint8, W]:
    """Nearest e4m3, ties to even, of magnitudes up to 448. Normals round in the bits; below 2**-6 steps are 2**-9."""
    var u = bitcast[DType.uint32, W](x)
    var sign = (u >> 24) & 0x80
    var mag = u & 0x7FFFFFFF
    var normal = ((mag + 0x7FFFF + ((mag >> 20) & 1)) >> 20) - (120 << 3)
    var small = round(bitcast[DType.float32, W](mag) * Float32(512.0)).cast[DType.int32]().cast[DType.uint32]()
    var code = mag.lt(SIMD[DType.uint32, W](0x3C800000)).select(small, normal)
    return (sign | code).cast[DType.uint8]()


@inline(.always)
def _from_e4m3[W: SIMDLength](codes: SIMD[DType.uint8, W]) -> SIMD[DType.float32, W]:
    """Exact widening; 0x7F and 0xFF are NaN."""
    var c = codes.cast[DType.uint32]()
    var sign = (c & 0x80) << 24
    var mag = c & 0x7F
    var normal = (mag << 20) + (120 << 23)
    var small = bitcast[DType.uint32, W](mag.cast[DType.int32]().cast[DType.float32]() * Float32(1.0 / 512.0))
    var value = mag.lt(SIMD[DType.uint32, W](8)).select(small, normal)
    value = mag.eq(SIMD[DType.uint32, W](0x7F)).select(SIMD[DType.uint32, W](0x7FC00000), value)
    return bitcast[DType.float32, W](sign | value)
