"""The HTTP face of one engine: which path does what.

POST /v1/completions, /v1/chat/completions      OpenAI's, with vLLM's extensions and `kv_transfer_params`
GET  /v1/models, POST /tokenize, /detokenize
GET  /health (503 once the engine or its KV connector is dead, or the server drains), /version, /metrics
GET  /baton/introduction                        for routers that start both legs of a request at once
POST /baton/take_back                           ... and for those whose client has gone before the second leg
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import prometheus_client
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

import baton
from baton.core.errors import UserError
from baton.engine.client import EngineDeadError
from baton.server.chat import ChatWork, admit_chat
from baton.server.completions import CompletionWork, admit_completion
from baton.server.errors import ApiError
from baton.server.http import (
    CLIENT_GONE,
    ClientGone,
    EventStream,
    error_response,
    json_response,
    read_body,
    request_id_of,
    until_client_leaves,
)
from baton.server.protocol.chat import ChatCompletion, ChatRequest, plain_messages, plain_tools
from baton.server.protocol.completion import Completion, CompletionRequest
from baton.server.protocol.lent import Lent
from baton.server.protocol.parse import parse_body, parse_request
from baton.server.protocol.sampling import check_token_ids
from baton.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from baton.server.service import Service

logger = logging.getLogger(__name__)


def build_app(service: Service) -> FastAPI:
    """The service outlives the app; whoever made it closes it."""
    app = FastAPI(title="Baton", version=baton.__version__, openapi_url=None)
    service.engine.on_stats = service.metrics.observe_stats
    _add_error_handlers(app)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    return app


def _add_error_handlers(app: FastAPI) -> None:
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

    app.add_exception_handler(ClientGone, handle_gone)
    for kind in (UserError, ApiError, EngineDeadError):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(HTTPException, handle_http)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        async def answer(body: bytes, request_id: str) -> Response:
            request = parse_request(body, CompletionRequest, "completions")
            work = await admit_completion(service, request, request_id)
            if request.stream:
                return EventStream(work.chunks(), request_id=request_id)
            return json_response(await _whole(service, http, work), request_id=request_id)

        return await _answer(service, http, answer)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        async def answer(body: bytes, request_id: str) -> Response:
            request = parse_request(body, ChatRequest, "chat")
            work = await admit_chat(service, request, request_id)
            if request.stream:
                return EventStream(work.chunks(), request_id=request_id)
            return json_response(await _whole(service, http, work), request_id=request_id)

        return await _answer(service, http, answer)


async def _whole(
    service: Service, http: Request, work: CompletionWork | ChatWork
) -> Completion | ChatCompletion:
    """An answer that no client is left to read takes back what it lent."""

    def take_back(answer: Completion | ChatCompletion) -> None:
        if isinstance(answer.kv_transfer_params, dict):
            service.engine.take_back(answer.kv_transfer_params)

    return await until_client_leaves(http.receive, work.answer(), drop=take_back)


async def _answer(
    service: Service, http: Request, answer: Callable[[bytes, str], Awaitable[Response]]
) -> Response:
    """Errors carry the request's id as well."""
    request_id = request_id_of(http)
    try:
        service.check_open()
        return await answer(await read_body(http), request_id)
    except ClientGone:
        logger.debug("request %s: the client has gone", request_id)
        return Response(status_code=CLIENT_GONE)
    except Exception as error:  # Told to the client; unexpected ones are logged.
        return error_response(error, request_id)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        request = parse_request(await read_body(http), TokenizeRequest, "tokenize")
        service.check_model(request.model)
        request.check()
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

    @app.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        request = parse_request(await read_body(http), DetokenizeRequest, "detokenize")
        service.check_model(request.model)
        check_token_ids(request.tokens, service.model_config.vocab_size, "tokens")
        return json_response(
            DetokenizeResponse(service.tokenizer.decode(request.tokens, skip_special_tokens=False))
        )


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
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

    @app.get("/health")
    async def health() -> Response:
        service.check_healthy()
        return Response(status_code=200)

    @app.get("/baton/introduction")
    async def introduction() -> Response:
        if service.introduction is None:
            raise ApiError(404, "this engine has no KV connector")
        # The connector's part changes with its engine's ranks, if those are started anew.
        now = await service.engine.introduction()
        return json_response(msgspec.structs.replace(service.introduction, introduction=now))

    @app.post("/baton/take_back")
    async def take_back(http: Request) -> Response:
        """The body is the `kv_transfer_params` of an answer that nobody will carry on. A hint: always 202."""
        lent = parse_body(await read_body(http), Lent)
        service.engine.take_back({"baton_ticket": lent.checked_ticket})
        return Response(status_code=202)

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": baton.__version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type=prometheus_client.CONTENT_TYPE_LATEST)
