"""D's side of an engine in the world: from a ticket, or an introduction, to blocks in use, and free again."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from baton.core.ids import NO_EPOCH, Address, BlockId, EngineId, Pair, TransferId
from baton.core.kv_groups import NULL_BLOCK_ID, one_group
from baton.core.reasons import FailureCode, FailureReason
from baton.protocol.effects import Effect, Part, ReadEarly, Send, StreamEffect
from baton.protocol.grouped_prompt import ONE_TABLE, GroupedPrompt, GroupRoutes
from baton.protocol.introduction import BadIntroduction, check_introduction, open_introduction
from baton.protocol.plan import plan_pairs
from baton.protocol.ticket import BadTicket, Ticket, open_ticket
from baton.sim.checkers import bounded, contained, fenced, fresh
from baton.sim.facts import Landing
from baton.sim.memory import NUM_HEADS, NUM_LAYERS, Tables, toy_layout
from baton.sim.model import FINGERPRINT, KEY, hash_of_prompt
from baton.sim.rank_reads import RankReads

if TYPE_CHECKING:
    from baton.sim.engine import Engine

USE_MAX_S = 8.0
NEVER = float("inf")


class Fetcher:
    def __init__(self, engine: "Engine") -> None:
        self._engine, self._world = engine, engine.world
        self._ranks = RankReads(engine, self._read_ended)
        self.landings: dict[int, Landing] = {}  # By claim.

    # --- Requests ---------------------------------------------------------------------------------

    def fetch(self, text: str, prompt: int, num_tokens: int, on_end: Callable[[bool], None]) -> int | None:
        """What a scheduler half does with a decode leg that has a ticket. Returns the claim, if any."""
        engine, world, now = self._engine, self._world, self._engine.clock()
        try:
            ticket = open_ticket(text, KEY)
            engine.cluster.parts.verify(ticket, FINGERPRINT, partial(hash_of_prompt, prompt), num_tokens)
        except BadTicket as error:
            world.count(f"ticket refused: {error.reason}")
            return None
        if self._rejects():
            if (reserved := engine.consumer.reserve(ticket.loan_id, ticket.producer, now)) is not None:
                # Its end is no outcome of a landing, and its first question is lost.
                engine.do([e for e in engine.consumer.abort(reserved[0], now) if isinstance(e, Send)])
            return None
        landing = self._landing(
            prompt, ticket.num_tokens, ticket.transfer_id, ticket.producer, ticket.tp_size, on_end
        )
        landing.loan_id, landing.sources = ticket.loan_id, self._tables_of(ticket)
        reserved = engine.consumer.reserve(ticket.loan_id, ticket.producer, now)
        if reserved is None:
            world.count("loan already in use")
            return None
        return self._begin(landing, *reserved)

    def stream(
        self,
        text: str,
        transfer_id: TransferId,
        prompt: int,
        num_tokens: int,
        on_end: Callable[[bool], None],
    ) -> int | None:
        """... and with one that has an introduction."""
        world = self._world
        try:
            introduction = open_introduction(text, KEY)
            check_introduction(introduction, fingerprint=FINGERPRINT)
        except BadIntroduction as error:
            world.count(f"introduction refused: {error.reason}")
            return None
        if self._rejects():
            return None
        landing = self._landing(
            prompt, num_tokens, transfer_id, introduction.address, introduction.tp_size, on_end
        )
        return self._want(landing, introduction.address, introduction.block_tokens)

    def seek(
        self,
        name: EngineId,
        transfer_id: TransferId,
        prompt: int,
        num_tokens: int,
        on_end: Callable[[bool], None],
    ) -> int | None:
        """... and with one that has a name only."""
        if self._rejects():
            return None
        now_there = self._engine.cluster.engines[name]
        landing = self._landing(
            prompt, num_tokens, transfer_id, now_there.address, now_there.num_ranks, on_end
        )
        return self._want(landing, Address(name, NO_EPOCH), None)

    def _want(self, landing: Landing, producer: Address, block_tokens: int | None) -> int | None:
        engine = self._engine
        wanted = engine.streams.want(
            landing.transfer_id,
            producer,
            hash_of_prompt(landing.prompt, landing.num_tokens),
            landing.num_tokens,
            block_tokens,
            engine.clock(),
        )
        if wanted is None:
            self._world.count("transfer already waited for")
            return None
        claim, effects = wanted
        return self._begin(landing, claim, effects, greets=not producer.is_named_only)

    def abort(self, claim: int) -> None:
        engine, now = self._engine, self._engine.clock()
        engine.do([*engine.streams.abort(claim, now), *engine.consumer.abort(claim, now)])

    def _rejects(self) -> bool:
        if self._engine.exits_at < NEVER or self._world.chance(self._world.faults.reject):
            self._world.count("not admitted")
            return True
        return False

    def _landing(
        self,
        prompt: int,
        num_tokens: int,
        transfer_id: TransferId,
        producer: Address,
        tp_size: int,
        on_end: Callable[[bool], None],
    ) -> Landing:
        world = self._world
        num_hits = world.rng.randint(1, num_tokens) if world.chance(world.faults.prefix_hit) else 0
        return Landing(
            prompt=prompt,
            num_tokens=num_tokens,
            num_hits=num_hits,
            transfer_id=transfer_id,
            producer=self._engine.cluster.incarnations[producer],
            tp_size=tp_size,
            started_at=world.now,
            heard_at=world.now,
            on_end=on_end,
        )

    def _begin(
        self,
        landing: Landing,
        claim: int,
        effects: Sequence[Effect | StreamEffect],
        *,
        greets: bool = True,
    ) -> int:
        engine = self._engine
        self._world.count("started")
        landing.claim = claim
        self.landings[claim] = landing
        waits = self._world.chance(self._world.faults.queueing)
        if greets:
            effects = [*effects, *engine.peers.want(landing.producer.address, engine.clock())]
        engine.do(effects)
        if landing.is_open and (waits or not self._find_room(landing)):
            self._wait_for_room(landing)
        return claim

    def _wait_for_room(self, landing: Landing) -> None:
        """The request waits in the scheduler's queue, its lease renewed, its want repeated meanwhile."""

        def look() -> None:
            if self.landings.get(landing.claim) is not landing or not landing.is_open:
                return
            if self._world.chance(0.1):
                return self.abort(landing.claim)
            if not self._find_room(landing):
                return self._wait_for_room(landing)
            self._world.count("started late")

        self._world.after(self._world.rng.uniform(0.1, 3.0), lambda: self._engine.when_awake(look))

    def _find_room(self, landing: Landing) -> bool:
        """Blocks for all of the prompt; what is there already is in them."""
        pool = self._engine.pool
        firsts = [group.first_kept(landing.num_tokens, 1) for group in pool.groups]
        tables = pool.allocate_tables([landing.num_tokens - first for first in firsts], landing)
        if tables is None:
            return False
        hole = BlockId(NULL_BLOCK_ID)
        landing.tables = tuple((hole,) * n + table for n, table in zip(firsts, tables, strict=True))
        landing.blocks = pool.held(landing.tables)
        for group, (first, table) in enumerate(zip(firsts, landing.tables, strict=True)):
            for index in range(first, landing.num_hits):
                pool.write(table[index], (landing.prompt, index, group))
        self._engine.do(self._go_on(landing))
        return True

    def _go_on(self, landing: Landing) -> Sequence[Effect | StreamEffect]:
        """There are blocks: pull what is lent, or read along once the peer is known."""
        engine, now = self._engine, self._engine.clock()
        if not landing.blocks:
            return []
        if landing.num_hits == landing.num_tokens:
            self._world.count("nothing to move")
        if landing.loan_id is not None:
            return engine.consumer.start(landing.claim, self._pairs(landing), now)
        if not engine.peers.is_ready(landing.producer.address):
            return []
        return engine.streams.ready(
            landing.claim,
            self._pairs(landing),
            landing.num_hits,
            now,
            block_tokens=1,
            group_routes=self._passages(landing),
        )

    def _passages(self, landing: Landing) -> GroupRoutes:
        cluster = self._engine.cluster
        if cluster.groups == one_group(NUM_LAYERS):
            return ONE_TABLE
        ours, theirs = (
            tuple(toy_layout(rank, size, cluster.num_blocks, cluster.groups) for rank in range(size))
            for size in (self._engine.num_ranks, landing.tp_size)
        )
        return cluster.parts.plan_group_routes(theirs, ours, tuple(group.window for group in cluster.groups))

    def _tables_of(self, ticket: Ticket) -> Tables:
        return tuple(ticket.table_of(group) for group in range(len(ticket.block_ids)))

    def _pairs(self, landing: Landing) -> tuple[Pair, ...]:
        if landing.num_hits == landing.num_tokens:
            return ()
        return plan_pairs(landing.tp_size, self._engine.num_ranks, NUM_HEADS)

    # --- Effects ----------------------------------------------------------------------------------

    def peer_ready(self, address: Address) -> Sequence[Effect | StreamEffect]:
        effects: list[Effect | StreamEffect] = []
        for landing in list(self.landings.values()):
            if landing.producer.address != address or not landing.is_open:
                continue
            if landing.loan_id is None:
                effects += self._go_on(landing)
            else:
                pairs, landing.waiting_pairs = landing.waiting_pairs, ()
                self._read_rest(landing, pairs)
        return effects

    def found(self, claim: int, producer: Address) -> Sequence[Effect | StreamEffect]:
        self._world.count("found by name")
        landing = self.landings[claim]
        landing.producer = self._engine.cluster.incarnations[producer]
        landing.heard_at = self._world.now
        return self._engine.peers.want(producer, self._engine.clock())

    def read_early(self, effect: ReadEarly) -> None:
        self._world.count("early reads")
        if effect.part.groups is not None:
            self._world.count("early reads of cache groups")
        if effect.part.layers is not None:
            self._world.count("early reads of some layers")
        landing = self.landings[effect.claim]
        for pair in effect.pairs:
            self._ranks.post(landing, pair, [(effect.part, effect.block_ids)], is_last=False)

    def open_ticket(self, claim: int, text: str) -> Sequence[StreamEffect]:
        engine, now, landing = self._engine, self._engine.clock(), self.landings[claim]
        try:
            ticket = open_ticket(text, KEY)
            prompt_hash_of = partial(hash_of_prompt, landing.prompt)
            engine.cluster.parts.verify(ticket, FINGERPRINT, prompt_hash_of, landing.num_tokens)
        except BadTicket as error:
            return engine.streams.refuse(claim, FailureReason(FailureCode.TICKET_REFUSED, str(error)), now)
        return engine.streams.accept(claim, ticket, now)

    def lent(
        self, claim: int, ticket: Ticket, unread: tuple[Part, ...] | None
    ) -> Sequence[Effect | StreamEffect]:
        if unread is not None:
            self._world.count("lent to a stream that has read")
        elif any(read.landing is self.landings[claim] for read in self._engine.cluster.reads.reads):
            self._world.count("lent to a stream whose void reads still run")
        else:
            self._world.count("lent to a stream that has read nothing")
        landing = self.landings[claim]
        landing.loan_id, landing.sources = ticket.loan_id, self._tables_of(ticket)
        landing.unread = unread
        return self._go_on(landing)

    def start_reads(self, claim: int, pairs: tuple[Pair, ...]) -> None:
        landing = self.landings[claim]
        if self._engine.peers.is_ready(landing.producer.address):
            self._read_rest(landing, pairs)
        else:
            landing.waiting_pairs = pairs

    def cancel_reads(self, claim: int) -> None:
        landing = self.landings[claim]
        pairs, landing.waiting_pairs = landing.waiting_pairs, ()
        for pair in pairs:  # Never posted; there may be parts that were read early.
            self._ranks.post(landing, pair, [], is_last=False)
        self._ranks.cancel(landing)

    def _read_rest(self, landing: Landing, pairs: Sequence[Pair]) -> None:
        parts: Sequence[Part] | None = landing.unread
        if parts is None:
            prompt = GroupedPrompt(self._passages(landing), landing.num_tokens, 1)
            parts = prompt.cut([Part(landing.num_hits, landing.num_tokens - landing.num_hits)])
        sourced = [
            (part, landing.sources[part.groups.remote if part.groups is not None else 0]) for part in parts
        ]
        for pair in pairs:
            self._ranks.post(landing, pair, sourced, is_last=True)

    def _read_ended(self, landing: Landing, pair: Pair, ok: bool) -> None:
        engine, now = self._engine, self._engine.clock()
        said = (landing.claim, pair, ok, now, "" if ok else "the wire said so")
        engine.do([*engine.streams.read_ended(*said), *engine.consumer.read_ended(*said)])

    # --- Outcomes ---------------------------------------------------------------------------------

    def delivered(self, claim: int) -> None:
        landing = self.landings[claim]
        bounded.check_outcome(self._engine, landing)
        landing.delivered = True
        fenced.check_delivery(self._engine, landing)
        fresh.check_delivery(self._engine, landing)
        self._world.count("delivered")
        if len(landing.blocks) != landing.num_tokens:
            self._world.count("delivered to cache groups")
        landing.on_end(True)
        used_s = min(USE_MAX_S, self._world.spread(self._engine.cluster.use_mean_s))
        self._world.after(used_s, lambda: self._used(landing))

    def _used(self, landing: Landing) -> None:
        if self._engine.alive:
            fresh.check_use(self._engine, landing)
            del self.landings[landing.claim]
            self._free_blocks(landing)

    def failed(self, claim: int, reason: FailureReason) -> None:
        landing = self.landings[claim]
        bounded.check_failure(self._engine, landing)
        contained.check_failure(self._engine, landing, reason)
        landing.failed_at = self._world.now
        self._world.count(f"failed: {reason.code}")
        landing.on_end(False)

    def free_target(self, claim: int) -> None:
        landing = self.landings.pop(claim)
        bounded.check_target_freed(self._engine, landing)
        landing.freed = True
        self._free_blocks(landing)

    def _free_blocks(self, landing: Landing) -> None:
        fenced.check_free(self._engine, landing.blocks)
        self._engine.pool.free(landing.blocks, landing)
