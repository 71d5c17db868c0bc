"""Subscriber of an engine's KV events, which keeps the set of blocks in the engine's prefix cache.

    baton serve MODEL --kv-events-config '{"enable_kv_cache_events": true,
        "endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}'
    python examples/kv_event_subscriber.py tcp://127.0.0.1:5557 tcp://127.0.0.1:5558

The wire format is vLLM's, so this works with a vLLM engine too. A router that sends each prompt to the engine
that caches its prefix needs only `CacheView.blocks`.
"""

from __future__ import annotations

import argparse

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)
REPLAY_TIMEOUT_MS = 5000


class CacheView:
    """The blocks in one engine's cache, according to the events received so far."""

    def __init__(self) -> None:
        self.blocks: set[tuple[bytes | int, str | None, int | None]] = set()  # Hash, medium, group of layers.
        self.next_number: int | None = None  # Number of the next batch.

    def apply(self, number: int, payload: bytes) -> None:
        """Apply one batch of events: [seconds, events, data_parallel_rank]."""
        self.next_number = number + 1
        for event in msgspec.msgpack.decode(payload)[1]:
            where = event.get("medium"), event.get("group_idx")
            named = {(block, *where) for block in event.get("block_hashes", ())}
            match event["type"]:
                case "BlockStored":  # Also parent_block_hash, token_ids, block_size, ...
                    self.blocks |= named
                case "BlockRemoved":
                    self.blocks -= named
                case "AllBlocksCleared":
                    self.blocks.clear()

    def forget(self) -> None:
        """Remove all blocks: missed events may have removed any of them."""
        self.blocks.clear()


class Subscriber:
    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str = "") -> None:
        self.view = CacheView()
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.connect(endpoint)
        self._events.subscribe(topic)
        self._replay_endpoint = replay_endpoint

    def receive(self, timeout_ms: int | None = None) -> bool:
        """Receive one batch, after fetching those missed before it. False: none came in time."""
        if not self._events.poll(timeout_ms):
            return False
        _, number_bytes, payload = self._events.recv_multipart()
        number = int.from_bytes(number_bytes, "big")
        expected = self.view.next_number if self.view.next_number is not None else 0
        if number < expected:
            self.view.forget()  # The engine was restarted.
            expected = 0
        if number > expected:
            self.catch_up(expected, number)
        self.view.apply(number, payload)
        return True

    def catch_up(self, first: int, end: int) -> None:
        """Fetch batches `first` to `end` (exclusive). If one is missing, remove all blocks from the view."""
        replayed = [batch for batch in self._ask_for(first) if batch[0] < end]
        if [number for number, _ in replayed] != list(range(first, end)):
            self.view.forget()
            return
        for number, payload in replayed:
            self.view.apply(number, payload)

    def _ask_for(self, first: int) -> list[tuple[int, bytes]]:
        if self._replay_endpoint is None:
            return []
        batches: list[tuple[int, bytes]] = []
        with self._context.socket(zmq.DEALER) as replay:
            replay.connect(self._replay_endpoint)
            replay.send_multipart((b"", first.to_bytes(8, "big")))
            while replay.poll(REPLAY_TIMEOUT_MS):
                *_, number, payload = replay.recv_multipart()
                if number == END:
                    return batches
                batches.append((int.from_bytes(number, "big"), payload))
        return []

    def close(self) -> None:
        self._context.destroy(linger=0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print how many blocks an engine's prefix cache has.")
    parser.add_argument("endpoint", help="endpoint of the events, such as tcp://127.0.0.1:5557")
    parser.add_argument(
        "replay_endpoint", nargs="?", help="endpoint of the replay; without it, a gap clears the view"
    )
    arguments = parser.parse_args()
    try:
        subscriber = Subscriber(arguments.endpoint, arguments.replay_endpoint)
    except zmq.ZMQError as error:
        parser.error(f"{arguments.endpoint}: {error}")
    try:
        while subscriber.receive():
            view = subscriber.view
            print(f"batch {(view.next_number or 1) - 1}: {len(view.blocks)} blocks cached", flush=True)
    except KeyboardInterrupt:
        subscriber.close()


if __name__ == "__main__":
    main()
