"""The engine core in a process of its own: a loop around `EngineCore.step`, with the front end on a socket.

    while alive:  take messages -> step if there is a reason -> hand the outputs over without waiting

HTTP cannot block a step: outputs that the front end does not take wait in the channel. An idle loop uses no
CPU: without requests it sleeps until a message arrives, and after a step without effect it waits
(`baton.engine.core.step_waits`).

The process ends on Stop, on SIGTERM, and when the front end is gone; it shuts connector halves and ranks down
first.

A rank's death fails the open requests. Then the process ends, with a status other than 0, or restarts ranks,
cache and connector (`on_rank_death`). The front end takes no requests meanwhile.
"""

from __future__ import annotations

import gc
import logging
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

import msgspec

from baton.checkpoints.checkpoint import weights_digest
from baton.core.config import EngineConfig
from baton.core.errors import UserError
from baton.engine.api import EngineOutputs, SchedulerStats
from baton.engine.core import core_messages as messages
from baton.engine.core.core_messages import FromCore, Start, ToCore
from baton.engine.core.engine_core import EngineCore
from baton.engine.core.step_waits import IDLE_S, StepWaits, Waker
from baton.engine.executor import ExecutorDied
from baton.engine.process.channel import Channel, ChannelClosed

logger = logging.getLogger(__name__)

START_MESSAGE_S = 60.0  # The front end sends it right after it has started this process.
LAST_WORDS_S = 5.0
RESTARTS_MAX = 3  # Most restarts within RESTARTS_WITHIN_S. One more death of a rank ends the engine.
RESTARTS_WITHIN_S = 600.0
# How long a computing thread may keep the interpreter from the threads that renew leases and read requests.
# Python's default of 5 ms, once on either side, would be most of a handoff's time.
SWITCH_S = 0.0005


class Stopping(Exception):
    """A request to end; the text names its source."""


class CoreLoop:
    def __init__(self, core: EngineCore, channel: Channel, stop_signal: StopSignal, waker: Waker) -> None:
        self._core = core
        self._channel = channel
        self._stop_signal = stop_signal
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._last_stats: SchedulerStats | None = None
        self._drained_by_s: float | None = None  # Set while the front end waits for a Drained.
        self._waits = StepWaits(core, waker)

    def run(self) -> None:
        """Raises Stopping, ChannelClosed, or the exception that ended the engine."""
        while True:
            self._take_messages()
            self._report_drained()
            if not self._core.has_requests:
                self._wait(None)
                continue
            outputs = self._core.step()
            self.hand_over(outputs)
            if (end := self._core.take_update_end()) is not None:
                self._send(messages.WeightsUpdated(end, self._core.introduction()))
            if wait_s := self.next_wait_s():
                self._wait(wait_s)
            elif self._channel.has_unsent:
                self._channel.flush_nowait()

    def _take_messages(self) -> None:
        if self._stop_signal.is_set:
            raise Stopping("it was told to end (SIGTERM)")
        for payload in self._channel.receive_nowait():
            match self._decoder.decode(payload):
                case messages.AddRequest(request):
                    if (refusal := self._core.add_request(request)) is not None:
                        self._send(messages.Outputs(EngineOutputs(outputs=[refusal])))
                case messages.Abort(request_id):
                    self._core.abort(request_id)
                case messages.TakeBack(params):
                    self._core.scheduler.connector.take_back(params)
                case messages.Ping():
                    self._send(messages.Pong())
                case messages.Drain(timeout_s):
                    self._drained_by_s = time.monotonic() + timeout_s
                    self._core.drain(timeout_s)
                case messages.UpdateWeights(update):
                    self._core.begin_update(update)
                case messages.Stop():
                    raise Stopping("it was closed")
                case Start():
                    raise AssertionError("started twice")

    def _report_drained(self) -> None:
        if self._drained_by_s is None:
            return
        is_whole = self._core.is_drained
        if is_whole or time.monotonic() >= self._drained_by_s:
            self._drained_by_s = None
            self._send(messages.Drained(is_whole))

    @property
    def is_draining(self) -> bool:
        return self._drained_by_s is not None

    def hand_over(self, outputs: EngineOutputs) -> None:
        # Empty steps may come a thousand times a second; their unchanged stats are not sent.
        if outputs.outputs or self._core.num_scheduled_tokens or self._is_news(outputs.stats):
            self._send(messages.Outputs(outputs))
        if outputs.stats is not None:  # Stats are None if no result has come.
            self._last_stats = outputs.stats

    def hand_over_death(self, death: ExecutorDied) -> None:
        self._send(messages.Restarting(str(death), self._core.fail_all(death).outputs))

    def _is_news(self, stats: SchedulerStats | None) -> bool:
        """Whether to send the stats. Counts of this step are news even if the last step's were equal."""
        return stats is not None and bool(
            stats != self._last_stats
            or stats.num_preempted
            or stats.num_kv_load_failures
            or stats.num_kv_connector_errors
            or stats.external_prefix_cache_queries
            or stats.kv_connector_stats
        )

    def _send(self, message: FromCore) -> None:
        self._channel.send_nowait(self._encoder.encode(message))

    def next_wait_s(self) -> float:
        """The wait after a step; 0 if the next one may have more to do."""
        wait_s = self._waits.next_wait_s()
        return min(wait_s, IDLE_S) if self.is_draining else wait_s  # Nothing wakes the loop at a drain's end.

    def _wait(self, timeout_s: float | None) -> None:
        """Wait until a message arrives, a rank dies, or the time is over. None: the engine is idle."""
        if timeout_s is not None and not self._core.has_requests:
            return
        events = select.POLLIN | (select.POLLOUT if self._channel.has_unsent else 0)
        self._waits.wait(
            timeout_s, {self._channel.fileno(): events, self._stop_signal.fileno(): select.POLLIN}
        )
        if self._channel.has_unsent:
            self._channel.flush_nowait()


