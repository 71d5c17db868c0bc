"""Consumer half of push: reads what P announces while P still computes, then continues as a pull.

    want --> WAITING --Announced, ready--> READING              ReadEarly, again and again
    READING --announcement or end of another run--> CLEARING    CancelReads
    CLEARING --every read of the old run has ended--> READING   afresh
    any --Finished, ticket accepted--> (pull)                   reserve, with the reads that still run
    want of a name --> SEEKING --Stranger: an incarnation of that name answers--> WAITING   (Found)
    any --Failed, read error, abort, deadline, silence, producer lost--> DRAINING   (fails now)
    DRAINING --every own read has ended--> FreeTarget

An announcement promises nothing: an early read may be of blocks that P has given to another request. It
counts only if P's loan covers it. That holds for reads of the run that `Finished` names, because within a run
P frees nothing from the first announcement until it lends. What was read in another run is read again, but
only after the old reads have ended: they write to the same blocks, and the read that ends last wins.

    run 1:  Announced 2048   Announced 4096        (preempted)
    run 2:                                   Announced 0   Announced 4096   Finished, ticket
    reads:  |---- of run 1 ------------------- cancelled ---|--- of run 2 ------|--- the tail, as a pull ---|

A consumer without an introduction knows a name and a url, and sends its Want there to epoch 0. No engine has
this epoch, so the engine at the url answers Stranger with its own address, and the Want is repeated to that
address. The producer needs no special code for this.

From the ticket on the claim belongs to pull_consumer, under the same number, with its lease and fence. Only
one of the two machines knows a claim at a time; callers may pass an event to both.
"""

from baton.core.ids import Address, Pair, PromptHash, TransferId
from baton.core.reasons import FailureCode, FailureReason
from baton.core.timers import Timers
from baton.protocol.effects import (
    CancelReads,
    Fail,
    Found,
    FreeTarget,
    Lent,
    OpenTicket,
    ReadEarly,
    Send,
    StreamEffect,
)
from baton.protocol.grouped_prompt import ONE_TABLE, GroupRoutes
from baton.protocol.messages import (
    Announced,
    Failed,
    Finished,
    Message,
    Stranger,
    Want,
    Withdraw,
    Working,
)
from baton.protocol.progress_frontier import ProgressFrontier, parts_between
from baton.protocol.pull_consumer import PullConsumer, read_failed
from baton.protocol.push_stream import PushStream, frontier_of
from baton.protocol.ticket import Ticket

NEVER = float("inf")


