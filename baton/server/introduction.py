"""Who this engine is to the engines of its cluster: a router asks, and tells the other side of a push."""

import msgspec

from baton.core.config import EngineConfig
from baton.server.samples import Engine


class Introduction(msgspec.Struct, frozen=True):
    engine_id: str
    introduction: str | None  # Signed by the engine's connector, for other engines; None: it does not push.
    kv_role: str
    block_size: int
    tp_size: int
    max_model_len: int  # Tokens of prompt and answer together.


async def introduce(config: EngineConfig, engine: Engine) -> Introduction | None:
    """None without a connector."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_role is None:
        return None
    return Introduction(
        engine_id=transfer.engine_id,
        introduction=await engine.introduction(),
        kv_role=transfer.kv_role,
        block_size=config.cache_config.block_size,
        tp_size=config.parallel_config.tensor_parallel_size,
        max_model_len=config.model_config.max_model_len,
    )
