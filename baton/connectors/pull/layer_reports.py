"""Reports of computed layers, from a rank to the scheduler half within a step: a datagram for each layer.

    rank, after a layer --datagram--> LayerReportReceiver (a thread) --> on_report(rank, step, layers)

A rank's other reports wait for the end of the step, when a streamed prefill gains nothing by them. A datagram
may be lost: each report includes those before it, and the end of the step includes all. It cannot be forged:
the name of the socket and the key of each order are random, and known to the engine's own processes only.
Linux, within one host; elsewhere ranks cannot send, and streaming is by chunk.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baton.connectors.jobs import Jobs
from baton.transport.base.threads import join_all, start_owned_thread

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_REPORT = struct.Struct("<16sIQI")  # Key, rank, step, number of layers.
_ABSTRACT = "\0"  # Linux's namespace of sockets without a file: a killed process leaves none.


@dataclass(frozen=True, slots=True)
class LayerReportOrder:
    """Where and how a rank reports the layers of one step."""

    socket_name: str
    key: bytes
    step: int


class LayerReportReceiver:
    """Owns a thread, which sleeps until a rank reports. `on_report` is called there."""

    def __init__(self, on_report: Callable[[int, int, int], None]) -> None:
        self._on_report = on_report
        self._key = secrets.token_bytes(16)
        self._name = f"baton-layers-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._is_closing = False
        self._death: BaseException | None = None
        try:
            self._socket.bind(_ABSTRACT + self._name)
        except BaseException:
            self._socket.close()
            raise
        self._thread = start_owned_thread("baton-layers", self._run, on_death=self._note_death)

    def order(self, step: int) -> LayerReportOrder:
        return LayerReportOrder(self._name, self._key, step)

    def raise_if_dead(self) -> None:
        if self._death is not None:
            raise RuntimeError("the thread that receives reports of layers died") from self._death

    def close(self, timeout_s: float) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as waker:
            waker.settimeout(timeout_s)
            waker.sendto(b"", _ABSTRACT + self._name)
        join_all([self._thread], timeout_s)
        self._socket.close()

    def _run(self) -> None:
        while True:
            frame = self._socket.recv(_REPORT.size + 1)
            if self._is_closing:
                return
            if len(frame) != _REPORT.size:
                continue  # The datagram is not from our processes.
            key, rank, step, num_layers = _REPORT.unpack(frame)
            if hmac.compare_digest(key, self._key):
                self._on_report(rank, step, num_layers)

    def _note_death(self, error: BaseException) -> None:
        self._death = error


class LayerReporter:
    """Reports a rank's layers. On a CPU a computed layer is reported at once, in some ten microseconds.

    On a GPU a launched layer is not computed yet: there, a thread waits for the device.
    """

    def __init__(self, tp_rank: int) -> None:
        self._tp_rank = tp_rank
        self._order: LayerReportOrder | None = None
        self._num_layers = 0  # Computed layers of this step.
        self._socket: socket.socket | None = None
        self._launched: Jobs | None = None  # Layers on a GPU; its thread is started for the first.
        self._is_dead = False

    def begin(self, order: LayerReportOrder | None) -> None:
        """A step begins. None: its layers are not reported."""
        self._order = order
        self._num_layers = 0

    def layer_computed(self, layer_index: int, kv_layer: torch.Tensor) -> None:
        if self._order is None or self._is_dead or layer_index != self._num_layers:
            return  # A count names the layers only while they come in order.
        self._num_layers += 1
        if kv_layer.is_cuda:
            self._wait_for_device(self._order, kv_layer)
        else:
            self._send(self._order, self._num_layers)

    def close(self, timeout_s: float) -> None:
        self._order = None
        if self._launched is not None:
            self._launched.close(timeout_s)
            self._launched = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, order: LayerReportOrder, num_layers: int) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        report = _REPORT.pack(order.key, self._tp_rank, order.step, num_layers)
        # A full or vanished queue loses the report, never the step's time.
        with contextlib.suppress(OSError):
            self._socket.sendto(report, _ABSTRACT + order.socket_name)

    def _wait_for_device(self, order: LayerReportOrder, kv_layer: torch.Tensor) -> None:
        import torch

        # Blocking: the thread sleeps, and does not spin on a core that launches kernels.
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(kv_layer.device))
        if self._launched is None:
            self._launched = Jobs("baton-layer-events", on_death=self._fall_silent)
        self._launched.put(partial(self._report_launched, event, order, self._num_layers))

    def _report_launched(self, event: torch.cuda.Event, order: LayerReportOrder, num_layers: int) -> None:
        event.synchronize()
        self._send(order, num_layers)

    def _fall_silent(self, error: BaseException) -> None:
        """Announce progress at the end of each step from now on."""
        self._is_dead = True
        logger.error("layers are no longer reported within a step", exc_info=error)
