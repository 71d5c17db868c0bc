"""HTTP application of one engine: routes and their handlers.

POST /v1/completions, /v1/chat/completions      OpenAI's, with vLLM's extensions and `kv_transfer_params`
GET  /v1/models, POST /tokenize, /detokenize
GET  /health (503 while the engine should get no requests), /version, /weight_info, /metrics
POST /update_weights                            other weights, from a folder that the operator allows
GET  /baton/requests/{id}                       what happened here to a recent request, and when
GET  /baton/introduction                        for routers that start both legs of a request at once
POST /baton/take_back                           for routers whose client left before the second leg
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import baton
from baton.core.errors import UserError
from baton.core.retention import SESSION_HEADER
from baton.engine.core.client import EngineDeadError, EngineUnreadyError
from baton.engine.core.weights_update import UpdateFailed
from baton.http.bodies import ClientGone
from baton.http.errors import RETRY_AFTER_S, ApiError
from baton.http.gate import Gate
from baton.http.json_body import decode_as
from baton.server.chat import ChatWork, admit_chat
from baton.server.completions import CompletionWork, admit_completion
from baton.server.http import (
    CLIENT_GONE,
    EventStream,
    error_response,
    json_response,
    request_id_of,
    until_client_leaves,
)
from baton.server.protocol.chat import ChatCompletion, ChatRequest, plain_messages, plain_tools
from baton.server.protocol.completion import Completion, CompletionRequest
from baton.server.protocol.fields import Endpoint
from baton.server.protocol.lent import Lent
from baton.server.protocol.parse import parse_request
from baton.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from baton.server.protocol.weights import UpdateWeightsRequest
from baton.server.service import Service
from baton.server.spans import loan_spans_of, spans_of

logger = logging.getLogger(__name__)

Request_ = TypeVar("Request_", CompletionRequest, ChatRequest)
Handler = Callable[[Request], Awaitable[Response]]


def build_app(service: Service, *, checked_hosts: Sequence[str] | None = None) -> Starlette:
    """Return the application of the main port. The service is closed by its owner, not by the application.

    `checked_hosts`: see `Gate`. With an admin port, `build_admin_app` serves metrics and /baton/*.
    """
    service.engine.on_stats = service.metrics.observe_stats
    service.engine.on_weights = service.take_weights
    service.metrics.observe_weights(service.model_config)
    if (tracer := service.tracer) is not None:
        timelines = service.metrics.timelines
        timelines.on_end = lambda timeline: tracer.export(spans_of(timeline))
        timelines.on_loan_end = lambda timeline: tracer.export(loan_spans_of(timeline))
    routes = [*_generation_routes(service), *_tokens_routes(service), *_state_routes(service)]
    if service.admin_port is None:
        routes += _admin_routes(service)
    return _new_app(service, checked_hosts, routes)


def build_admin_app(service: Service, *, checked_hosts: Sequence[str] | None = None) -> Starlette:
    """Return the application of the admin port."""
    return _new_app(service, checked_hosts, _admin_routes(service))


def _new_app(service: Service, checked_hosts: Sequence[str] | None, routes: list[Route]) -> Starlette:
    app = Starlette(routes=routes)
    _add_error_handlers(app)
    limits = service.limits
    app.add_middleware(
        Gate,
        api_keys=limits.api_keys,
        admin_keys=limits.admin_keys,
        files=limits.key_files,
        is_admin=_is_administrators,
        allowed_hosts=checked_hosts,
    )
    return app


def _route(method: str, path: str, handler: Handler) -> Route:
    route = Route(path, handler, methods=[method])
    route.methods = {method}  # Starlette adds HEAD to GET. These paths answer HEAD with 405.
    return route


def _is_administrators(path: str) -> bool:
    """Routers call the other paths of /baton/ with the key that they send with requests."""
    return path in ("/metrics", "/update_weights") or path.startswith("/baton/requests/")


def _add_error_handlers(app: Starlette) -> None:
    async def handle(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def handle_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(
            ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        )

    async def handle_gone(request: Request, error: Exception) -> Response:
        logger.debug("%s %s: the client has gone", request.method, request.url.path)
        return Response(status_code=CLIENT_GONE)

    for kind in (UserError, ApiError, EngineDeadError, EngineUnreadyError, UpdateFailed):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(ClientGone, handle_gone)
    app.add_exception_handler(HTTPException, handle_http)


def _generation_routes(service: Service) -> list[Route]:
    async def completions(http: Request) -> Response:
        return await _generate(service, http, CompletionRequest, "completions", admit_completion)

    async def chat_completions(http: Request) -> Response:
        return await _generate(service, http, ChatRequest, "chat", admit_chat)

    return [
        _route("POST", "/v1/completions", completions),
        _route("POST", "/v1/chat/completions", chat_completions),
    ]


async def _whole(
    service: Service, http: Request, work: CompletionWork | ChatWork
) -> Completion | ChatCompletion:
    """Compute a whole answer. If the client leaves first, what the answer lent is taken back."""

    def take_back(answer: Completion | ChatCompletion) -> None:
        if isinstance(answer.kv_transfer_params, dict):
            service.engine.take_back(answer.kv_transfer_params)

    return await until_client_leaves(http.receive, work.answer(), drop=take_back)


async def _generate(
    service: Service,
    http: Request,
    kind: type[Request_],
    endpoint: Endpoint,
    admit: Callable[[Service, Request_, str], Awaitable[CompletionWork | ChatWork]],
) -> Response:
    """Handle a generation request. Error responses carry the request id too."""
    request_id, timelines = request_id_of(http), service.metrics.timelines
    arrived_s = timelines.now_s()
    try:
        service.check_open()
        async with service.bodies.read(http.headers, http.receive) as body:
            request = parse_request(body, kind, endpoint).in_session(http.headers.get(SESSION_HEADER) or None)
        async with _admission_deadline(service):
            work = await admit(service, request, request_id)
        span = None if service.tracer is None else service.tracer.begin(http.headers, http.url.path)
        timelines.begin(
            request_id,
            [sample.request for sample in work.samples],
            arrived_s,
            span if span is not None and span.is_sampled else None,
        )
        if request.stream:
            return EventStream(work.chunks(), request_id=request_id, late_headers=work.headers)
        answer = json_response(await _whole(service, http, work), request_id=request_id)
        answer.headers.update(work.headers)
        return answer
    except ClientGone:
        logger.debug("request %s: the client has gone", request_id)
        return Response(status_code=CLIENT_GONE)
    except Exception as error:  # Reported to the client; unexpected ones are logged.
        return error_response(error, request_id)


@asynccontextmanager
async def _admission_deadline(service: Service) -> AsyncIterator[None]:
    """Limit all work on a request before the engine has it. Raises ApiError 503."""
    limit_s = service.limits.admission_s
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise ApiError(
            503,
            f"the work before the engine took more than {limit_s:g} s; send a smaller request, or try again",
            code="admission_timeout",
            retry_after_s=RETRY_AFTER_S,
        ) from error


def _tokens_routes(service: Service) -> list[Route]:
    async def tokenize(http: Request) -> Response:
        async with service.bodies.read(http.headers, http.receive) as body:
            request = parse_request(body, TokenizeRequest, "tokenize")
        service.check_model(request.model)
        request.check()
        async with _admission_deadline(service):
            if request.messages is not None:
                tokens = await service.encoder.encode_chat(
                    plain_messages(request.messages),
                    add_generation_prompt=request.add_generation_prompt,
                    variables=request.chat_template_kwargs,
                    tools=plain_tools(request.tools),
                )
            else:
                tokens = await service.encoder.encode(
                    request.prompt or "", add_special_tokens=request.add_special_tokens
                )
        answer = TokenizeResponse(
            count=len(tokens), max_model_len=service.model_config.max_model_len, tokens=tokens
        )
        return json_response(answer)

    async def detokenize(http: Request) -> Response:
        async with service.bodies.read(http.headers, http.receive) as body:
            request = parse_request(body, DetokenizeRequest, "detokenize")
        service.check_model(request.model)
        async with _admission_deadline(service):
            return json_response(DetokenizeResponse(await service.encoder.decode(request.tokens, "tokens")))

    return [_route("POST", "/tokenize", tokenize), _route("POST", "/detokenize", detokenize)]


def _state_routes(service: Service) -> list[Route]:
    async def models(_: Request) -> Response:
        card: dict[str, Any] = {
            "id": service.model_name,
            "object": "model",
            "created": service.started_at,
            "owned_by": "baton",
            "root": service.model_config.model,
            "parent": None,
            "max_model_len": service.model_config.max_model_len,
        }
        return json_response({"object": "list", "data": [card]})

    async def health(_: Request) -> Response:
        service.check_healthy()
        if service.admin_port is None:
            return Response(status_code=200)
        return json_response({"admin_port": service.admin_port})  # Routers call /baton/* there.

    async def version(_: Request) -> Response:
        return json_response({"version": baton.__version__})

    async def weight_info(_: Request) -> Response:
        return json_response(service.weight_info)

    return [
        _route("GET", "/v1/models", models),
        _route("GET", "/health", health),
        _route("GET", "/version", version),
        _route("GET", "/weight_info", weight_info),
    ]


def _admin_routes(service: Service) -> list[Route]:
    async def introduction(_: Request) -> Response:
        if service.introduction is None:
            raise ApiError(404, "this engine has no KV connector")
        # The connector's part changes when the engine's ranks are restarted.
        now = await service.engine.introduction()
        lost = service.metrics.lost_links()
        return json_response(msgspec.structs.replace(service.introduction, introduction=now, lost_links=lost))

    async def update_weights(http: Request) -> Response:
        """Answer when the engine computes with the new weights. If the client leaves, the update goes on."""
        async with service.bodies.read(http.headers, http.receive) as body:
            asked = decode_as(body, UpdateWeightsRequest)
        await service.update_weights(asked)
        return json_response(service.weight_info)

    async def take_back(http: Request) -> Response:
        """Take back the KV of an answer that no decode engine will fetch. A hint: always 202.

        The body is the `kv_transfer_params` of that answer, or of the request without an answer.
        """
        async with service.bodies.read(http.headers, http.receive) as body:
            lent = decode_as(body, Lent)
        service.engine.take_back(lent.checked)
        return Response(status_code=202)

    async def recent_request(http: Request) -> Response:
        """The timelines of the choices of a recent request. An empty list: none is remembered."""
        return json_response({"timelines": service.metrics.timelines.find(http.path_params["request_id"])})

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.exposition(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    return [
        _route("GET", "/baton/introduction", introduction),
        _route("POST", "/update_weights", update_weights),
        _route("POST", "/baton/take_back", take_back),
        _route("GET", "/baton/requests/{request_id:path}", recent_request),
        _route("GET", "/metrics", metrics),
    ]
