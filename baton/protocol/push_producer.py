"""Producer half of push: announces what is ready while it computes, and the ticket when the prefill ends.

    prefill:  expect --> COMPUTING --progress--> COMPUTING --preempted--> COMPUTING, in the next run
              COMPUTING --finished--> FINISHED (lent)      COMPUTING --failed, outdated--> FAILED
    want:     Want --> HELD, until Withdraw or hold_s without another;  or without a prefill: Failed

The two meet by `transfer_id`, in either order, if they are about the same prompt. One prefill serves one
want. Nothing here is a promise: an announcement may be stale when it arrives, and only the loan that the
ticket names (pull_producer) holds the blocks. So every message may be repeated, lost and late. A record may
be forgotten at any time, which costs the consumer a recompute and nothing else.

`run` decides whether early reads count. It is new for every prefill and whenever blocks are freed, and this
incarnation never reuses it. So all blocks announced in the run of `Finished` have been held, unmodified,
since they were announced.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.ids import Address, PromptHash, TransferId
from baton.core.timers import Timers
from baton.protocol.effects import Send, Unwanted
from baton.protocol.messages import (
    MAX_REASON_CHARS,
    Announced,
    BlockTables,
    Failed,
    Finished,
    Message,
    Want,
    Withdraw,
    Working,
)

NEVER = float("inf")
WANTS_MAX = 4096  # Held at once; further ones are answered with Failed.
WANTS_PER_CONSUMER_MAX = 1024  # So that no consumer takes the room of the others.
NEW_WEIGHTS = "the producer's weights have changed"


class Ready(NamedTuple):
    """What is ready to be read; the fields of `Announced`."""

    num_tokens: int
    block_ids: BlockTables
    partial_tokens: int = 0
    partial_layers: int = 0
    first_blocks: tuple[int, ...] = ()


@dataclass(slots=True)
class _Prefill:
    prompt_hash: PromptHash
    num_tokens: int
    run: int
    ready: Ready | None = None
    ticket: str | None = None
    failure: str | None = None
    ended_at: float = NEVER


@dataclass(slots=True)
class _Want:
    consumer: Address
    number: int
    prompt_hash: PromptHash
    num_tokens: int
    asked_at: float  # First Want received.
    heard_at: float  # Last Want received.
    over: str | None = None  # Why it ended, in words for the consumer. Kept to repeat the answer.
    is_withdrawn: bool = False


class PushProducer:
    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._prefills: dict[TransferId, _Prefill] = {}
        self._wants: dict[TransferId, _Want] = {}
        self._num_wants_of: Counter[Address] = Counter()
        self._num_runs = 0
        self._wake_at = NEVER  # No record ends before this, so that not every Want needs a scan.

    # --- The engine's prefills --------------------------------------------------------------------

    def expect(
        self, transfer_id: TransferId, prompt_hash: PromptHash, num_tokens: int, now: float
    ) -> list[Send] | None:
        """A prefill of this transfer has come. None if one computes already; serve this one without push."""
        if self._computing(transfer_id) is not None:
            return None
        self._prefills[transfer_id] = _Prefill(prompt_hash, num_tokens, self._new_run())
        return self._notify(transfer_id, now)

    def progress(
        self,
        transfer_id: TransferId,
        num_tokens: int,
        block_ids: BlockTables,
        now: float,
        *,
        partial_tokens: int = 0,
        partial_layers: int = 0,
        first_blocks: tuple[int, ...] = (),
    ) -> list[Send]:
        """This much is computed and stays in place, unless `preempted` comes before `finished`."""
        prefill = self._computing(transfer_id)
        if prefill is None:
            return []
        prefill.ready = Ready(num_tokens, block_ids, partial_tokens, partial_layers, first_blocks)
        return self._notify(transfer_id, now)

    def preempted(self, transfer_id: TransferId, now: float) -> list[Send]:
        """Blocks were freed or will be overwritten. Call it before another request can get them."""
        prefill = self._computing(transfer_id)
        if prefill is None:
            return []
        # Announces at once that the old run is void. The new run has nothing to read yet.
        prefill.run, prefill.ready = self._new_run(), Ready(0, ())
        return self._notify(transfer_id, now)

    def finished(self, transfer_id: TransferId, ticket: str, now: float) -> list[Send]:
        """The blocks of this run are lent, under this ticket."""
        prefill = self._computing(transfer_id)
        if prefill is None:
            return []
        prefill.ticket, prefill.ready, prefill.ended_at = ticket, None, now
        self._wake_at = min(self._wake_at, self._prefill_ends(transfer_id))
        return self._notify(transfer_id, now)

    def failed(self, transfer_id: TransferId, reason: str, now: float) -> list[Send]:
        prefill = self._computing(transfer_id)
        if prefill is None:
            return []
        prefill.failure, prefill.ready, prefill.ended_at = reason[:MAX_REASON_CHARS], None, now
        self._wake_at = min(self._wake_at, self._prefill_ends(transfer_id))
        return self._notify(transfer_id, now)

    def outdated(self, transfer_id: TransferId, now: float) -> list[Send]:
        """The weights have changed: this prefill began with others, and will not be lent."""
        return self.failed(transfer_id, NEW_WEIGHTS, now)

    def is_unwanted(self, transfer_id: TransferId) -> bool:
        """Whether the consumer that waited for this prefill has withdrawn, and no other has come since."""
        want = self._wants.get(transfer_id)
        return want is not None and want.is_withdrawn

    # --- Messages and time ------------------------------------------------------------------------

    def receive(self, sender: Address, message: Message, now: float) -> Sequence[Send | Unwanted]:
        match message:
            case Want():
                return [*self.wake(now), *self._wanted(sender, message, now)]
            case Withdraw():
                return self._withdrawn(sender, message)
            case _:
                return []  # Not for a producer.

    def wake(self, now: float) -> list[Send]:
        if now < self._wake_at:
            return []
        sends: list[Send] = []
        for transfer_id, want in [entry for entry in self._wants.items() if now >= self._want_ends(*entry)]:
            if want.over is not None or transfer_id in self._prefills:
                self._forget_want(transfer_id)
                continue
            want.heard_at = now  # So that Wants still on their way get the same answer.
            sends.append(self._failed(transfer_id, want, "no prefill of this transfer came"))
        for transfer_id in [name for name in self._prefills if now >= self._prefill_ends(name)]:
            del self._prefills[transfer_id]
        self._wake_at = self.next_deadline
        return sends

    @property
    def next_deadline(self) -> float:
        if not self._wants and not self._prefills:
            return NEVER
        ends = [self._want_ends(transfer_id, want) for transfer_id, want in self._wants.items()]
        ends += [self._prefill_ends(transfer_id) for transfer_id in self._prefills]
        return min(ends, default=NEVER)

    @property
    def num_open(self) -> int:
        """Records of prefills and of wants."""
        return len(self._prefills) + len(self._wants)

    # --- Steps ------------------------------------------------------------------------------------

    def _computing(self, transfer_id: TransferId) -> _Prefill | None:
        prefill = self._prefills.get(transfer_id)
        return prefill if prefill is not None and prefill.ended_at == NEVER else None

    def _new_run(self) -> int:
        self._num_runs += 1
        return self._num_runs

    def _wanted(self, sender: Address, message: Want, now: float) -> list[Send]:
        transfer_id = message.transfer_id
        want = self._wants.get(transfer_id)
        if want is not None and self._is_superseded(want, sender, message.number):
            self._forget_want(transfer_id)
            want = None
        if want is None:
            num_of_sender = self._num_wants_of[sender]
            if len(self._wants) >= WANTS_MAX or num_of_sender >= WANTS_PER_CONSUMER_MAX:
                return [Send(sender, Failed(transfer_id, message.number, "too many consumers wait here"))]
            want = _Want(sender, message.number, message.prompt_hash, message.num_tokens, now, now)
            self._wants[transfer_id] = want
            self._num_wants_of[sender] += 1
            self._wake_at = min(self._wake_at, self._want_ends(transfer_id, want))
        elif (want.consumer, want.number) != (sender, message.number):
            return [Send(sender, Failed(transfer_id, message.number, "another consumer waits for it"))]
        want.heard_at = now
        return [self._answer(transfer_id, want, now)]

    def _forget_want(self, transfer_id: TransferId) -> None:
        consumer = self._wants.pop(transfer_id).consumer
        self._num_wants_of[consumer] -= 1
        if not self._num_wants_of[consumer]:
            del self._num_wants_of[consumer]

    def _is_superseded(self, want: _Want, sender: Address, number: int) -> bool:
        if want.consumer == sender:
            return number > want.number  # A consumer waits for a transfer once at a time.
        return want.over is not None

    def _withdrawn(self, sender: Address, message: Withdraw) -> list[Unwanted]:
        transfer_id = message.transfer_id
        want = self._wants.get(transfer_id)
        if want is None or (want.consumer, want.number) != (sender, message.number):
            return []
        want.over, want.is_withdrawn = "it was withdrawn", True
        prefill = self._prefills.get(transfer_id)
        if prefill is None or prefill.ended_at == NEVER:
            return []
        del self._prefills[transfer_id]  # No other consumer may have it.
        return [Unwanted(transfer_id)] if message.has_failed and prefill.ticket is not None else []

    def _notify(self, transfer_id: TransferId, now: float) -> list[Send]:
        """Sends the new state to the consumer that waits, if there is one."""
        want = self._wants.get(transfer_id)
        return [] if want is None or want.over is not None else [self._answer(transfer_id, want, now)]

    def _answer(self, transfer_id: TransferId, want: _Want, now: float) -> Send:
        prefill = self._prefills.get(transfer_id)
        if want.over is not None:
            return self._failed(transfer_id, want, want.over)
        if prefill is None:
            return Send(want.consumer, Working(transfer_id, want.number))
        if not self._is_of(prefill, want):
            return self._failed(transfer_id, want, "the prefill of this transfer is of another prompt")
        if prefill.failure is not None:
            return self._failed(transfer_id, want, prefill.failure)
        if prefill.ticket is not None:
            return Send(want.consumer, Finished(transfer_id, want.number, prefill.run, prefill.ticket))
        if prefill.ready is None:
            return Send(want.consumer, Working(transfer_id, want.number))
        return Send(want.consumer, Announced(transfer_id, want.number, prefill.run, *prefill.ready))

    def _failed(self, transfer_id: TransferId, want: _Want, reason: str) -> Send:
        want.over = reason
        return Send(want.consumer, Failed(transfer_id, want.number, reason, reason == NEW_WEIGHTS))

    def _is_of(self, prefill: _Prefill, want: _Want) -> bool:
        return (prefill.prompt_hash, prefill.num_tokens) == (want.prompt_hash, want.num_tokens)

    def _want_ends(self, transfer_id: TransferId, want: _Want) -> float:
        if want.over is not None or transfer_id in self._prefills:
            return want.heard_at + self._timers.hold_s
        return want.asked_at + self._timers.hold_s  # No prefill has come, however often the consumer asks.

    def _prefill_ends(self, transfer_id: TransferId) -> float:
        prefill, want = self._prefills[transfer_id], self._wants.get(transfer_id)
        if prefill.ended_at == NEVER:
            return NEVER  # P computes until the engine reports the end of the prefill.
        heard_at = want.heard_at if want is not None else -NEVER
        return max(prefill.ended_at, heard_at) + self._timers.hold_s
