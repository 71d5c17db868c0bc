"""An engine's answer to `GET /baton/introduction`: what routers and `baton doctor` compare of engines."""

import msgspec

from baton.core.identity import KVIdentity


class EngineCard(msgspec.Struct, frozen=True):
    """An engine's report of its connector and its model.

    Baton's engines set all fields. The defaults are for engines of an older release, and for a vLLM, whose
    connector reports only `engine_id`, `introduction`, `kv_identity` and `has_states`. None: not reported.
    """

    engine_id: str
    introduction: str | None  # Signed by the connector, for other engines; None: it does not push.
    kv_role: str | None = None
    block_size: int | None = None
    tp_size: int | None = None
    max_model_len: int | None = None  # Tokens of prompt and answer together.
    # Compared by a router before it pairs two engines, or lets two engines answer under one name.
    served_model_name: str | None = None
    kv_identity: KVIdentity | None = None
    # Hex; first the secret that this engine signs with, then others that it accepts.
    secret_ids: tuple[str, ...] | None = None
    lost_links: dict[str, int] = {}  # Data connections that broke, by the engine id of the peer.
    has_states: bool = False  # Some layers have a recurrent state.
    # Loans of cached tokens that it grants to requests with `baton_lend_stored`: "host": from host memory;
    # "cache": from all tiers, through its GPU cache.
    lends: tuple[str, ...] = ()
    # Digest of tokenizer, chat template and the tokens that end an answer; empty: not known.
    text_id: str = ""
