"""Who this engine is to the engines of its cluster: what a router hands to the other side of a push."""

import msgspec

from baton.core.config import EngineConfig
from baton.server.samples import Engine


class Introduction(msgspec.Struct, frozen=True):
    engine_id: str
    introduction: str  # Signed by the engine's connector, for other engines only.
    kv_role: str
    block_size: int
    tp_size: int


async def introduce(config: EngineConfig, engine: Engine) -> Introduction | None:
    """None without a connector that introduces itself."""
    transfer, text = config.kv_transfer_config, await engine.introduction()
    if transfer is None or transfer.kv_role is None or text is None:
        return None
    return Introduction(
        engine_id=transfer.engine_id,
        introduction=text,
        kv_role=transfer.kv_role,
        block_size=config.cache_config.block_size,
        tp_size=config.parallel_config.tensor_parallel_size,
    )