class StopSignal:
    """SIGTERM as a pollable event: a handler that raises could interrupt a step."""

    def __init__(self) -> None:
        self.is_set = False
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._read.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno())
        signal.signal(signal.SIGTERM, self._note)

    def fileno(self) -> int:
        return self._read.fileno()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._read.close()
        self._write.close()


def main(end: socket.socket) -> None:
    """Entry point of the process; see `baton.engine.core.client`."""
    sys.setswitchinterval(SWITCH_S)
    channel = Channel(end)
    stop_signal = StopSignal()
    try:
        started = _start(channel)
        if started is not None:
            _run(*started, channel, stop_signal)
    finally:
        stop_signal.close()


def _start(channel: Channel) -> tuple[EngineCore, Start] | None:
    try:
        if not channel.wait_readable(START_MESSAGE_S):
            raise TimeoutError("the front end sent no configuration")
        payloads: list[bytes] = []
        while not payloads:
            payloads = channel.receive_nowait()
        start = msgspec.msgpack.decode(payloads[0], type=Start)
        core = EngineCore(start.config, start.connector_factory)
    except ChannelClosed:
        return None
    except Exception as error:  # This process ends; the front end gets the reason.
        if not isinstance(error, UserError):  # The front end shows a UserError's text, which is enough.
            logger.exception("the engine core could not start")
        _send_last(channel, messages.StartFailed(_text(error), isinstance(error, UserError)))
        sys.exit(1)
    # Objects that exist now live as long as the process; the collector need not visit them again.
    gc.collect()  # Garbage that is frozen is never freed, and here it could hold weights.
    gc.freeze()
    channel.send_nowait(msgspec.msgpack.encode(messages.Started(core.introduction())))
    return core, start


def _run(core: EngineCore, start: Start, channel: Channel, stop_signal: StopSignal) -> None:
    restarts = Restarts(start.config.parallel_config.on_rank_death == "restart")
    while True:
        death = _run_until_a_rank_dies(core, channel, stop_signal, restarts)
        if death is None:
            return
        channel.flush(LAST_WORDS_S)
        core = _restart(core.config, start.connector_factory, channel)
        channel.send_nowait(msgspec.msgpack.encode(messages.Restarted(core.introduction())))


def _restart(config: EngineConfig, connector_factory: str | None, channel: Channel) -> EngineCore:
    """Start new ranks, cache and connector halves, with a new epoch, which no old ticket names."""
    try:
        folder = config.model_config.model
        if weights_digest(folder) != config.model_config.weights_digest:
            raise UserError(f"the weights in {folder} are others than those that were loaded", field="model")
        return EngineCore(config, connector_factory)
    except Exception as error:  # This process ends; the front end gets the reason.
        logger.exception("the engine core could not start its ranks anew")
        _send_last(channel, messages.Stopped(f"it could not start its ranks anew: {_text(error)}"))
        sys.exit(1)


class Restarts:
    """Limit of restarts: ranks that die too often are not restarted."""

    def __init__(self, is_wanted: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_wanted = is_wanted
        self._clock = clock
        self._times: deque[float] = deque(maxlen=RESTARTS_MAX)

    def may_restart(self) -> bool:
        """Whether a restart is allowed; counts it if so."""
        now = self._clock()
        is_worn_out = len(self._times) == RESTARTS_MAX and now - self._times[0] < RESTARTS_WITHIN_S
        if not self._is_wanted or is_worn_out:
            return False
        self._times.append(now)
        return True


def _run_until_a_rank_dies(
    core: EngineCore, channel: Channel, stop_signal: StopSignal, restarts: Restarts
) -> ExecutorDied | None:
    """Returns the death if the engine is to restart, None after an orderly end. Shuts the core down."""
    waker = Waker()
    loop = CoreLoop(core, channel, stop_signal, waker)
    try:
        loop.run()
    except ExecutorDied as death:
        logger.error("%s", death)
        if loop.is_draining or not restarts.may_restart():
            _send_last(channel, messages.Stopped(_text(death)))
            sys.exit(1)
        loop.hand_over_death(death)
        return death
    except Stopping as stopping:
        _send_last(channel, messages.Stopped(str(stopping)))
    except ChannelClosed:
        logger.warning("the front end is gone; ending")
    except Exception as error:  # This process ends; the front end gets the reason.
        logger.exception("the engine core cannot continue")
        _send_last(channel, messages.Stopped(_text(error)))
        sys.exit(1)
    finally:
        core.shutdown()
        waker.close()  # The core's threads use the waker, so it is closed last.
    return None


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _send_last(channel: Channel, message: FromCore) -> None:
    try:
        channel.send_nowait(msgspec.msgpack.encode(message))
        channel.flush(LAST_WORDS_S)
    except ChannelClosed:
        logger.warning("the front end is gone; not sent: %s", message)
