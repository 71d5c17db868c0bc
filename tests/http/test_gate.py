"""Checks of request headers: API keys, Host, content type, ASCII."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from baton.http.gate import Gate, hosts_to_check

KEYS = ("first-key", "second-key")


def ask(method: str = "GET", path: str = "/x", *, headers: Any = (), **gate: Any) -> httpx.Response:
    async def ok(request: Any) -> PlainTextResponse:
        return PlainTextResponse("ok")

    async def main() -> httpx.Response:
        routes = [Route(p, ok, methods=["GET", "POST"]) for p in ("/x", "/health")]
        transport = httpx.ASGITransport(Gate(Starlette(routes=routes), **gate))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(main())


@pytest.mark.parametrize("key", KEYS)
def test_every_configured_key_opens(key: str) -> None:
    assert ask(headers={"Authorization": f"Bearer {key}"}, api_keys=KEYS).status_code == 200


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic first-key", "Bearer first-key2"])
def test_anything_else_is_401_in_openais_form(header: str) -> None:
    answer = ask(headers={"Authorization": header}, api_keys=KEYS)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_health_needs_no_key() -> None:
    assert ask(path="/health", api_keys=KEYS).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "mine.example"])
def test_names_of_this_machine_are_served(host: str) -> None:
    assert ask(headers={"Host": host}, allowed_hosts=["mine.example"]).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.1", "[::", ""])
def test_a_page_that_rebinds_its_name_to_loopback_is_refused(host: str) -> None:
    answer = ask(headers={"Host": host}, allowed_hosts=hosts_to_check("127.0.0.1", []))
    assert answer.status_code == 403
    assert answer.json()["error"]["param"] == "Host"


def test_a_server_beyond_loopback_has_any_name() -> None:
    assert hosts_to_check("0.0.0.0", []) is None
    assert ask(headers={"Host": "any.example"}, allowed_hosts=None).status_code == 200
    assert ask(headers={"Host": "any.example"}, allowed_hosts=["*"]).status_code == 200


@pytest.mark.parametrize(
    "given", [{}, {"Content-Type": "text/plain"}, {"Content-Type": "multipart/form-data"}]
)
def test_a_post_that_is_not_json_is_415(given: dict[str, str]) -> None:
    answer = ask("POST", headers=given)
    assert answer.status_code == 415
    assert answer.json()["error"]["param"] == "Content-Type"


@pytest.mark.parametrize("given", ["application/json", "application/JSON; charset=utf-8"])
def test_a_post_of_json_is_served(given: str) -> None:
    assert ask("POST", headers={"Content-Type": given}).status_code == 200


def test_a_header_that_is_not_ascii_is_400_and_names_it() -> None:
    answer = ask(headers=[(b"X-Name", "é".encode())])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-name"


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        ("http://localhost/x", "/x", "localhost"),
        ("HTTPS://127.0.0.1:8000/a%20b", "/a b", "127.0.0.1:8000"),
        ("http://localhost", "/", "localhost"),
        ("http:///x", "http:///x", "mine.example"),
    ],
)
def test_a_target_may_have_scheme_and_authority_which_replaces_the_host(
    target: str, path: str, host: str
) -> None:
    """uvicorn passes on the whole target as the path (RFC 9112, 3.2.2)."""
    scopes: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)

    gate = Gate(app, allowed_hosts=["mine.example"])
    scope = {
        "type": "http",
        "method": "GET",
        "path": target,
        "raw_path": target.encode(),
        "query_string": b"q",
    }
    asyncio.run(gate({**scope, "headers": [(b"host", b"mine.example")]}, Any, Any))
    assert [(scope["path"], dict(scope["headers"])[b"host"].decode()) for scope in scopes] == [(path, host)]


def test_a_host_in_the_target_is_checked() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "", "raw_path": b"http://evil.example/x"}
    headers = [(b"host", b"localhost")]
    asyncio.run(Gate(Starlette(), allowed_hosts=[])({**scope, "headers": headers}, Any, send))
    assert sent[0]["status"] == 403
