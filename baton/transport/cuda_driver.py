"""Device memory that two processes share, through CUDA's driver library. The few calls that we need.

The driver's interface is the same for every CUDA version since 11.4, whichever runtime torch brings along.
Contexts are the devices' primary ones, which torch uses too.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from baton.core.errors import TransferError
from baton.core.layout import Region
from baton.transport.spans import Copies

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # The only flag that cuIpcOpenMemHandle knows.
_NON_BLOCKING = 1  # A stream that does not wait for the default one.


class SharedMemory(NamedTuple):
    """Where a region lies for another process: so far into the allocation that the handle names."""

    handle: bytes
    offset: int


class DeviceMemory(Protocol):
    """What `cuda_ipc` asks of a driver. All methods from any thread; TransferError for what fails."""

    def device_of(self, region: Region) -> int: ...

    def uuid_of(self, device: int) -> bytes:
        """Names the same piece of hardware in every process."""

    def share(self, region: Region) -> SharedMemory: ...

    def open(self, handle: bytes, device: int) -> int:
        """The address of a foreign allocation, in this process."""

    def close(self, address: int) -> None: ...

    def copy(self, copies: Copies, device: int) -> None:
        """Returns when the bytes have arrived; raises when none of them writes any more."""


class CudaDriver:
    """Raises TransferError where there is no driver or no device."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise TransferError(f"there is no CUDA driver here: {error}") from error
        self._call("cuInit", ctypes.c_uint(0))
        self._contexts: dict[int, ctypes.c_void_p] = {}
        # Devices, by the addresses of what was opened on them, once for each time: the driver opens the same
        # handle again at the same address, and lets go when it has been closed as often.
        self._opened: dict[int, list[int]] = {}
        self._lock = threading.Lock()
        self._streams = threading.local()  # One per thread and device: threads do not wait for each other.

    def device_of(self, region: Region) -> int:
        kind, _, index = region.device.partition(":")
        if kind != "cuda" or not (index or "0").isdecimal():
            raise TransferError(f"cuda_ipc reaches memory of cuda devices only, not of {region.device!r}")
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
                "a region reaches over several CUDA allocations; keep the KV cache in one "
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
        finally:  # Those before one that was refused are under way.
            self._call("cuStreamSynchronize", stream)

    def _device(self, index: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        return device

    def _enter(self, device: int) -> None:
        """Make the device's primary context the calling thread's."""
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                context = ctypes.c_void_p()
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(device))
                self._contexts[device] = context
        self._call("cuCtxSetCurrent", context)

    def _stream(self, device: int) -> ctypes.c_void_p:
        """The calling thread's. Streams and contexts live as long as the process."""
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
