"""HTTP: paths, fields of requests and answers, errors and headers, of engines and of the router.

`docs/api.md`, which a test compares with the code, says which request fields are implemented.
"""

import asyncio
import json
import re
from typing import Any

import httpx
import msgspec

from baton.core.errors import UserError
from baton.engine.core.client import EngineDeadError, EngineUnreadyError
from baton.http.errors import TYPES, ErrorBody
from baton.http.workers import WorkerFailed
from baton.router.app import Router
from baton.router.errors import RouterError
from baton.router.fleet import Introduction as SeenIntroduction
from baton.router.settings import RouterSettings
from baton.server.app import build_admin_app, build_app
from baton.server.errors import describe
from baton.server.introduction import Introduction
from baton.server.protocol.chat import ChatChunk, ChatCompletion, ChatRequest
from baton.server.protocol.completion import Completion, CompletionRequest
from baton.server.protocol.lent import Lent
from baton.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from tests.golden.golden import check, literals, source
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
    "answer to GET /baton/introduction": Introduction,
    "what the router reads of it": SeenIntroduction,
    "request of POST /baton/take_back": Lent,
    "error": ErrorBody,
}
FRONTS = ("baton/http", "baton/router", "baton/server")
INTRODUCTION = Introduction(
    engine_id="e",
    introduction=None,
    kv_role="kv_both",
    block_size=16,
    tp_size=1,
    max_model_len=4096,
    served_model_name="name",
    fingerprint=MODEL,
    secret_ids=("id",),
)


def paths(app: Any) -> list[str]:
    return sorted(f"{method} {route.path}" for route in app.routes for method in route.methods - {"HEAD"})


def test_bodies() -> None:
    check("http_bodies", [line for name, kind in BODIES.items() for line in (f"# {name}", *shape(kind))])


def test_paths() -> None:
    router = Router(RouterSettings(prefill_urls=("http://p",), decode_urls=("http://d",)))
    with service_around(ScriptedEngine()) as service:
        apps = {
            "an engine": build_app(service),
            "an engine's admin port": build_admin_app(service),
            "the router": router.app(),
            "the router's admin port": router.admin_app(),
        }
    check("http_paths", [line for name, app in apps.items() for line in (f"# {name}", *paths(app))])


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
    router._pairs.note_handed_over(producer, consumer)
    producer.introduction = SeenIntroduction("p", None, lost_links={"d": 1})
    found = await answers(router.app(), "/fleet", "/health", "/version")
    await router._client.aclose()
    return found


def test_answers_about_a_state() -> None:
    with service_around(ScriptedEngine(), introduction=INTRODUCTION) as service:
        engine = asyncio.run(answers(build_app(service), "/v1/models", "/version", "/baton/introduction"))
    with service_around(ScriptedEngine(), admin_port=1) as service:
        engine |= asyncio.run(answers(build_app(service), "/health"))
    found = {"an engine": engine, "the router": asyncio.run(answers_of_the_router())}
    assert engine["/v1/models"]["data"][0]["owned_by"] == "baton"
    check("http_states", json.dumps(kinds(found), indent=1).splitlines())


def test_words_for_the_routers_health() -> None:
    words = re.findall(r'\{"status": "(\w+)"', source("baton/router"))
    assert sorted(words) == ["broken", "draining", "ok", "unavailable"]


# --- Errors and headers -----------------------------------------------------------------------------


def test_types_of_errors() -> None:
    assert TYPES == {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        405: "method_not_allowed_error",
        408: "timeout_error",
        413: "request_too_large_error",
        415: "unsupported_media_type_error",
        502: "upstream_error",
        503: "service_unavailable_error",
        504: "timeout_error",
    }
    made = [
        RouterError.of_user(UserError("message", field="field")),
        RouterError.gateway("message"),
        RouterError.unavailable("message"),
        RouterError.too_late("message"),
    ]
    assert [(error.status, error.kind) for error in made] == [
        (400, "invalid_request_error"),
        (502, "upstream_error"),
        (503, "service_unavailable_error"),
        (504, "timeout_error"),
    ]
    assert json.loads(msgspec.json.encode(made[0].body())) == {
        "error": {"message": "field: message", "type": "invalid_request_error", "param": "field", "code": 400}
    }


def test_codes_of_errors() -> None:
    errors = (
        UserError("m"),
        EngineDeadError("m"),
        EngineUnreadyError("m"),
        WorkerFailed("m"),
        ValueError("m"),
    )
    assert [(status, body.type, body.code) for status, body in map(describe, errors)] == [
        (400, "invalid_request_error", 400),
        (503, "service_unavailable_error", "engine_dead"),
        (503, "service_unavailable_error", "not_ready"),
        (500, "server_error", "input_failed"),
        (500, "server_error", 500),
    ]
    assert sorted(set(re.findall(r'\bcode="(\w+)"', source(*FRONTS)))) == [
        "aborted",
        "admission_timeout",
        "bad_header",
        "body_budget",
        "body_timeout",
        "body_too_large",
        "connector_retired",
        "draining",
        "engine_dead",
        "engine_error",
        "host_not_allowed",
        "invalid_api_key",
        "model_not_found",
        "not_ready",
        "unsupported_media_type",
    ]


def test_headers() -> None:
    ours = {text.lower() for text in literals(*FRONTS) if re.fullmatch(r"[Xx]-[A-Za-z-]+", text)}
    assert sorted(ours) == [
        "x-accel-buffering",
        "x-baton-prefill",
        "x-baton-prompt",
        "x-request-id",
        "x-session-id",
    ]
    assert "total={}; local={}; transferred={}" in literals(*FRONTS), "the value of x-baton-prompt"
