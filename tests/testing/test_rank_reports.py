"""If one rank breaks a rule, the kit names the rank."""

from __future__ import annotations

from typing import Any

import pytest

from baton.testing.contract import ConnectorCase
from baton.testing.contract.case import Shape
from baton.testing.contract.site import ToySite
from baton.testing.contract.story import ContractBroken, Story
from baton.testing.contract.world import World
from tests.testing.broken.ranks import OneRankListsBlocks, OneRankReportsLoads, OneRankReportsSends

PROMPT = list(range(1, 14))  # Three blocks and one token.
STORY_MAX = 40  # Lines. A host that waits for a load polls each rank at least 30 times before it gives up.


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (OneRankReportsLoads, "(reported by rank 0, not reported by rank 1)"),
        (OneRankReportsSends, "(reported by rank 1, not reported by rank 0)"),
        (OneRankListsBlocks, "rank 1: get_block_ids_with_load_errors answers []"),
    ],
)
def test_the_detail_names_the_rank(kind: Any, named: str) -> None:
    case = ConnectorCase(path=f"{kind.__module__}:{kind.__name__}", patience_s=0.0)
    world = World(ToySite(case), Shape(tp=2), Story())
    with pytest.raises(ContractBroken) as raised:
        _store_and_load(world)
    assert raised.value.rule == kind.rule
    assert named in raised.value.detail
    assert raised.value.story.count("\n") < STORY_MAX


def _store_and_load(world: World) -> None:
    try:
        world.ask_to_store(PROMPT, None)
        world.ask(PROMPT, 1, None)
    except BaseException:
        world.shutdown()
        raise
    world.finish()
