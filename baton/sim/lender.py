"""P's side of an engine in the world: prompts are computed, told of, lent and freed.

In worlds of push a prompt is computed in chunks, told of chunk by chunk or layer by layer, and preempted at
any point. Nothing of it is kept then; the blocks go to whoever is next. What a window has left behind goes as
soon as the next chunk begins, and at the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baton.core.ids import BlockId, LoanId, RequestId, TransferId
from baton.core.kv_groups import NULL_BLOCK_ID
from baton.protocol.effects import Send
from baton.protocol.ticket import Ticket, sign_ticket
from baton.sim.checkers import bounded, held
from baton.sim.facts import Lent
from baton.sim.memory import NUM_LAYERS, Tables
from baton.sim.model import FINGERPRINT, KEY, PUBLIC_KEY, hash_of_prompt

if TYPE_CHECKING:
    from baton.sim.engine import Engine

TRIES_MAX = 12  # Of a chunk that finds no room.
PREFILL_MEAN_S = 0.3
CHUNK_MEAN_S = 1.0
CHUNK_MAX_S = 4.0  # Or a healed world might not be done in time.
KEEP_S = 8.0
STALL_S = 20.0  # Longer than anybody waits.


@dataclass(slots=True, eq=False)
class Prefill:
    """One request that is computed here, to be decoded elsewhere."""

    prompt: int
    num_tokens: int
    transfer_id: TransferId
    request_id: RequestId
    on_ticket: Callable[[str], None]
    run: Lent  # What it holds now.
    is_told: bool = False  # Somebody may read along.
    mean_s: float = CHUNK_MEAN_S
    num_done: int = 0
    num_tries: int = 0
    is_over: bool = False


class Lender:
    def __init__(self, engine: "Engine") -> None:
        self._engine, self._world = engine, engine.world
        self._num_transfers = 0
        self.lent: dict[LoanId, Lent] = {}
        self.prefills: list[Prefill] = []

    # --- Whole prompts: pull ----------------------------------------------------------------------

    def prefill(
        self, prompt: int, num_tokens: int, request_id: RequestId, on_ticket: Callable[[str], None]
    ) -> None:
        engine = self._engine
        self._num_transfers += 1
        transfer_id = TransferId(f"t{engine.address.epoch}-{self._num_transfers}")
        lent = Lent(prompt, transfer_id)
        counts = [num_tokens] * len(engine.pool.groups)
        tables = None if engine.producer.is_draining else engine.pool.allocate_tables(counts, lent)
        if tables is None:
            return self._world.count("P busy")
        lent.tables = tables
        prefill = Prefill(prompt, num_tokens, transfer_id, request_id, on_ticket, lent)
        self.prefills.append(prefill)
        self._later(self._world.spread(PREFILL_MEAN_S), partial(self._computed, prefill))

    def _computed(self, prefill: Prefill) -> None:
        self._write(prefill, 0, prefill.num_tokens, NUM_LAYERS)
        prefill.num_done = prefill.num_tokens
        self._end(prefill)

    # --- Chunk by chunk: push ---------------------------------------------------------------------

    def stream(
        self,
        transfer_id: TransferId,
        prompt: int,
        num_tokens: int,
        request_id: RequestId,
        on_ticket: Callable[[str], None],
    ) -> Prefill | None:
        engine = self._engine
        if engine.producer.is_draining:
            self._world.count("P drains")
            return None
        prefill = Prefill(prompt, num_tokens, transfer_id, request_id, on_ticket, Lent(prompt, transfer_id))
        told = engine.prefills.expect(
            transfer_id, hash_of_prompt(prompt, num_tokens), num_tokens, engine.clock()
        )
        if told is None:
            self._world.count("a prefill of that name computes already")
        prefill.is_told = told is not None
        self.prefills.append(prefill)
        engine.do(told or [])
        self._later(self._world.spread(0.1), partial(self._chunk, prefill))
        return prefill

    def abort(self, prefill: Prefill) -> None:
        if not prefill.is_over:
            self._world.count("prefill aborted")
            self._give_up(prefill, "aborted")

    def _chunk(self, prefill: Prefill) -> None:
        """The next chunk of it, if there is room."""
        world, faults = self._world, self._world.faults
        if prefill.is_over:
            return
        left = prefill.num_tokens - prefill.num_done
        count = 1 if world.chance(faults.chunked) else left
        self._drop_behind_windows(prefill)
        pool = self._engine.pool
        tables = pool.allocate_tables([count] * len(pool.groups), prefill.run)
        if tables is None:
            prefill.num_tries += 1
            if prefill.num_tries > TRIES_MAX:
                return self._give_up(prefill, "no room")
            if prefill.run.tables:
                return self._preempt(prefill)
            return self._later(world.spread(0.5), partial(self._chunk, prefill))
        before = prefill.run.tables or ((),) * len(tables)
        prefill.run.tables = tuple(old + new for old, new in zip(before, tables, strict=True))
        if not prefill.num_done and count < left and world.chance(faults.prefix_hit):
            world.count("P had the beginning")
            return self._done(prefill, count)
        run, took_s = prefill.run, min(world.spread(prefill.mean_s), CHUNK_MAX_S)
        if world.chance(faults.stall):
            world.count("prefill stalls")
            took_s += STALL_S
        if world.chance(faults.layerwise):
            self._later(took_s / 2, partial(self._half_done, prefill, run, count))
        self._later(took_s, partial(self._if_still, prefill, run, partial(self._done, prefill, count)))

    def _half_done(self, prefill: Prefill, run: Lent, count: int) -> None:
        def tell() -> None:
            end = prefill.num_done + count
            self._write(prefill, prefill.num_done, end, 1)
            self._world.count("told of a layer")
            self._tell(prefill, end, 1)

        self._if_still(prefill, run, tell)

    def _done(self, prefill: Prefill, count: int) -> None:
        world, faults = self._world, self._world.faults
        end = prefill.num_done + count
        self._write(prefill, prefill.num_done, end, NUM_LAYERS)
        prefill.num_done = end
        if world.chance(faults.preempt):
            return self._preempt(prefill)  # With or without having told of it.
        if end == prefill.num_tokens:
            return self._end(prefill)
        self._tell(prefill, 0, 0)
        self._chunk(prefill)

    def _if_still(self, prefill: Prefill, run: Lent, action: Callable[[], None]) -> None:
        if prefill.is_over or prefill.run is not run:
            return
        if self._world.chance(self._world.faults.preempt / 2):
            return self._preempt(prefill)
        action()

    def _tell(self, prefill: Prefill, partial_tokens: int, partial_layers: int) -> None:
        if prefill.is_told:
            firsts = self._firsts(prefill)
            self._engine.do(
                self._engine.prefills.progress(
                    prefill.transfer_id,
                    prefill.num_done,
                    self._from(firsts, prefill),
                    self._engine.clock(),
                    partial_tokens=partial_tokens,
                    partial_layers=partial_layers,
                    first_blocks=firsts if any(firsts) else (),
                )
            )

    def _preempt(self, prefill: Prefill) -> None:
        engine = self._engine
        self._world.count("preempted")
        self._world.note(engine.address.engine_id, f"preempts prompt {prefill.prompt} {prefill.run.tables}")
        if prefill.is_told:
            engine.do(engine.prefills.preempted(prefill.transfer_id, engine.clock()))
        pool = engine.pool
        pool.free(pool.held(prefill.run.tables)[::-1], prefill.run)  # To be given out in the same order.
        prefill.run, prefill.num_done = Lent(prefill.prompt, prefill.transfer_id), 0
        prefill.mean_s = self._world.rng.choice([0.01, CHUNK_MEAN_S])  # Some of it may be cached now.
        self._later(self._world.spread(prefill.mean_s), partial(self._chunk, prefill))

    # --- The end ----------------------------------------------------------------------------------

    def _end(self, prefill: Prefill) -> None:
        engine, world, lent = self._engine, self._world, prefill.run
        failed = world.chance(world.faults.prefill_fails)
        loan_id = None if failed else self._lend(lent)
        if loan_id is None:
            world.count("prefill failed" if failed else "prefill finished in a draining engine")
            return self._give_up(prefill, "failed" if failed else "drains")
        self._forget(prefill)
        self.lent[loan_id] = lent
        lent.lent_at = world.now
        self._drop_behind_windows(prefill)
        world.note(engine.address.engine_id, f"lends {loan_id} prompt {lent.prompt} blocks {lent.tables}")
        ticket = Ticket(
            producer=engine.address,
            control_url="sim://",
            public_key=PUBLIC_KEY,
            loan_id=loan_id,
            transfer_id=prefill.transfer_id,
            request_id=prefill.request_id,
            fingerprint=FINGERPRINT,
            tp_size=engine.num_ranks,
            block_tokens=1,
            block_ids=self._from(self._firsts(prefill), prefill),
            windows=tuple(group.window for group in engine.pool.groups),
            num_tokens=prefill.num_tokens,
            prompt_hash=hash_of_prompt(prefill.prompt, prefill.num_tokens),
        )
        text = sign_ticket(ticket, KEY)
        sends: Sequence[Send] = ()
        if prefill.is_told:
            sends = engine.prefills.finished(prefill.transfer_id, text, engine.clock())
        engine.do(sends)
        prefill.on_ticket(text)

    def _lend(self, lent: Lent) -> LoanId | None:
        engine, world = self._engine, self._world
        if not world.chance(world.faults.keeps):
            loan_id = engine.producer.lend(engine.clock())
            if loan_id is not None and world.faults.keeps and loan_id.counter % 4 == 2:
                world.count("given up if nobody has come")  # The router's client has gone, say.
                self._later(0.3 * (loan_id.counter % 7), partial(self._take_back, loan_id))
            return loan_id
        lent.kept_s = KEEP_S
        loan_id = engine.producer.keep(engine.clock(), KEEP_S)
        if loan_id is not None and world.chance(0.5):
            world.count("kept, and given up if nobody comes")
            self._later(world.rng.uniform(0, KEEP_S), partial(self._take_back, loan_id))
        return loan_id

    def _take_back(self, loan_id: LoanId) -> None:
        self._engine.do(self._engine.producer.give_up(loan_id))

    def _give_up(self, prefill: Prefill, reason: str) -> None:
        engine = self._engine
        self._forget(prefill)
        if prefill.is_told:
            engine.do(engine.prefills.failed(prefill.transfer_id, reason, engine.clock()))
        self._free(prefill.run)

    def _forget(self, prefill: Prefill) -> None:
        prefill.is_over = True
        self.prefills.remove(prefill)

    def free_loan(self, loan_id: LoanId, expired: bool) -> None:
        self._world.count("loans expired" if expired else "loans released")
        held.check_free(self._engine, loan_id)
        lent = self.lent.pop(loan_id)
        bounded.check_loan_freed(self._engine, lent)
        self._free(lent)

    # --- Parts ------------------------------------------------------------------------------------

    def _write(self, prefill: Prefill, first: int, end: int, num_layers: int) -> None:
        """The first `num_layers` layers, each where its group's table says."""
        pool = self._engine.pool
        for number, (group, table) in enumerate(zip(pool.groups, prefill.run.tables, strict=True)):
            num_places = sum(layer < num_layers for layer in group.layers)
            for index in range(first, end):
                pool.write(table[index], (prefill.prompt, index, number), num_places)

    def _firsts(self, prefill: Prefill) -> tuple[int, ...]:
        """Of each group, the first block that is seen behind the whole prompt."""
        return tuple(group.first_kept(prefill.num_tokens, 1) for group in self._engine.pool.groups)

    def _from(self, firsts: Sequence[int], prefill: Prefill) -> Tables:
        return tuple(table[first:] for first, table in zip(firsts, prefill.run.tables, strict=True))

    def _drop_behind_windows(self, prefill: Prefill) -> None:
        pool, run, early = self._engine.pool, prefill.run, self._engine.cluster.parts.drops_early
        tables: list[tuple[BlockId, ...]] = []
        for group, table in zip(pool.groups, run.tables, strict=False):
            num_gone = group.first_kept(prefill.num_done, 1)
            if group.window is not None:
                num_gone = min(num_gone + early, len(table))
            gone = pool.held((table[:num_gone],)) if num_gone else ()
            if gone and prefill.num_done < prefill.num_tokens:
                self._world.count("a window moves on")
            pool.free(gone, run)
            tables.append((BlockId(NULL_BLOCK_ID),) * num_gone + table[num_gone:])
        run.tables = tuple(tables)

    def _free(self, run: Lent) -> None:
        pool = self._engine.pool
        pool.free(pool.held(run.tables), run)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._world.after(delay_s, lambda: self._engine.when_awake(action))
