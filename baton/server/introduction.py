"""Identity of this engine for routers, which compare engines and pass introductions to the other side of a
push.
"""

import hashlib
from collections.abc import Sequence

import msgspec

from baton.core.config import ClusterSecret, EngineConfig
from baton.core.engine_card import EngineCard
from baton.engine.core.client import EngineClient

SECRET_ID_PURPOSE = "baton.secret_id.1"
# Enough to tell secrets apart. A guess of the secret costs as much as one of a signature.
SECRET_ID_BYTES = 8
TEXT_ID_DIGITS = 32


async def introduce(
    config: EngineConfig, engine: EngineClient, *, lends: tuple[str, ...] = (), tokenizer: str = ""
) -> EngineCard | None:
    """Return the card; None without a connector. `tokenizer`: its digest."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_role is None:
        return None
    return EngineCard(
        engine_id=transfer.engine_id,
        introduction=await engine.introduction(),
        kv_role=transfer.kv_role,
        block_size=config.cache_config.block_size,
        tp_size=config.parallel_config.tensor_parallel_size,
        max_model_len=config.model_config.max_model_len,
        served_model_name=config.model_config.served_model_name,
        kv_identity=config.model_config.kv_identity(config.cache_config.hash_seed),
        secret_ids=secret_ids(config.cluster_secret),
        has_states=bool(config.model_config.state_layers),
        lends=lends,
        text_id=text_id(tokenizer, config.model_config.eos_token_ids),
    )


def text_id(tokenizer: str, eos_token_ids: Sequence[int]) -> str:
    if not tokenizer:
        return ""
    named = msgspec.json.encode([tokenizer, sorted(eos_token_ids)])
    return hashlib.sha256(named).hexdigest()[:TEXT_ID_DIGITS]


def secret_ids(secret: ClusterSecret | None) -> tuple[str, ...]:
    """Return ids that show whether two engines share a secret. Empty without a secret."""
    if secret is None:
        return ()
    return tuple(key[:SECRET_ID_BYTES].hex() for key in secret.derive_all(SECRET_ID_PURPOSE))
