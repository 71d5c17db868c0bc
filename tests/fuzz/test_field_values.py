"""Any JSON value in any field of any endpoint of the engine's server and of the router: the answer is below
500 and names the field, nothing is logged as a failure, and the connection goes on.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from http.client import HTTPConnection
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from baton.core.transfer_params import FIELD as TRANSFER_FIELD
from baton.http.settings import HttpSettings
from baton.router.operator.admin import METHODS
from baton.router.request.pass_through import PATHS as PASSED
from baton.server.protocol.fields import FIELDS, PATHS
from tests.server.fakes import (
    JSON,
    WAIT_S,
    LiveLoop,
    LiveServer,
    ScriptedEngine,
    router_before,
    service_around,
)

SCALE = int(os.environ.get("FUZZ_SCALE", "1"))
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
DEAD = "http://127.0.0.1:9"  # No server listens at the port "discard".
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
ORDER = {"instance": DEAD, "type": "prefill"}
ENDPOINTS: dict[str, dict[str, dict[str, Any]]] = {
    "engine": {
        **GOOD,
        "/baton/take_back": {"baton_ticket": "a"},
        "/update_weights": {"folder": "a", "version": "b", "mode": "wait", "timeout_s": 1.0},
    },
    "router": {
        **{path: {"model": "toy"} for path, passed in PASSED.items() if passed.method == "POST"},
        **GOOD,
        "/explain": GOOD["/v1/completions"],
        **{path: ORDER for path, method in METHODS.items() if path.startswith("/instances/")},
    },
}
NAMES = {path: [field.name for field in FIELDS if name in field.endpoints] for name, path in PATHS.items()}
ORDER_NAMES = ["instance", "type", "timeout_s", "model", "weight", "ttl_s"]


def names_of(path: str, body: dict[str, Any]) -> list[str]:
    more = ORDER_NAMES if body is ORDER else ["model", "stream", TRANSFER_FIELD, "vllm_xargs", "session_id"]
    return sorted({*NAMES.get(path, ()), *body, *more, "unknown"})


CASES = [
    (server, path, name)
    for server, endpoints in ENDPOINTS.items()
    for path, body in endpoints.items()
    for name in names_of(path, body)
]
TOO_LARGE = [b"1e400", b"-1e999", b"9" * 400, b"-" + b"9" * 5000, b"1e99999999999999999999"]
NESTED = [b'{"a": [1e400]}']
HALVES = [rb'"\ud800"', rb'"\udc00a"', rb'{"\ud800": 1}', rb'["\\\ud83d"]']  # Halves of surrogate pairs.


def as_object(fields: Iterable[tuple[str, bytes]]) -> bytes:
    return b"{" + b",".join(b'"%s": %s' % (name.encode(), value) for name, value in fields) + b"}"


# Numbers, texts, arrays and objects that a decoder reads otherwise than expected, or not at all.
leaves = st.sampled_from(
    [
        *TOO_LARGE,
        *NESTED,
        *HALVES,
        *(b"null", b"true", b"false", b"0", b"-1", b"1.0", b"-0.0", b"1E-400", b"1e308", b"0.1"),
        *(b"2147483648", b"-9223372036854775808", b"9223372036854775807", b"18446744073709551616"),
        *(b'""', b'"a"', rb'"\u0000"', rb'"\ud83d\ude42"', b'"1"', b'"NaN"', b'"' + b"a" * 2000 + b'"'),
        *(b"[]", b"{}", b"[" * 99 + b"]" * 99, b"[" * 3000 + b"]" * 3000, b'{"a":' * 60 + b"1" + b"}" * 60),
        *(b'{"a": 1, "a": 2}', b'{"": null}', b'{"type": "text"}', b'{"baton_retention": {"a": 1e400}}'),
        *(b"{'a': 1}", b"NaN", b"Infinity", b"01", b"[1,]"),  # No JSON.
    ]
)
keys = st.sampled_from(
    [
        *("a", "type", "text", "role", "content", "name", "97", "tool_calls", "function", "arguments"),
        *("include_usage", "do_remote_decode", "do_remote_prefill", "transfer_id", "baton_ticket"),
        *("baton_retention", "priority", "ttl_s", "baton_tenant", "baton_prefetch", "baton_offload"),
        *("baton_first_token", "baton_output_token_ids", "baton_token_ids", "remote_block_ids"),
    ]
)
values = st.recursive(
    leaves | st.integers().map(lambda number: b"%d" % number) | st.text(max_size=9).map(msgspec.json.encode),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: b"[" + b",".join(parts) + b"]")
        | st.lists(st.tuples(keys, inner), max_size=3).map(as_object)
    ),
    max_leaves=5,
)
ARGUMENTS = [r'{"a": "\ud800"}', '{"a": 1e400}', '{"a": NaN}', "[" * 5000, '{"a":' * 900 + "1" + "}" * 900]


def called_with(arguments: str) -> bytes:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return msgspec.json.encode([{"role": "assistant", "content": "a", "tool_calls": [call]}])


class Engine(ScriptedEngine):
    async def update_weights(
        self, folder: str, version: str | None = None, *, mode: str = "wait", timeout_s: float = 1.0
    ) -> None:
        pass


class Connection:
    """One connection to a server, which the server must not close."""

    def __init__(self, server: LiveLoop) -> None:
        self._http = HTTPConnection(server.url.removeprefix("http://"), timeout=WAIT_S)
        self._http.connect()
        self._http.auto_open = 0

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        self._http.request(method, path, body, JSON)
        answer = self._http.getresponse()
        return answer.status, answer.read()

    def close(self) -> None:
        self._http.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LiveLoop]]:
    with (
        service_around(
            Engine(answer="b"), limits=HttpSettings(), weights_root=tmp_path_factory.mktemp("weights")
        ) as service,
        LiveServer(service) as server,
        router_before(server, checked_hosts=(), policy="cost") as router,
    ):
        yield {"engine": server, "router": router}


@pytest.fixture(scope="module")
def connections(servers: dict[str, LiveLoop]) -> Iterator[dict[str, Connection]]:
    found = {name: Connection(server) for name, server in servers.items()}
    yield found
    for one in found.values():
        one.close()


def check(
    connections: dict[str, Connection],
    case: tuple[str, str, str],
    value: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, path, name = case
    fields = {key: msgspec.json.encode(one) for key, one in ENDPOINTS[server][path].items() if key != name}
    items = [*fields.items(), (name, value)]
    body = as_object(items)
    caplog.clear()
    status, text = connections[server].ask("POST", path, body)
    failures = [one.getMessage() for one in caplog.records if one.exc_info or one.levelno >= logging.ERROR]
    assert not failures, body
    assert status == 200 or status == 202 or 400 <= status < 500, (body, text)
    if status >= 400:
        error = msgspec.json.decode(text)["error"]
        if server == "router" and path.startswith("/v1/messages") and len(error) == 2:  # Anthropic's form.
            assert error.keys() == {"message", "type"}
            return
        assert error.keys() == {"message", "type", "param", "code"}
        if status == 400:
            assert error["param"], (body, error)
        if status == 400 and value in (*TOO_LARGE, *NESTED, *HALVES):
            assert error["param"] != "body", (body, error)
    assert connections[server].ask("GET", "/health")[0] == 200


@pytest.mark.parametrize("path", sorted({path for paths in ENDPOINTS.values() for path in paths}))
def test_a_number_that_no_double_holds(
    connections: dict[str, Connection], path: str, caplog: pytest.LogCaptureFixture
) -> None:
    for case in CASES:
        if case[1] == path:
            for value in (TOO_LARGE[0], *NESTED, HALVES[0]):
                check(connections, case, value, caplog)


@settings(max_examples=300 * SCALE, suppress_health_check=SHARED, deadline=None)
@given(case=st.sampled_from(CASES), value=values)
@example(case=("router", "/instances/add", "instance"), value=b'"\xc2\x9f"')  # No host name.
@example(case=("router", "/instances/add", "instance"), value=b'"a..b"')
@example(case=("router", "/instances/register", "instance"), value='"a/é"'.encode())
def test_any_value_is_answered_or_refused(
    connections: dict[str, Connection],
    case: tuple[str, str, str],
    value: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    check(connections, case, value, caplog)


@pytest.mark.parametrize("server", ENDPOINTS)
@pytest.mark.parametrize("number", range(len(ARGUMENTS)))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_arguments_of_a_call_are_any_text(
    connections: dict[str, Connection],
    server: str,
    path: str,
    number: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    check(connections, (server, path, "messages"), called_with(ARGUMENTS[number]), caplog)
