"""I1 fresh: D uses a block only if every byte came from blocks that P held, unmodified, for exactly this
request's tokens, for the whole duration of the copy.

Of every cache group: whatever blocks of it the request holds, which is all that its layers will see, and all
that others may find. By content: every word is what these tokens' KV has to be. By provenance: every word was
written by a read that succeeded; whether its source was held is I2's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.engine.scheduling.remote_kv import Load
from baton.sim.checkers.violation import Violation
from baton.sim.full.checkers import held
from baton.sim.full.model import Words

if TYPE_CHECKING:
    from baton.sim.full.engine import Engine


def check_delivery(engine: Engine, load: Load) -> None:
    """The load has ended, and nothing has been computed behind it yet."""
    first, last = load.num_local_tokens, load.num_valid_tokens
    request, kv_cache = load.request, engine.scheduler.kv_cache
    if last <= first or (kv_cache.is_hybrid and last < request.num_computed_tokens):
        return  # Failed: nothing of it is believed.
    kv = engine.cluster.model.kv(request.all_token_ids[:last], request.cache_salt)
    block_tokens = engine.machine.block_tokens
    for index, block_ids in enumerate(kv_cache.get_block_ids(request.request_id)):
        kept = engine.groups[index].first_kept(last, block_tokens)
        if kv_cache.is_hybrid and 0 in block_ids[kept:]:
            raise Violation("I1", "delivered without a block that attention sees", request.request_id)
        _check_group(engine, load, index, block_ids, kv, max(first, kept * block_tokens))


def _check_group(engine: Engine, load: Load, index: int, block_ids: list[int], kv: Words, first: int) -> None:
    for number in engine.ranks.writers(index, block_ids, first, len(kv)):
        if number <= 0:
            raise Violation("I1", "delivered a slot that no read has filled", load.request.request_id)
        read = engine.cluster.reads.reads[number]
        held.check_accepted(read)
        if not read.ok:
            raise Violation("I1", "delivered bytes of a read that failed", f"read {number}")
    if not engine.ranks.holds(index, block_ids, kv, first):
        raise Violation("I1", "delivered wrong bytes", load.request.request_id)
