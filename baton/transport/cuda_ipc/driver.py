"""Device memory shared by two processes, through the few calls of CUDA's driver library that this needs.

The driver's interface is the same for every CUDA version since 11.4, regardless of the runtime in torch.
Contexts are the devices' primary ones, which torch uses too.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from baton.core.errors import TransferError
from baton.core.layout import Region
from baton.transport.base.spans import Copies

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # The only flag of cuIpcOpenMemHandle.
_NON_BLOCKING = 1  # A stream that does not wait for the default one.


class SharedMemory(NamedTuple):
    """Location of a region for another process: the allocation's handle, and the byte offset within it."""

    handle: bytes
    offset: int


class DeviceMemory(Protocol):
    """Driver interface for `cuda_ipc`. All methods are thread-safe and raise TransferError on failure."""

    def device_of(self, region: Region) -> int: ...

    def uuid_of(self, device: int) -> bytes:
        """16 bytes that identify the same device in every process."""

    def share(self, region: Region) -> SharedMemory: ...

    def open(self, handle: bytes, device: int) -> int:
        """Maps a foreign allocation. Returns its address in this process."""

    def close(self, address: int) -> None: ...

    def copy(self, copies: Copies, device: int) -> None:
        """Returns when all bytes have arrived; raises when no copy writes any more."""


class CudaDriver:
    """Raises TransferError if there is no driver or no device."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise TransferError(f"there is no CUDA driver here: {error}") from error
        self._call("cuInit", ctypes.c_uint(0))
        self._contexts: dict[int, ctypes.c_void_p] = {}
        # Devices by the address of what was opened on them, once per open: the driver opens the same handle
        # again at the same address, and unmaps it when it has been closed as often.
        self._opened: dict[int, list[int]] = {}
        self._lock = threading.Lock()
        # One stream per thread and device, so that threads do not wait for each other.
        self._streams = threading.local()

    def device_of(self, region: Region) -> int:
        kind, _, index = region.device.partition(":")
        if kind != "cuda" or not (index or "0").isdecimal():
            raise TransferError(f"cuda_ipc supports memory of cuda devices only, not {region.device!r}")
        return int(index or 0)

    def uuid_of(self, device: int) -> bytes:
        uuid = ctypes.create_string_buffer(16)
        self._call("cuDeviceGetUuid_v2", uuid, self._device(device))
        return uuid.raw

    def share(self, region: Region) -> SharedMemory:
        self._enter(self.device_of(region))
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        self._call(
            "cuMemGetAddressRange_v2",
            ctypes.byref(base),
            ctypes.byref(nbytes),
            ctypes.c_uint64(region.address),
        )
        offset = region.address - base.value
        if offset + region.nbytes > nbytes.value:
            raise TransferError(
                "a region spans several CUDA allocations; keep the KV cache in one "
                "(PYTORCH_CUDA_ALLOC_CONF without expandable_segments)"
            )
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return SharedMemory(bytes(handle), offset)

    def open(self, handle: bytes, device: int) -> int:
        assert len(handle) == HANDLE_BYTES
        self._enter(device)
        address = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _IpcHandle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )
        with self._lock:
            self._opened.setdefault(address.value, []).append(device)
        return address.value

    def close(self, address: int) -> None:
        with self._lock:
            times = self._opened[address]
            device = times.pop()
            if not times:
                del self._opened[address]
        self._enter(device)
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy(self, copies: Copies, device: int) -> None:
        self._enter(device)
        stream = self._stream(device)
        try:
            for local, remote, nbytes in zip(
                copies.local.tolist(), copies.remote.tolist(), copies.nbytes.tolist(), strict=True
            ):
                self._call(
                    "cuMemcpyDtoDAsync_v2",
                    ctypes.c_uint64(local),
                    ctypes.c_uint64(remote),
                    ctypes.c_size_t(nbytes),
                    stream,
                )
        finally:  # Copies before a refused one are running.
            self._call("cuStreamSynchronize", stream)

    def _device(self, index: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        return device

    def _enter(self, device: int) -> None:
        """Makes the device's primary context the calling thread's."""
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                context = ctypes.c_void_p()
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(device))
                self._contexts[device] = context
        self._call("cuCtxSetCurrent", context)

    def _stream(self, device: int) -> ctypes.c_void_p:
        """The calling thread's stream. Streams and contexts live as long as the process."""
        streams: dict[int, ctypes.c_void_p] | None = getattr(self._streams, "by_device", None)
        if streams is None:
            streams = self._streams.by_device = {}
        if device not in streams:
            stream = ctypes.c_void_p()
            self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
            streams[device] = stream
        return streams[device]

    def _call(self, name: str, *arguments: object) -> None:
        function: Callable[..., int] = getattr(self._cuda, name)
        if status := function(*arguments):
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
            raise TransferError(f"{name}: {(text.value or b'an unknown error').decode()}")


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)