class PushConsumer:
    def __init__(self, timers: Timers, pull: PullConsumer, num_layers: int) -> None:
        self._timers = timers
        self._pull = pull
        self._num_layers = num_layers
        self._streams: dict[int, PushStream] = {}
        self._in_use: dict[tuple[Address, TransferId], int] = {}

    # --- Requests ---------------------------------------------------------------------------------

    def want(
        self,
        transfer_id: TransferId,
        producer: Address,
        prompt_hash: PromptHash,
        num_tokens: int,
        block_tokens: int | None,
        now: float,
    ) -> tuple[int, list[StreamEffect]] | None:
        """Waits for this prompt. None if another request of this engine waits for this transfer already.

        `block_tokens`: P's block size from its introduction; None without one, as if it `is_named_only`.
        """
        if (producer, transfer_id) in self._in_use:
            return None
        claim = self._pull.new_claim()
        stream = PushStream(
            claim,
            transfer_id,
            producer,
            prompt_hash,
            num_tokens,
            block_tokens,
            now + self._timers.deadline_s,
            now,
            now,
        )
        self._streams[claim] = stream
        self._in_use[producer, transfer_id] = claim
        return claim, [self._want(stream, now)]

    def ready(
        self,
        claim: int,
        pairs: tuple[Pair, ...],
        first_token: int,
        now: float,
        *,
        block_tokens: int | None = None,
        group_routes: GroupRoutes = ONE_TABLE,
    ) -> list[StreamEffect]:
        """P's ranks are known and there are blocks to read into. The tokens before `first_token` are present.

        `block_tokens`: P's block size, for a stream that did not know it. `group_routes`: the block tables
        through which each layer moves. Calls after the first have no effect.
        """
        stream = self._streams.get(claim)
        if stream is None or stream.draining or stream.pairs is not None:
            return []
        stream.pairs, stream.first_token, stream.group_routes = pairs, first_token, group_routes
        stream.block_tokens = stream.block_tokens or block_tokens
        if stream.latest is not None and stream.needed(stream.latest) is None:
            stream.latest = None
        return self._read_on(stream)

    def accept(self, claim: int, ticket: Ticket, now: float) -> list[StreamEffect]:
        """`OpenTicket` led to a ticket of our cluster and model. If it is for this prompt, claims its loan.

        A pull follows: call `PullConsumer.start` as soon as there are blocks to read into.
        """
        stream = self._streams.get(claim)
        if stream is None or stream.draining or stream.finished is None:
            return []  # The stream has failed in the meantime.
        if (wrong := self._mismatch(stream, ticket)) is not None:
            return self._fail(stream, FailureReason(wrong))
        reserved = self._pull.reserve(
            ticket.loan_id,
            stream.producer,
            now,
            claim=claim,
            give_up_at=stream.give_up_at,
            early=frozenset(stream.reading),
            is_void=stream.is_clearing,
        )
        if reserved is None:
            return self._fail(stream, FailureReason(FailureCode.LOAN_IN_USE))
        self._forget(stream)
        return [
            *reserved[1],
            self._withdraw(stream, has_failed=False),
            Lent(claim, ticket, stream.unread(self._num_layers)),
        ]

    def refuse(self, claim: int, reason: FailureReason, now: float) -> list[StreamEffect]:
        """The ticket of `OpenTicket` is not valid."""
        stream = self._streams.get(claim)
        return [] if stream is None else self._fail(stream, reason)

    def read_ended(self, claim: int, pair: Pair, ok: bool, now: float, error: str = "") -> list[StreamEffect]:
        stream = self._streams.get(claim)
        if stream is None or pair not in stream.reading:
            return []
        stream.reading.discard(pair)
        if stream.draining:
            return self._drained(stream)
        if stream.is_clearing:
            return self._read_on(stream)
        return self._fail(stream, read_failed(pair, error))  # The read ended without having been cancelled.

    def abort(self, claim: int, now: float, code: FailureCode = FailureCode.ABORTED) -> list[StreamEffect]:
        stream = self._streams.get(claim)
        return [] if stream is None else self._fail(stream, FailureReason(code))

    def peer_lost(self, address: Address, reason: FailureReason, now: float) -> list[StreamEffect]:
        """Fails all streams from this peer. It gets no message: see Stranger in docs/protocol.md."""
        lost = [stream for stream in self._streams.values() if stream.producer == address]
        return [effect for stream in lost for effect in self._fail(stream, reason, notify=False)]

    # --- Messages and time ------------------------------------------------------------------------

    def receive(self, sender: Address, message: Message, now: float) -> list[StreamEffect]:
        match message:
            case Stranger(about) if about.is_named_only:
                return self._found(about, sender, now)
            case Stranger(about):
                return self.peer_lost(about, FailureReason(FailureCode.GONE), now)
            case Working() | Announced() | Finished() | Failed():
                stream = self._of(sender, message.transfer_id, message.number)
                if stream is None or stream.draining:
                    if isinstance(message, Failed):
                        return []
                    return [Send(sender, Withdraw(message.transfer_id, message.number))]
                stream.heard_at = now
                return self._heard(stream, message)
            case _:
                return []  # Not for a consumer.

    def wake(self, now: float) -> list[StreamEffect]:
        if now < self.next_deadline:
            return []
        effects: list[StreamEffect] = []
        for stream in [s for s in self._streams.values() if not s.draining and now >= self._fails_at(s)]:
            effects += self._fail(stream, self._overdue(stream, now))
        waiting = [s for s in self._streams.values() if not s.draining and s.finished is None]
        due = {stream.producer for stream in waiting if now >= stream.next_want}
        for stream in waiting:
            # Wants that are nearly due go along, so that each peer gets about one envelope per period.
            if stream.producer in due and stream.next_want - now < self._timers.grant_every_s / 2:
                effects.append(self._want(stream, now))
        return effects

    @property
    def next_deadline(self) -> float:
        if not self._streams:
            return NEVER
        due = NEVER
        for stream in self._streams.values():
            if not stream.draining:
                due = min(due, stream.next_want, self._fails_at(stream))
        return due

    @property
    def num_open(self) -> int:
        return len(self._streams)

    # --- Steps ------------------------------------------------------------------------------------

    def _of(self, sender: Address, transfer_id: TransferId, number: int) -> PushStream | None:
        stream = self._streams.get(number)
        if stream is None or stream.transfer_id != transfer_id or stream.producer != sender:
            return None
        return stream

    def _found(self, name: Address, producer: Address, now: float) -> list[StreamEffect]:
        """The engine at the url of `name` has answered with its own address."""
        seeking = [s for s in self._streams.values() if s.producer == name and not s.draining]
        effects: list[StreamEffect] = []
        for stream in seeking:
            if producer.engine_id != name.engine_id or producer.is_named_only:
                text = f"the producer is another, {producer.engine_id!r} and not {name.engine_id!r}"
                effects += self._fail(stream, FailureReason(FailureCode.OTHER_ENGINE, text))
            elif (producer, stream.transfer_id) in self._in_use:
                effects += self._fail(stream, FailureReason(FailureCode.TRANSFER_IN_USE))
            else:
                del self._in_use[name, stream.transfer_id]
                self._in_use[producer, stream.transfer_id] = stream.claim
                stream.producer, stream.heard_at = producer, now
                effects += [Found(stream.claim, producer), self._want(stream, now)]
        return effects

    def _want(self, stream: PushStream, now: float) -> Send:
        stream.next_want = now + self._timers.grant_every_s
        message = Want(stream.transfer_id, stream.claim, stream.prompt_hash, stream.num_tokens)
        return Send(stream.producer, message)

    def _withdraw(self, stream: PushStream, *, has_failed: bool) -> Send:
        return Send(stream.producer, Withdraw(stream.transfer_id, stream.claim, has_failed))

    def _heard(
        self, stream: PushStream, message: Working | Announced | Finished | Failed
    ) -> list[StreamEffect]:
        if stream.finished is not None:
            return []  # The ticket is being opened; later messages change nothing.
        match message:
            case Failed():
                text = f"the producer gave up: {message.reason or 'no reason given'}"
                code = FailureCode.OTHER_WEIGHTS if message.has_new_weights else FailureCode.PREFILL_FAILED
                return self._fail(stream, FailureReason(code, text), notify=False)
            case Announced():
                if not stream.is_news(message):
                    return []
                stream.latest = message
                return self._read_on(stream)
            case Finished():
                stream.finished = message
                stream.next_want = NEVER
                effects = self._clear(stream) if self._is_void(stream, message.run) else []
                return [*effects, OpenTicket(stream.claim, message.ticket)]
            case Working():
                return []

    def _is_void(self, stream: PushStream, run: int) -> bool:
        """Whether what has been read belongs to another run than `run`."""
        return run != stream.run

    def _clear(self, stream: PushStream) -> list[StreamEffect]:
        """Discards what was read. Its reads must end first, because the same blocks are read into again."""
        stream.frontier, stream.blocks = None, ()
        if not stream.reading or stream.is_clearing:
            return []
        stream.is_clearing = True
        return [CancelReads(stream.claim)]

    def _has_unended(self, stream: PushStream) -> bool:
        return bool(stream.reading)

    def _read_on(self, stream: PushStream) -> list[StreamEffect]:
        """Orders what is announced and not read yet, if it may be read now."""
        if stream.is_clearing:
            if self._has_unended(stream):
                return []
            stream.is_clearing = False
        latest = stream.latest
        if latest is None or stream.finished is not None:
            return []
        if self._is_void(stream, latest.run):
            effects = self._clear(stream)
            stream.run = latest.run
            if stream.is_clearing:
                return effects
        if stream.pairs is None:
            return []
        return self._order(stream, latest, stream.pairs)

    def _order(self, stream: PushStream, latest: Announced, pairs: tuple[Pair, ...]) -> list[StreamEffect]:
        prompt, needed = stream.prompt, stream.needed(latest)
        assert needed is not None, "dropped before"
        if not stream.extends_read_blocks(needed):
            return self._fail(stream, FailureReason(FailureCode.BLOCKS_CHANGED))
        read = stream.frontier or ProgressFrontier(stream.first_token)
        ready = frontier_of(latest).between(stream.first_token, stream.num_tokens)
        parts = prompt.cut(parts_between(read, ready, self._num_layers))
        if not parts:
            return []  # Nothing new to move; the next announcement may bring it.
        stream.frontier, stream.blocks = ready, needed
        stream.reading.update(pairs)
        return [ReadEarly(stream.claim, pairs, part, prompt.table_of(part, needed)) for part in parts]

    def _mismatch(self, stream: PushStream, ticket: Ticket) -> FailureCode | None:
        """Reason why a valid ticket does not fit this stream; None if it does."""
        if ticket.producer != stream.producer or ticket.transfer_id != stream.transfer_id:
            return FailureCode.OTHER_TRANSFER
        if (ticket.prompt_hash, ticket.num_tokens) != (stream.prompt_hash, stream.num_tokens):
            return FailureCode.OTHER_PROMPT
        if not stream.is_lent_by(ticket):
            return FailureCode.OTHER_BLOCKS
        return None

    def _fails_at(self, stream: PushStream) -> float:
        if stream.finished is not None:
            return stream.give_up_at
        return min(stream.give_up_at, stream.heard_at + self._timers.silence_s)

    def _overdue(self, stream: PushStream, now: float) -> FailureReason:
        if now >= stream.give_up_at:
            text = f"deadline of {self._timers.deadline_s:g} s passed, waiting for the prefill"
            return FailureReason(FailureCode.DEADLINE, text)
        text = f"the producer has said nothing for {self._timers.silence_s:g} s"
        return FailureReason(FailureCode.STREAM_SILENT, text)

    def _fail(self, stream: PushStream, reason: FailureReason, *, notify: bool = True) -> list[StreamEffect]:
        if stream.draining:
            return []
        stream.draining = True
        effects: list[StreamEffect] = [Fail(stream.claim, reason)]
        if notify and not stream.producer.is_named_only:
            effects.insert(0, self._withdraw(stream, has_failed=True))
        return [*effects, *(self._drained(stream) or [CancelReads(stream.claim)])]

    def _drained(self, stream: PushStream) -> list[StreamEffect]:
        if stream.reading:
            return []
        self._forget(stream)
        return [FreeTarget(stream.claim)]

    def _forget(self, stream: PushStream) -> None:
        del self._streams[stream.claim]
        del self._in_use[stream.producer, stream.transfer_id]
