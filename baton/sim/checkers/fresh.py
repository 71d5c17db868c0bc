"""I1 fresh: D uses a block only if every byte came from blocks that P held, unmodified, for exactly this
request's tokens, for the whole duration of the copy."""

from typing import TYPE_CHECKING

from baton.sim.checkers.violation import Violation
from baton.sim.facts import Landing
from baton.sim.memory import TORN

if TYPE_CHECKING:
    from baton.sim.engine import Engine


def check_delivery(engine: "Engine", landing: Landing) -> None:
    if engine.cluster.is_excused(landing, engine.address.engine_id):
        return
    found = [engine.pool.contents(block) for block in landing.blocks]
    if any(TORN in contents for contents in found):
        raise Violation("I1", "accepted bytes whose source was not held")
    if not _is_right(engine, landing):
        raise Violation("I1", "delivered wrong bytes")


def check_use(engine: "Engine", landing: Landing) -> None:
    """When the request has finished: what it decoded from is still what was delivered."""
    is_excused = engine.cluster.is_excused(landing, engine.address.engine_id)
    if not is_excused and not _is_right(engine, landing):
        raise Violation("I1", "delivered blocks changed while in use")


def _is_right(engine: "Engine", landing: Landing) -> bool:
    """Of each group, all that its layers see behind the prompt."""
    return all(
        engine.pool.contents(table[index]) == {(landing.prompt, index, number)}
        for number, (group, table) in enumerate(zip(engine.pool.groups, landing.tables, strict=True))
        for index in range(group.first_kept(landing.num_tokens, 1), landing.num_tokens)
    )
