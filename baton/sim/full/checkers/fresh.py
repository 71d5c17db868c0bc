"""I1 fresh: D uses a block only if every byte came from blocks that P held, unmodified, for exactly this
request's tokens, for the whole duration of the copy.

By content: every word is what these tokens' KV has to be. By provenance: every word was written by a read
that succeeded; whether its source was held is I2's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.engine.remote_kv import Load
from baton.sim.checkers.violation import Violation
from baton.sim.full.checkers import held

if TYPE_CHECKING:
    from baton.sim.full.engine import Engine


def check_delivery(engine: Engine, load: Load) -> None:
    """The load has ended, and nothing has been computed behind it yet."""
    first, last = load.num_local_tokens, load.num_valid_tokens
    if last <= first:
        return  # Failed: nothing of it is believed.
    request = load.request
    (block_ids,) = engine.scheduler.kv_cache.get_block_ids(request.request_id)
    for number in engine.ranks.writers(block_ids, first, last):
        if number <= 0:
            raise Violation("I1", "delivered a slot that no read has filled", request.request_id)
        read = engine.cluster.reads.reads[number]
        held.check_accepted(read)
        if not read.ok:
            raise Violation("I1", "delivered bytes of a read that failed", f"read {number}")
    kv = engine.cluster.model.kv(request.all_token_ids[:last], request.cache_salt)
    if not engine.ranks.holds(block_ids, kv, first):
        raise Violation("I1", "delivered wrong bytes", request.request_id)
