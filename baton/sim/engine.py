"""One incarnation of an engine: its pool, its process, and the driver of its machines.

The driver is as thin as the one in production: messages and time in, effects out. Every engine can lend and
fetch.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, assert_never

from baton.core.ids import Address, BlockId, EngineId, Epoch, LoanId, Pair, PromptHash, RequestId, TransferId
from baton.core.layout import ModelFingerprint
from baton.core.timers import Timers
from baton.protocol.effects import (
    CancelReads,
    Deliver,
    Effect,
    Fail,
    FreeLoan,
    FreeTarget,
    PeerLost,
    PeerReady,
    Send,
    StartReads,
)
from baton.protocol.handshake import RankCard, encode_ranks
from baton.protocol.messages import Renewed, pack_sends
from baton.protocol.peers import PeerTable
from baton.protocol.plan import plan_pairs
from baton.protocol.ticket import BadTicket, Ticket, open_ticket, sign_ticket
from baton.sim.checkers import bounded, contained, fenced, fresh, held, whole
from baton.sim.facts import Landing, Lent, Read
from baton.sim.memory import NUM_HEADS, Pool, toy_layout

if TYPE_CHECKING:
    from baton.sim.cluster import Cluster

KEY = b"the cluster's own key, 32 bytes."
FINGERPRINT = ModelFingerprint(
    model="toy",
    revision="1",
    dtype="float32",
    num_layers=1,
    num_kv_heads=NUM_HEADS,
    head_dim=1,
    hash_seed="s",
)
SOON_S = 1e-6
AMBUSH_S = 8.0
USE_MAX_S = 8.0
NEVER = float("inf")


@cache
def payload(num_ranks: int, num_blocks: int) -> bytes:
    return encode_ranks(
        [RankCard(rank, toy_layout(rank, num_ranks, num_blocks), {"toy": b""}) for rank in range(num_ranks)]
    )


@cache
def hash_of_prompt(prompt: int, num_blocks: int) -> PromptHash:
    return PromptHash(hashlib.sha256(b"%d/%d" % (prompt, num_blocks)).digest())


class Engine:
    def __init__(
        self,
        cluster: "Cluster",
        engine_id: EngineId,
        num_ranks: int,
        rate: float,
        skew_s: float,
        timers: Timers,
    ) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.address = Address(engine_id, Epoch(self.world.rng.getrandbits(64)))
        self.num_ranks, self.rate, self.skew_s, self.timers = num_ranks, rate, skew_s, timers
        self.pool = Pool(cluster.num_blocks, num_ranks)
        self.lent: dict[LoanId, Lent] = {}
        self.landings: dict[int, Landing] = {}  # By claim.
        self.alive = True
        self.exits_at = NEVER  # Once it drains.
        self.producer = cluster.parts.producer(self.address.epoch, timers)
        self.consumer = cluster.parts.consumer(timers)
        self.peers = PeerTable(self.address, FINGERPRINT, timers, payload(num_ranks, cluster.num_blocks))
        self._paused_until = 0.0
        self._armed_at = NEVER

    def clock(self) -> float:
        return self.world.now * self.rate + self.skew_s

    # --- The process ------------------------------------------------------------------------------

    def when_awake(self, action: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self._paused_until > self.world.now:
            wait_s = self._paused_until - self.world.now + SOON_S
            self.world.after(wait_s, lambda: self.when_awake(action))
        else:
            action()

    def pause(self, for_s: float) -> None:
        self._paused_until = self.world.now + for_s

    def drain(self, for_s: float) -> None:
        """No new loans and fetches; gone when nothing is left, or at the deadline."""
        if self.exits_at < NEVER:
            return
        self.exits_at = self.world.now + for_s
        self.producer.drain(self.clock() + for_s * self.rate)
        self.world.count("drain")
        self.world.after(for_s, lambda: self.when_awake(self._exit))
        self._exit_if_empty()

    def _exit_if_empty(self) -> None:
        if self.exits_at < NEVER and not self.producer.num_open and not self.consumer.num_open:
            self.world.after(0.0, lambda: self.when_awake(self._exit))

    def _exit(self) -> None:
        self.cluster.stop(self, down_s=0.5)

    # --- The driver -------------------------------------------------------------------------------

    def do(self, effects: Sequence[Effect]) -> None:
        if effects:
            self._carry_out(effects)
        self._arm()
        if self.exits_at < NEVER:
            self._exit_if_empty()

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        todo: deque[Effect] = deque(effects)
        sends: list[Send] = []
        name = self.address.engine_id
        while todo:
            effect = todo.popleft()
            if self.world.trace is not None and not isinstance(effect, Send):
                self.world.note(name, f"{effect}"[:160])
            match effect:
                case Send():
                    sends.append(effect)
                case StartReads(claim, pairs):
                    self._start_reads(self.landings[claim], pairs)
                case CancelReads(claim):
                    todo.extend(self._cancel_reads(self.landings[claim]))
                case Deliver(claim):
                    self._delivered(self.landings[claim])
                case Fail(claim, reason):
                    self._failed(self.landings[claim], reason)
                case FreeTarget(claim):
                    self._free_target(self.landings.pop(claim))
                case FreeLoan(loan_id, expired):
                    self._free_loan(loan_id, expired)
                case PeerReady(address):
                    self._peer_ready(address)
                case PeerLost(address, reason):
                    todo.extend(self.consumer.peer_lost(address, reason, self.clock()))
                case _:
                    assert_never(effect)
        for envelope in pack_sends(self.address, sends):
            if len(envelope.messages) > 1:
                self.world.count("batched envelopes")
            self.cluster.wire.send(name, envelope)

    def receive(self, frame: bytes) -> None:
        envelope = contained.decode_or_none(frame)
        if envelope is None:
            return self.world.count("malformed frames")
        messages, answers = self.cluster.parts.admit(self.address, envelope)
        sender, now = envelope.sender, self.clock()
        effects: list[Effect] = [*answers]
        for message in messages:
            if isinstance(message, Renewed) and self.world.chance(self.world.faults.ambush):
                self.cluster.wire.cut_off(self.address.engine_id, sender.engine_id, AMBUSH_S, both=False)
            effects += self.producer.receive(sender, message, now)
            effects += self.consumer.receive(sender, message, now)
            effects += self.peers.receive(sender, message, now)
        self.do(effects)

    def _arm(self) -> None:
        due = min(self.producer.next_deadline, self.consumer.next_deadline, self.peers.next_deadline)
        if due == NEVER:
            return
        due_at = (due - self.skew_s) / self.rate
        if due_at < self._armed_at:
            self._armed_at = due_at
            late_s = self.world.rng.random() * self.world.faults.timer_late_s
            wait_s = max(0.0, due_at - self.world.now) + late_s + SOON_S
            self.world.after(wait_s, lambda: self.when_awake(lambda: self._wake(due_at)))

    def _wake(self, armed_at: float) -> None:
        if self._armed_at == armed_at:
            self._armed_at = NEVER
        now = self.clock()
        self.do([*self.producer.wake(now), *self.consumer.wake(now), *self.peers.wake(now)])

    # --- Lending ----------------------------------------------------------------------------------

    def prefill(
        self, prompt: int, num_blocks: int, request_id: RequestId, on_ticket: Callable[[str], None]
    ) -> None:
        lent = Lent(prompt, ())
        blocks = None if self.producer.is_draining else self.pool.allocate(num_blocks, lent)
        if blocks is None:
            return self.world.count("P busy")
        lent.blocks = blocks
        took_s = self.world.spread(0.3)
        self.world.after(
            took_s, lambda: self.when_awake(lambda: self._prefilled(lent, request_id, on_ticket))
        )

    def _prefilled(self, lent: Lent, request_id: RequestId, on_ticket: Callable[[str], None]) -> None:
        for index, block in enumerate(lent.blocks):
            self.pool.write(block, (lent.prompt, index))
        failed = self.world.chance(self.world.faults.prefill_fails)
        loan_id = None if failed else self.producer.lend(self.clock())
        if loan_id is None:
            self.world.count("prefill failed" if failed else "prefill finished in a draining engine")
            return self.pool.free(lent.blocks, lent)
        self.lent[loan_id] = lent
        lent.lent_at = self.world.now
        self.world.note(self.address.engine_id, f"lends {loan_id} prompt {lent.prompt} blocks {lent.blocks}")
        self._arm()
        ticket = Ticket(
            producer=self.address,
            control_url="sim://",
            loan_id=loan_id,
            transfer_id=TransferId(f"t{loan_id.counter}"),
            request_id=request_id,
            fingerprint=FINGERPRINT,
            tp_size=self.num_ranks,
            block_tokens=1,
            block_ids=(lent.blocks,),
            num_tokens=len(lent.blocks),
            prompt_hash=hash_of_prompt(lent.prompt, len(lent.blocks)),
        )
        on_ticket(sign_ticket(ticket, KEY))

    def _free_loan(self, loan_id: LoanId, expired: bool) -> None:
        self.world.count("loans expired" if expired else "loans released")
        held.check_free(self, loan_id)
        lent = self.lent.pop(loan_id)
        bounded.check_loan_freed(self, lent)
        self.pool.free(lent.blocks, lent)

    # --- Fetching ---------------------------------------------------------------------------------

    def fetch(self, text: str, prompt: int, num_blocks: int, on_end: Callable[[bool], None]) -> int | None:
        """What a scheduler half does with the decode leg. Returns the claim, if there is one."""
        world, now = self.world, self.clock()
        try:
            ticket = open_ticket(text, KEY)
            self.cluster.parts.verify(ticket, FINGERPRINT, partial(hash_of_prompt, prompt), num_blocks)
        except BadTicket as error:
            world.count(f"ticket refused: {error.reason}")
            return None
        if self.exits_at < NEVER or world.chance(world.faults.reject):
            world.count("not admitted")
            self.do(self.consumer.release_unused(ticket.loan_id, ticket.producer, now))
            return None
        landing = self._landing(ticket, prompt, on_end)
        if world.chance(world.faults.queueing) or not self._has_room(ticket):
            reserved = self.consumer.reserve(ticket.loan_id, ticket.producer, now)
            if reserved is None:
                world.count("loan already in use")
                return None
            landing.claim, effects = reserved
            self._begin(landing, ticket, effects)
            self._start_when_room(landing, ticket)
            return landing.claim
        pairs = self._allocate(landing, ticket)
        fetched = self.consumer.fetch(ticket.loan_id, ticket.producer, pairs, now)
        if fetched is None:
            self.pool.free(landing.blocks, landing)
            world.count("loan already in use")
            return None
        landing.claim, effects = fetched
        self._begin(landing, ticket, effects)
        return landing.claim

    def abort(self, claim: int) -> None:
        self.do(self.consumer.abort(claim, self.clock()))

    def read_ended(self, read: Read, ok: bool) -> None:
        error = "" if ok else "the wire said so"
        self.do(self.consumer.read_ended(read.landing.claim, read.pair, ok, self.clock(), error))

    def _landing(self, ticket: Ticket, prompt: int, on_end: Callable[[bool], None]) -> Landing:
        world, blocks = self.world, ticket.block_ids[0]
        num_hits = world.rng.randint(1, len(blocks)) if world.chance(world.faults.prefix_hit) else 0
        return Landing(
            prompt=prompt,
            blocks=(),
            num_hits=num_hits,
            sources=blocks[num_hits:],
            loan_id=ticket.loan_id,
            producer=self.cluster.incarnations[ticket.producer],
            started_at=world.now,
            on_end=on_end,
        )

    def _begin(self, landing: Landing, ticket: Ticket, effects: Sequence[Effect]) -> None:
        self.world.count("started")
        self.landings[landing.claim] = landing
        self.do([*effects, *self.peers.want(ticket.producer, self.clock())])

    def _has_room(self, ticket: Ticket) -> bool:
        return self.pool.num_free >= len(ticket.block_ids[0])

    def _allocate(self, landing: Landing, ticket: Ticket) -> tuple[Pair, ...]:
        """Blocks for all of the prompt, and what has to move into them."""
        blocks = self.pool.allocate(len(ticket.block_ids[0]), landing)
        assert blocks is not None, "asked for room first"
        landing.blocks = blocks
        for index in range(landing.num_hits):
            self.pool.write(blocks[index], (landing.prompt, index))
        if not landing.sources:
            self.world.count("nothing to move")
            return ()
        return plan_pairs(ticket.tp_size, self.num_ranks, NUM_HEADS)

    def _start_when_room(self, landing: Landing, ticket: Ticket) -> None:
        """The request waits in the scheduler's queue, its lease renewed meanwhile."""

        def look() -> None:
            if self.landings.get(landing.claim) is not landing or landing.failed_at is not None:
                return
            if self.world.chance(0.1) and not landing.delivered:
                return self.abort(landing.claim)
            if not self._has_room(ticket):
                return self._start_when_room(landing, ticket)
            pairs = self._allocate(landing, ticket)
            self.world.count("started late")
            self.do(self.consumer.start(landing.claim, pairs, self.clock()))

        self.world.after(self.world.rng.uniform(0.1, 3.0), lambda: self.when_awake(look))

    def _start_reads(self, landing: Landing, pairs: tuple[Pair, ...]) -> None:
        if self.peers.is_ready(landing.producer.address):
            self._post_reads(landing, pairs)
        else:
            landing.waiting_pairs += pairs

    def _peer_ready(self, address: Address) -> None:
        for landing in list(self.landings.values()):
            if landing.producer.address == address and landing.waiting_pairs:
                pairs, landing.waiting_pairs = landing.waiting_pairs, []
                self._post_reads(landing, pairs)

    def _post_reads(self, landing: Landing, pairs: Sequence[Pair]) -> None:
        producer = landing.producer
        lent = producer.lent.get(landing.loan_id)
        if lent is None or not producer.alive:
            landing.is_torn = True
        generations = [producer.pool.generation[block] for block in landing.sources]
        for pair in pairs:
            self.cluster.wire.post(Read(landing, pair, self, generations))

    def _cancel_reads(self, landing: Landing) -> Sequence[Effect]:
        self.cluster.wire.cancel(self, landing)
        effects: list[Effect] = []
        pairs, landing.waiting_pairs = landing.waiting_pairs, []
        for pair in pairs:  # Never posted, so they end at once.
            effects += self.consumer.read_ended(landing.claim, pair, False, self.clock(), "never posted")
        return effects

    # --- Outcomes ---------------------------------------------------------------------------------

    def _delivered(self, landing: Landing) -> None:
        bounded.check_outcome(self, landing)
        landing.delivered = True
        fresh.check_delivery(self, landing)
        self.world.count("delivered")
        landing.on_end(True)
        used_s = min(USE_MAX_S, self.world.spread(self.cluster.use_mean_s))
        self.world.after(used_s, lambda: self._used(landing))

    def _used(self, landing: Landing) -> None:
        if self.alive:
            fresh.check_use(self, landing)
            del self.landings[landing.claim]
            self._free_blocks(landing)

    def _failed(self, landing: Landing, reason: str) -> None:
        bounded.check_outcome(self, landing)
        landing.failed_at = self.world.now
        self.world.count(f"failed: {reason.split(':')[0].split(' of ')[0]}")
        landing.on_end(False)

    def _free_target(self, landing: Landing) -> None:
        bounded.check_target_freed(self, landing)
        landing.freed = True
        self._free_blocks(landing)

    def _free_blocks(self, landing: Landing) -> None:
        blocks: tuple[BlockId, ...] = landing.blocks
        fenced.check_free(self, blocks)
        self.pool.free(blocks, landing)

    def check_rest(self) -> None:
        bounded.check_rest(self)
        whole.check_rest(self)
