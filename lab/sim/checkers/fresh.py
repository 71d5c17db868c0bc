"""I1 fresh: D uses a block only if every byte came from blocks that P held, unmodified, for exactly this
request's tokens, for the whole duration of the copy, and is KV of the weights that D has now.

Every cache group is checked in two ways. By content: every word is the KV
that these tokens must have. By provenance: a read that succeeded wrote every word. I2 covers whether its
source was held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.sim.checkers import held
from lab.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from baton.engine.scheduling.remote_kv import Load
    from baton.testing.host.model import Words
    from lab.sim.host.engine import Engine


def check_load(engine: Engine, load: Load) -> None:
    """The load has ended, and no token after it has been computed."""
    first, last = load.num_local_tokens, load.num_valid_tokens
    request, kv_cache = load.request, engine.scheduler.kv_cache
    if last <= first or (kv_cache.is_hybrid and last < request.num_computed_tokens):
        return  # A failed load is not used.
    kv = engine.cluster.model.kv(request.all_token_ids[:last], request.cache_salt, engine.ranks.weights)
    block_tokens = engine.spec.block_tokens
    for index, block_ids in enumerate(kv_cache.get_block_ids(request.request_id)):
        kept = engine.groups[index].first_kept(last, block_tokens)
        if kv_cache.is_hybrid and 0 in block_ids[kept:]:
            raise Violation("I1", "delivered without a block that attention sees", request.request_id)
        _check_group(engine, load, index, block_ids, kv, max(first, kept * block_tokens))


def _check_group(engine: Engine, load: Load, index: int, block_ids: list[int], kv: Words, first: int) -> None:
    for number in engine.ranks.writers(index, block_ids, first, len(kv)):
        if number <= 0:
            raise Violation("I1", "delivered a slot that no read has filled", load.request.request_id)
        read = engine.cluster.reads.posted[number]
        held.check_accepted(read)
        if not read.ok:
            raise Violation("I1", "delivered bytes of a read that failed", f"read {number}")
    if not engine.ranks.holds(index, block_ids, kv, first):
        raise Violation("I1", "delivered wrong bytes", load.request.request_id)
