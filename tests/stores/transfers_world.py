"""Jobs between rows of memory and stores, whose threads run when a test lets them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from baton.stores.backends.tiers import Tiers
from baton.stores.base.aligned import AlignedMemory
from baton.stores.base.chunk_name import ChunkName
from baton.stores.base.store import Store
from baton.stores.chunks.transfer_states import Ended, Outcome, Reason
from baton.stores.chunks.transfers import Copy, Form, Threads, Transfers, TransferSettings

ROW = 5000
NUM_ROWS = 8
ENTRIES = {"row": {"dtype": "U8", "shape": (ROW,), "data_offsets": (0, ROW)}}
NAMES = ("current", b"s" * 32)
Chunk = tuple[int, int]
"""Number of a chunk, and its row."""


class ByHand:
    """Threads whose jobs run in `run`."""

    is_dead = False

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()

    def put(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def run(self) -> None:
        while self.jobs:
            self.jobs.popleft()()

    def close(self, timeout_s: float) -> None:
        self.run()


def meanwhile(store: Store, call: str, action: Callable[[], Any]) -> None:
    """`action` happens within the next such call of the store."""
    real = getattr(store, call)

    def wrapped(*args: Any) -> Any:
        setattr(store, call, real)
        action()
        return real(*args)

    setattr(store, call, wrapped)


class World:
    def __init__(
        self,
        *stores: Store,
        names: Sequence[tuple[str, bytes]] = (NAMES,),
        threads: Callable[[], Threads] = ByHand,
        held: dict[int, bytes] | None = None,
        **settings: Any,
    ) -> None:
        """`held`: bodies that need not be read, by chunk."""
        self.now = 0.0
        self.rows = [bytearray(ROW) for _ in range(NUM_ROWS)]
        self.names = names
        self.tiers = Tiers(stores, clock=lambda: self.now)
        self.threads = [threads() for _ in range(3)]
        readers, writer, ahead = self.threads
        store_timeout_s = settings.pop("store_timeout_s", 30.0)
        held = held or {}
        self.transfers: Transfers[Chunk] = Transfers(
            self.tiers,
            self.form_of,
            TransferSettings(**{"io_threads": 1, "load_timeout_s": 10.0, **settings}),
            readers=readers,
            writer=writer,
            ahead=ahead,
            store_timeout_s=store_timeout_s,
            held=lambda chunk: memoryview(held[chunk[0]]) if chunk[0] in held else None,
            clock=lambda: self.now,
        )

    def form_of(self, chunk: Chunk) -> Form:
        key = bytes([chunk[0]]) * 32
        names = [(ChunkName(namespace, key, 0), signing_key) for namespace, signing_key in self.names]
        return Form(names, ENTRIES, ROW)

    def name_of(self, number: int) -> str:
        return str(self.form_of((number, 0)).names[0][0])

    def all_names_of(self, number: int) -> list[str]:
        return [str(name) for name, _ in self.form_of((number, 0)).names]

    def install(self, chunk: Chunk, body: memoryview) -> None:
        self.rows[chunk[1]][:] = body

    def fill(self, chunk: Chunk, body: memoryview) -> None:
        body[:] = self.rows[chunk[1]]

    def load(self, job: object, *chunks: Chunk, **options: Any) -> None:
        self.transfers.load(job, chunks, self.install, **options)

    def store(self, job: object, *chunks: Chunk) -> None:
        self.transfers.store(job, [Copy(chunk, self.form_of(chunk)) for chunk in chunks], self.fill)

    def found(self, *numbers: int) -> list[bool]:
        """Tells of each chunk whether a store has it under any of its names."""
        return [any(self.tiers.find(self.all_names_of(number))) for number in numbers]

    def run(self) -> None:
        """Runs all jobs until the threads are idle."""
        while any(threads.jobs for threads in self.threads if isinstance(threads, ByHand)):
            for threads in self.threads:
                threads.run()  # type: ignore[attr-defined]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.transfers.expire(self.now)

    def ended(self) -> list[Ended[Chunk]]:
        self.run()
        return self.transfers.take_ended()

    def outcomes(self) -> list[Outcome[Chunk]]:
        """Outcomes of all jobs that have ended, without promotions."""
        return [outcome for job in self.ended() if job.kind != "promote" for outcome in job.outcomes]

    def reasons(self) -> list[Reason | None]:
        return [outcome.reason for outcome in self.outcomes()]

    def fill_stores(self, *numbers: int) -> None:
        """Stores chunks whose bytes are their number + 1, and clears the rows."""
        for number in numbers:
            self.rows[0][:] = bytes([number + 1]) * ROW
            self.store("before", (number, 0))
            assert self.reasons() == [None]
        self.rows[0][:] = bytes(ROW)

    def contents(self) -> list[int]:
        """The byte of which each row consists."""
        assert all(len(set(row)) == 1 for row in self.rows)
        return [row[0] for row in self.rows]


def damage(store: Store, name: str) -> None:
    memory = AlignedMemory().take(1 << 20)
    nbytes = store.read(name, memory)
    memory[nbytes - 1] ^= 1
    store.write(name, (memory[:nbytes],))
