"""HTTP: paths, fields of requests and answers, errors and headers, of engines and of the router.

`docs/api.md`, which a test compares with the code, says which request fields are implemented.
"""

import asyncio
import json
from typing import Any

import httpx

from baton.core.engine_card import EngineCard
from baton.http.errors import ErrorBody
from baton.router.processes.app import Router
from baton.router.values.settings import RouterSettings
from baton.server.app import build_admin_app, build_app
from baton.server.protocol.chat import ChatChunk, ChatCompletion, ChatRequest
from baton.server.protocol.completion import Completion, CompletionRequest
from baton.server.protocol.lent import Lent
from baton.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from tests.golden.golden import check
from tests.golden.samples import MODEL
from tests.golden.shapes import shape
from tests.server.fakes import ScriptedEngine, service_around

BODIES: dict[str, type] = {
    "request of POST /v1/completions": CompletionRequest,
    "answer to it, and an event of its stream": Completion,
    "request of POST /v1/chat/completions": ChatRequest,
    "answer to a chat": ChatCompletion,
    "event of a chat's stream": ChatChunk,
    "request of POST /tokenize": TokenizeRequest,
    "tokens": TokenizeResponse,
    "request of POST /detokenize": DetokenizeRequest,
    "text of tokens": DetokenizeResponse,
    "answer to GET /baton/introduction": EngineCard,
    "request of POST /baton/take_back": Lent,
    "error": ErrorBody,
}
FRONTS = ("baton/http", "baton/router", "baton/server")
INTRODUCTION = EngineCard(
    engine_id="e",
    introduction=None,
    kv_role="kv_both",
    block_size=16,
    tp_size=1,
    max_model_len=4096,
    served_model_name="name",
    kv_identity=MODEL,
    secret_ids=("id",),
)


def paths(app: Any) -> list[str]:
    return sorted(f"{method} {route.path}" for route in app.routes for method in route.methods - {"HEAD"})


def test_bodies() -> None:
    check("http_bodies", [line for name, kind in BODIES.items() for line in (f"# {name}", *shape(kind))])


async def paths_of_the_router() -> dict[str, list[str]]:
    router = Router(RouterSettings(prefill_urls=("http://p",), decode_urls=("http://d",)))
    pages, admin = router.paths
    return {"the router": sorted([*pages, *admin]), "the router's admin port": sorted(admin)}


def test_paths() -> None:
    with service_around(ScriptedEngine()) as service:
        apps = {
            "an engine": build_app(service),
            "an engine's admin port": build_admin_app(service),
        }
    found = {name: paths(app) for name, app in apps.items()}
    found |= asyncio.run(paths_of_the_router())
    check("http_paths", [line for name, known in found.items() for line in (f"# {name}", *known)])


# --- Answers about a state --------------------------------------------------------------------------


def kinds(value: Any) -> Any:
    """The answer with the type of each value in its place."""
    match value:
        case dict():
            return {key: kinds(item) for key, item in value.items()}
        case list():
            return [kinds(item) for item in value[:1]]
        case _:
            return type(value).__name__


async def answers(app: Any, *asked: str) -> dict[str, Any]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        return {path: (await client.get(path)).json() for path in asked}


async def answers_of_the_router() -> dict[str, Any]:
    router = Router(RouterSettings(prefill_urls=("http://p",), decode_urls=("http://d",)))
    producer, consumer = router.fleet.engines
    router._parts.pairs.note_handed_over(producer, consumer)
    producer.introduction = EngineCard("p", None, lost_links={"d": 1})
    port = await router.listen("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        found = {path: (await client.get(path)).json() for path in ("/fleet", "/health", "/version")}
    await router.close()
    return found


def test_answers_about_a_state() -> None:
    with service_around(ScriptedEngine(), introduction=INTRODUCTION) as service:
        engine = asyncio.run(answers(build_app(service), "/v1/models", "/version", "/baton/introduction"))
    with service_around(ScriptedEngine(), admin_port=1) as service:
        engine |= asyncio.run(answers(build_app(service), "/health"))
    found = {"an engine": engine, "the router": asyncio.run(answers_of_the_router())}
    assert engine["/v1/models"]["data"][0]["owned_by"] == "baton"
    check("http_states", json.dumps(kinds(found), indent=1).splitlines())
