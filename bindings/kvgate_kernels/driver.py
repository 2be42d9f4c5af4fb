"""The CUDA driver through ctypes: modules, launches, copies, page-locked memory. Needs libcuda.so.1 and nothing else.

Everything happens in the device's primary context, which torch uses too, so that torch's addresses and streams are valid here.
"""

from __future__ import annotations

import ctypes as C
import functools
import logging
import threading
from collections.abc import Sequence

log = logging.getLogger(__name__)

Context = C.c_void_p

_HOST_REGISTER_PORTABLE = 1
_HOST_REGISTER_MAPPED = 2
_ALREADY_REGISTERED = 712
_IPC_LAZY_PEER_ACCESS = 1
_RANGE_START, _RANGE_SIZE = 11, 12
IPC_HANDLE_BYTES = 64
MAX_PITCH_BYTES = (1 << 31) - 1
_HOST, _DEVICE = 1, 2


class DriverError(RuntimeError):
    """A CUDA driver call failed; the message has the call and the driver's own words."""


_SIDE = (
    ("x", C.c_size_t),
    ("y", C.c_size_t),
    ("type", C.c_int),
    ("host", C.c_uint64),
    ("device", C.c_uint64),
    ("array", C.c_void_p),
    ("pitch", C.c_size_t),
)


class _IpcHandle(C.Structure):
    _fields_ = (("reserved", C.c_ubyte * IPC_HANDLE_BYTES),)


class _Copy2D(C.Structure):
    """``CUDA_MEMCPY2D``."""

    _fields_ = (
        *((f"src_{name}", kind) for name, kind in _SIDE),
        *((f"dst_{name}", kind) for name, kind in _SIDE),
        ("width", C.c_size_t),
        ("height", C.c_size_t),
    )


@functools.cache
def library() -> C.CDLL:
    """libcuda, loaded once; ``DriverError`` where there is none."""
    try:
        cuda = C.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"libcuda.so.1 does not load: {error}") from error
    cuda.cuLaunchKernel.argtypes = [C.c_void_p, *[C.c_uint] * 7, C.c_void_p, C.c_void_p, C.c_void_p]
    cuda.cuMemcpyAsync.argtypes = [C.c_uint64, C.c_uint64, C.c_size_t, C.c_void_p]
    cuda.cuMemcpy2DAsync_v2.argtypes = [C.c_void_p, C.c_void_p]
    cuda.cuMemHostRegister_v2.argtypes = [C.c_void_p, C.c_size_t, C.c_uint]
    cuda.cuMemHostUnregister.argtypes = [C.c_void_p]
    cuda.cuModuleLoadData.argtypes = [C.c_void_p, C.c_char_p]
    cuda.cuModuleGetFunction.argtypes = [C.c_void_p, C.c_void_p, C.c_char_p]
    cuda.cuCtxSetCurrent.argtypes = [C.c_void_p]
    cuda.cuMemGetAddressRange_v2.argtypes = [C.c_void_p, C.c_void_p, C.c_uint64]
    cuda.cuPointerGetAttribute.argtypes = [C.c_void_p, C.c_int, C.c_uint64]
    cuda.cuIpcGetMemHandle.argtypes = [C.c_void_p, C.c_uint64]
    cuda.cuIpcOpenMemHandle_v2.argtypes = [C.c_void_p, _IpcHandle, C.c_uint]
    cuda.cuIpcCloseMemHandle.argtypes = [C.c_uint64]
    return cuda


def check(code: int, what: str) -> None:
    """``DriverError`` unless the code is success."""
    if code:
        text = C.c_char_p()
        library().cuGetErrorString(code, C.byref(text))
        raise DriverError(f"{what}: {code} {(text.value or b'unknown error').decode()}")


def current_context() -> Context:
    """The calling thread's context; ``DriverError`` if it has none."""
    context = C.c_void_p()
    check(library().cuCtxGetCurrent(C.byref(context)), "cuCtxGetCurrent")
    if not context.value:
        raise DriverError("no CUDA context is current")
    return context


def enter(context: Context) -> None:
    """Makes a context current on this thread: new threads have none."""
    check(library().cuCtxSetCurrent(context), "cuCtxSetCurrent")


