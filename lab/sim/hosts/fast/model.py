"""The toy model that every engine of a fast world serves, and the configuration of these engines."""

from __future__ import annotations

from functools import cache

import msgspec

from baton.connectors.host_view import BATON_POLICY
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.metadata import PullHandshake
from baton.connectors.pull.settings import PullSettings, TurnSettings
from baton.connectors.push.settings import PushSettings
from baton.core.identity import CurrentIdentity, KVIdentity
from baton.core.ids import EngineId
from baton.core.timers import Timers
from baton.protocol.handshake import RankCard
from lab.sim.hosts.fast.memory import NUM_HEADS, NUM_LAYERS, Groups, toy_layout
from lab.sim.kernel.wire import SECRET

CONTROL_HOST, CONTROL_PORT = "10.0.0.1", 14600  # The same for every engine: the wire finds engines by name.
CONTROL_URL = f"tcp://{CONTROL_HOST}:{CONTROL_PORT}"
PUBLIC_KEY = bytes(32)  # The same for every engine: the wire knows which process sent a frame.
TURN_KEPT_S = 8.0
FIRST_WEIGHTS = "1"
KV_IDENTITY = KVIdentity(
    model="toy",
    weights=FIRST_WEIGHTS,
    dtype="float32",
    num_layers=NUM_LAYERS,
    num_kv_heads=NUM_HEADS,
    head_dim=1,
    hash_seed="s",
)


@cache
def handshakes(num_ranks: int, num_blocks: int, groups: Groups) -> dict[int, PullHandshake]:
    return {
        rank: PullHandshake(RankCard(rank, toy_layout(rank, num_ranks, num_blocks, groups), {"toy": b""}))
        for rank in range(num_ranks)
    }


@cache
def settings_of(push: bool, keeps_turns: bool, timers: Timers) -> PullSettings:
    turns = TurnSettings(ttl_s=TURN_KEPT_S, min_tokens=1) if keeps_turns else None
    if not push:
        return PullSettings(timers=timers, turns=turns)
    peers = (f"{CONTROL_HOST}:{CONTROL_PORT}",)
    return PushSettings(timers=timers, turns=turns, stream="layer", allowed_peers=peers)


def identity_of(
    engine_id: EngineId, num_ranks: int, settings: PullSettings, groups: Groups, weights: tuple[str, str]
) -> EngineIdentity:
    """An engine that can lend and fetch. A block holds one token. `weights`: digest and version."""
    kv = msgspec.structs.replace(KV_IDENTITY, weights=weights[0], version=weights[1])
    return EngineIdentity(
        engine_id=engine_id,
        current=CurrentIdentity(kv),
        tp_size=num_ranks,
        tp_rank=0,
        block_tokens=1,
        is_producer=True,
        is_consumer=True,
        recomputes_failed_loads=True,
        raises_user_errors=False,
        policy=BATON_POLICY,
        secret=SECRET,
        settings=settings,
        does_push=isinstance(settings, PushSettings),
        groups=groups,
    )


def tokens_of(prompt: int, num_tokens: int) -> list[int]:
    return [prompt] * num_tokens
