"""`GET /baton/introduction`: the identity of this engine for its cluster."""

import asyncio
import re
from typing import Any

import httpx
import msgspec
import pytest

from baton.core.config import CacheConfig, ClusterSecret, EngineConfig, KVTransferConfig
from baton.core.engine_card import EngineCard
from baton.server.introduction import SECRET_ID_BYTES, introduce, secret_ids, text_id
from tests.server.fakes import MAX_MODEL_LEN, LiveServer, ScriptedEngine, model_config

MODEL = model_config()
CARD = EngineCard(
    "p0",
    "signed",
    "kv_producer",
    32,
    1,
    MAX_MODEL_LEN,
    MODEL.served_model_name,
    MODEL.kv_identity(CacheConfig().hash_seed),
    (),
)
TRANSFER = KVTransferConfig(kv_connector="BatonPushConnector", kv_role="kv_producer", engine_id="p0")


def config(transfer: KVTransferConfig | None) -> EngineConfig:
    return EngineConfig(
        model_config=model_config(), cache_config=CacheConfig(block_size=32), kv_transfer_config=transfer
    )


@pytest.mark.parametrize("text", ["signed", None])
def test_an_engine_with_a_connector_is_introduced(text: str | None) -> None:
    engine = ScriptedEngine(introduces_as=text)
    assert asyncio.run(introduce(config(TRANSFER), engine)) == msgspec.structs.replace(
        CARD, introduction=text
    )


def test_the_text_side_is_named_by_the_tokenizer_and_what_ends_an_answer() -> None:
    ids = [text_id("a", (1,)), text_id("b", (1,)), text_id("a", (1, 2)), text_id("", (1,))]
    assert len(set(ids)) == 4
    assert text_id("a", (2, 1)) == ids[2]
    assert ids[3] == "", "it is not known"
    card = asyncio.run(introduce(config(TRANSFER), ScriptedEngine(introduces_as=None), tokenizer="a"))
    assert card is not None
    assert card.text_id == text_id("a", model_config().eos_token_ids)


def test_an_engine_without_a_connector_is_not_introduced() -> None:
    assert asyncio.run(introduce(config(None), ScriptedEngine(introduces_as="signed"))) is None


def test_a_router_reads_the_current_introduction_or_gets_404(
    http: httpx.Client, live: LiveServer, engine: ScriptedEngine
) -> None:
    assert http.get("/baton/introduction").status_code == 404
    live.service.introduction = CARD
    try:
        for text in ("signed", "of the ranks that were started anew", None):
            engine.introduces_as = text
            card = msgspec.structs.replace(CARD, introduction=text)
            assert http.get("/baton/introduction").json() == msgspec.json.decode(msgspec.json.encode(card))
    finally:
        live.service.introduction = engine.introduces_as = None


def test_engines_see_that_they_share_a_secret_and_nothing_of_it() -> None:
    old, new = b"old secret of 16 bytes", b"new secret of 16 bytes"
    (old_id,) = secret_ids(ClusterSecret(old))
    new_id, previous_id = secret_ids(ClusterSecret(new, previous=old))
    assert (old_id == previous_id, old_id == new_id) == (True, False)
    assert len(bytes.fromhex(old_id)) == SECRET_ID_BYTES
    assert bytes.fromhex(old_id) not in ClusterSecret(old).derive("baton.ticket.1")
    assert secret_ids(None) == ()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt", "total"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7]}, 3),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, None),
    ],
)
def test_every_answer_has_the_header_with_loaded_tokens(
    http: httpx.Client,
    engine: ScriptedEngine,
    path: str,
    prompt: dict[str, Any],
    total: int | None,
    is_stream: bool,
) -> None:
    engine.num_cached_tokens, engine.num_transferred_tokens = 3, 2
    try:
        answer = http.post(path, json={**prompt, "max_tokens": 2, "stream": is_stream})
    finally:
        engine.num_cached_tokens = engine.num_transferred_tokens = 0
    assert answer.status_code == 200
    found = re.fullmatch(r"total=(\d+); local=1; transferred=2", answer.headers["x-baton-prompt"])
    assert found is not None
    assert int(found[1]) == total or total is None
    assert answer.headers["x-baton-weights"] == "of these weights"