class Kernel:
    """One entry point. ``signature`` has a letter per argument: q 64-bit, i 32-bit."""

    def __init__(self, code: bytes, entry: str, signature: str) -> None:
        cuda = library()
        module, function = C.c_void_p(), C.c_void_p()
        # PTX is text that ends at a zero byte; a cubin carries its own length.
        check(cuda.cuModuleLoadData(C.byref(module), code + b"\0"), f"cuModuleLoadData {entry}")
        check(cuda.cuModuleGetFunction(C.byref(function), module, entry.encode()), f"cuModuleGetFunction {entry}")
        self._module, self._function = module, function
        self._types = [C.c_int64 if letter == "q" else C.c_int32 for letter in signature]
        self._local = threading.local()

    def launch(self, grid: tuple[int, int, int], threads: int, stream: int, arguments: Sequence[int]) -> None:
        """Queues the kernel on a stream (1 is the legacy default stream)."""
        if not hasattr(self._local, "slots"):
            self._local.slots = [kind() for kind in self._types]
            self._local.pointers = (C.c_void_p * len(self._types))(*[C.addressof(slot) for slot in self._local.slots])
        for slot, value in zip(self._local.slots, arguments, strict=True):
            slot.value = value
        check(
            library().cuLaunchKernel(self._function, *grid, threads, 1, 1, 0, stream, self._local.pointers, None),
            "cuLaunchKernel",
        )


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Queues a copy between any two addresses; it overlaps with other work where host memory is page-locked."""
    check(library().cuMemcpyAsync(target, source, nbytes, stream), "cuMemcpyAsync")


@functools.cache
def _tell_once(code: int) -> None:
    log.warning("kvgate kernels: cuMemcpy2DAsync gives %d, copying row by row", code)


def copy_rows(target: int, source: int, width: int, rows: int, pitches: tuple[int, int], stream: int, *, out: bool) -> None:
    """Queues a copy of ``rows`` rows of ``width`` bytes, ``pitches`` apart (target's, source's); ``out``: from device to host."""
    if rows == 1:
        copy(target, source, width, stream)
        return
    job = _Copy2D(width=width, height=rows, src_pitch=pitches[1], dst_pitch=pitches[0])
    if out:
        job.src_type, job.src_device, job.dst_type, job.dst_host = _DEVICE, source, _HOST, target
    else:
        job.src_type, job.src_host, job.dst_type, job.dst_device = _HOST, source, _DEVICE, target
    if code := library().cuMemcpy2DAsync_v2(C.byref(job), stream):
        # Rows as long as these are beyond what some driver may take in one copy. A fault of earlier work shows again below.
        _tell_once(code)
        for row in range(rows):
            copy(target + row * pitches[0], source + row * pitches[1], width, stream)


def lock_pages(address: int, nbytes: int) -> bool:
    """Page-locks host memory, so that copies and kernels reach it. False if someone has done so already."""
    code = library().cuMemHostRegister_v2(address, nbytes, _HOST_REGISTER_PORTABLE | _HOST_REGISTER_MAPPED)
    if code == _ALREADY_REGISTERED:
        return False
    check(code, "cuMemHostRegister")
    return True


def unlock_pages(address: int) -> None:
    """Undoes ``lock_pages``."""
    check(library().cuMemHostUnregister(address), "cuMemHostUnregister")


def allocation(address: int) -> tuple[int, int]:
    """Where the device allocation that holds ``address`` begins, and its bytes. Also for memory opened by ``open_memory``."""
    base, size = C.c_uint64(), C.c_size_t()
    if library().cuMemGetAddressRange_v2(C.byref(base), C.byref(size), address):
        check(library().cuPointerGetAttribute(C.byref(base), _RANGE_START, address), "cuPointerGetAttribute")
        check(library().cuPointerGetAttribute(C.byref(size), _RANGE_SIZE, address), "cuPointerGetAttribute")
    return base.value, size.value


def share_memory(base: int) -> bytes:
    """A handle by which another process can open the allocation that begins at ``base``."""
    handle = _IpcHandle()
    check(library().cuIpcGetMemHandle(C.byref(handle), base), "cuIpcGetMemHandle")
    return bytes(handle.reserved)


def open_memory(handle: bytes) -> int:
    """Maps another process's allocation; its first byte's address here. Opening it again gives the same, and counts."""
    address = C.c_uint64()
    value = _IpcHandle.from_buffer_copy(handle)
    check(library().cuIpcOpenMemHandle_v2(C.byref(address), value, _IPC_LAZY_PEER_ACCESS), "cuIpcOpenMemHandle")
    return address.value


def close_memory(address: int) -> None:
    """Undoes one ``open_memory``. Work that uses the memory must be done."""
    check(library().cuIpcCloseMemHandle(address), "cuIpcCloseMemHandle")
