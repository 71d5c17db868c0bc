"""Publisher of KV events: blocks that the prefix cache stored and removed, in the wire format of vLLM 0.32
(`distributed/kv_events.py`).

    PUB      topic | number of the batch, 8 bytes big-endian | msgpack of a KVEventBatch
    ROUTER   to (identity | "" | first number wanted):
             identity | "" | topic | number | msgpack      each kept batch from that number on
             identity | "" | ""    | -1     | ""           the end

    engine thread --publish (never waits)--> queue --> publisher thread --> PUB
                                                       the last `buffer_steps` batches <--> ROUTER

A step's events are one batch. A subscriber that misses a number asks for it. If it cannot get the batch, or
the numbers start again (a new engine), it must forget this engine's blocks, because it may have missed a
removal.

Events hold token ids, and subscribers are not authenticated: the operator decides on an endpoint beyond the
loopback.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from baton.core.config import KVEventsConfig
from baton.core.errors import ConfigError
from baton.core.hosts import is_loopback
from baton.core.kv_events import KVCacheEvent, KVEventBatch

logger = logging.getLogger(__name__)

SEQUENCE_BYTES = 8
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
DATA_PARALLEL_RANK = 0  # vLLM's value for one engine.
LAST_WORDS_S = 1.0  # How long `close` waits for subscribers to take the last batches.
_QUEUE = "inproc://batches"
_BOUND_HOSTS = ("*", "::", "127.", "localhost")


class KVEventPublisher:
    """`publish` and `close` are called on the engine's thread."""

    def __init__(self, config: KVEventsConfig, clock: Callable[[], float]) -> None:
        """`clock`: seconds since the epoch. Raises ConfigError for an endpoint that cannot be used."""
        self.num_dropped = 0  # Batches that found the queue full.
        self._clock = clock
        self._topic = config.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._next = 0
        self._context = zmq.Context()
        self._remembered: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._is_dead = False
        try:
            self._open(config)
        except (zmq.ZMQError, ConfigError):
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, config: KVEventsConfig) -> None:
        self._published = self._context.socket(zmq.PUB)
        self._published.set_hwm(config.hwm)
        self.endpoint = _attach(self._published, config.endpoint, "endpoint")
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.set(zmq.SNDHWM, config.buffer_steps + 1)  # One replay fits, and is never cut short.
        self.replay_endpoint = None
        if config.replay_endpoint is not None:
            self.replay_endpoint = _attach(self._replay, config.replay_endpoint, "replay_endpoint")
        self._taken = self._context.socket(zmq.PULL)
        self._taken.set_hwm(config.max_queue_size)
        self._taken.bind(_QUEUE)
        self._queue = self._context.socket(zmq.PUSH)
        self._queue.set_hwm(1)  # The limit of the other end counts.
        self._queue.connect(_QUEUE)

    def publish(self, events: list[KVCacheEvent]) -> None:
        """Publish one batch. Never waits: if the queue is full, the batch is lost."""
        batch = KVEventBatch(ts=self._clock(), events=events, data_parallel_rank=DATA_PARALLEL_RANK)
        number = self._next.to_bytes(SEQUENCE_BYTES, "big")
        self._next += 1
        try:
            if self._is_dead:
                raise zmq.Again
            self._queue.send_multipart((number, self._encoder.encode(batch)), flags=zmq.NOBLOCK)
        except zmq.Again:
            if not self.num_dropped:
                logger.error("KV events are lost: the publisher's queue is full")
            self.num_dropped += 1

    def close(self) -> None:
        """Publish the queued batches, and end. Idempotent."""
        if self._context.closed:
            return
        if not self._is_dead:
            self._queue.setsockopt(zmq.SNDTIMEO, int(LAST_WORDS_S * 1e3))
            try:
                self._queue.send(b"")  # The end.
            except zmq.Again:
                logger.warning("the KV events' thread does not read its queue")
        self._thread.join(LAST_WORDS_S)
        if self._thread.is_alive():
            logger.warning("the KV events' thread did not end; its sockets stay open")
            return
        for socket in (self._published, self._replay, self._taken, self._queue):
            socket.close(linger=int(LAST_WORDS_S * 1e3))
        self._context.term()

    # --- The thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except zmq.ZMQError:
            logger.exception("the KV events' thread died; the engine goes on without them")
        finally:
            self._is_dead = True  # The queue has no reader any more.

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._taken, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._replay in ready:
                self._serve_replay(self._replay.recv_multipart())
            if self._taken in ready:
                match self._taken.recv_multipart():
                    case [number, batch]:
                        self._published.send_multipart((self._topic, number, batch))
                        self._remembered.append((number, batch))
                    case _:
                        return

    def _serve_replay(self, frames: list[bytes]) -> None:
        match frames:
            case [identity, b"", first] if len(first) == SEQUENCE_BYTES:
                for number, batch in self._remembered:
                    if number >= first:  # Big-endian bytes of equal length compare as the numbers do.
                        self._replay.send_multipart((identity, b"", self._topic, number, batch))
                self._replay.send_multipart((identity, b"", b"", END, b""))
            case _:
                logger.warning("ignored a malformed request for KV events")


def _attach(socket: zmq.Socket[bytes], endpoint: str, field: str) -> str:
    """Bind to addresses of this machine (vLLM's rule, and the loopback), connect to others."""
    host = endpoint.partition("://")[2]
    is_ours = host.startswith(_BOUND_HOSTS) or "::" in host or endpoint.startswith(("ipc://", "inproc://"))
    try:
        if not is_ours:
            socket.connect(endpoint)
            return endpoint
        socket.setsockopt(zmq.IPV6, "::" in host)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot be used: {error}", field=f"kv_events_config.{field}") from error
    if endpoint.startswith("tcp://") and not is_loopback(host.rpartition(":")[0].strip("[]")):
        logger.warning("KV events, which hold token ids, are readable by hosts that reach %s", endpoint)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
