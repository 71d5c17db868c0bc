"""What a consumer's ranks know: the parts of each claim's reads, and that they end together.

The end of a pair is reported once, when every part has ended and no other will come: after the last part, or
after a cancellation, which is never a success.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baton.core.ids import BlockId, Pair
from baton.protocol.effects import Part
from baton.sim.facts import Landing, Read

if TYPE_CHECKING:
    from baton.sim.engine import Engine


@dataclass(slots=True, eq=False)
class _PairReads:
    landing: Landing
    pair: Pair
    num_open: int = 0
    is_complete: bool = False
    ok: bool = True


class RankReads:
    def __init__(self, engine: "Engine", on_end: Callable[[Landing, Pair, bool], None]) -> None:
        self._engine = engine
        self._on_end = on_end
        self._reads: dict[tuple[int, Pair], _PairReads] = {}

    def post(
        self,
        landing: Landing,
        pair: Pair,
        parts: Sequence[tuple[Part, Sequence[BlockId]]],
        *,
        is_last: bool,
    ) -> None:
        """`parts`: each with the producer's table of it."""
        reads = self._reads.setdefault((landing.claim, pair), _PairReads(landing, pair))
        reads.is_complete |= is_last
        for part, table in parts:
            span = slice(part.first_token, part.first_token + part.num_tokens)
            reads.num_open += 1
            self._engine.cluster.reads.post(
                Read(
                    landing,
                    pair,
                    self._engine,
                    tuple(table[span]),
                    landing.tables[part.groups.local if part.groups is not None else 0][span],
                    part,
                    partial(self._ended, reads),
                )
            )
        self._settle(reads)

    def cancel(self, landing: Landing) -> None:
        for key, reads in list(self._reads.items()):
            if key[0] == landing.claim:
                # What is posted under this claim from now on is none of theirs.
                del self._reads[key]
                reads.is_complete, reads.ok = True, False
                self._settle(reads)
        self._engine.cluster.reads.cancel(self._engine, landing)

    def _ended(self, reads: _PairReads, ok: bool) -> None:
        reads.num_open -= 1
        reads.ok &= ok
        self._settle(reads)

    def _settle(self, reads: _PairReads) -> None:
        if reads.num_open or not reads.is_complete:
            return
        key = reads.landing.claim, reads.pair
        if self._reads.get(key) is reads:
            del self._reads[key]
        # In an event of its own, as a rank's report is.
        report = partial(self._on_end, reads.landing, reads.pair, reads.ok)
        self._engine.world.after(0.0, partial(self._engine.when_awake, report))
