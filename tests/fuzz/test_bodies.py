"""Any JSON, bytes or headers sent to the real HTTP servers: the answer is below 500 and the server keeps
working.
"""

import os
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from baton.core.errors import UserError
from baton.core.json_text import decode_json
from baton.http.lax_values import SCALARS, as_lax
from baton.http.settings import HttpSettings
from baton.router.request.tokens import continuation as exact
from baton.router.request.tokens.continuation import kept_body
from baton.router.values import legs
from baton.router.values.dialects import COMPLETIONS, DIALECTS
from baton.server.protocol.chat import ChatRequest
from baton.server.protocol.completion import CompletionRequest
from tests.server.fakes import JSON, LiveLoop, LiveServer, ScriptedEngine, router_before, service_around

SCALE = int(os.environ.get("FUZZ_SCALE", "1"))
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
FIELDS = sorted(
    {field.name for kind in (CompletionRequest, ChatRequest) for field in msgspec.structs.fields(kind)}
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["user", "assistant", "text", "toy", "\x00", "🙂"])
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(("role", "content", "type", "text", "self")) | st.text(max_size=4), inner
        )
    ),
    max_leaves=8,
)
message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]) | scalars, "content": trees})
bodies = st.fixed_dictionaries(
    {},
    optional={
        **{name: trees for name in FIELDS},
        "prompt": st.text(max_size=9) | st.lists(st.integers(-1, 200), max_size=9) | trees,
        "messages": st.lists(message, max_size=3) | trees,
        "tokens": st.lists(st.integers(-1, 200), max_size=9) | trees,
    },
)


@pytest.fixture(scope="module")
def engine() -> Iterator[LiveServer]:
    with (
        service_around(ScriptedEngine(answer="b"), limits=HttpSettings()) as service,
        LiveServer(service) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def router(engine: LiveServer) -> Iterator[LiveLoop]:
    with router_before(engine) as router:
        yield router


@pytest.fixture(scope="module", params=["engine", "router"])
def client(request: pytest.FixtureRequest, engine: LiveServer, router: LiveLoop) -> Iterator[httpx.Client]:
    with (engine if request.param == "engine" else router).client() as client:
        yield client
        assert client.get("/health").status_code == 200


def check(answer: httpx.Response) -> None:
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"], answer.text


@settings(max_examples=60 * SCALE, suppress_health_check=SHARED, deadline=None)
@given(path=st.sampled_from(PATHS), body=bodies | trees)
@example(
    path=PATHS[1], body={"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"self": 1}}
)
@example(path=PATHS[0], body={"prompt": "a", "stream": True, "n": 2})
def test_any_json_is_answered_or_refused(client: httpx.Client, path: str, body: Any) -> None:
    check(client.post(path, content=msgspec.json.encode(body), headers=JSON))


@settings(max_examples=40 * SCALE, suppress_health_check=SHARED, deadline=None)
@given(path=st.sampled_from(PATHS), body=st.binary(max_size=40))
@example(path=PATHS[0], body=b"[" * 5000)
@example(path=PATHS[0], body=b'{"prompt": "a", "top_k": ' + b"9" * 4000 + b"}")
@example(path=PATHS[0], body=b'{"prompt": "\\ud800"}')
@example(path=PATHS[0], body=b"")
def test_any_bytes_are_answered_or_refused(client: httpx.Client, path: str, body: bytes) -> None:
    check(client.post(path, content=body, headers=JSON))


@settings(max_examples=40 * SCALE, suppress_health_check=SHARED, deadline=None)
@given(
    name=st.sampled_from(
        ["x-request-id", "authorization", "x-other", "host", "content-type", "connection", "te"]
    ),
    value=st.binary(max_size=20),
)
@example(name="x-other", value=b"\xff\xfe")
@example(name="connection", value=b"content-type, host")
def test_any_header_is_answered_or_refused(client: httpx.Client, name: str, value: bytes) -> None:
    headers = httpx.Headers(list({**{b"content-type": b"application/json"}, name.encode(): value}.items()))
    try:
        answer = client.post(PATHS[0], content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)
    except (httpx.LocalProtocolError, httpx.RemoteProtocolError):
        return  # One of the two sides does not accept it as HTTP.
    if answer.status_code != 415:
        assert answer.status_code in (200, 400), answer.text


@settings(max_examples=150 * SCALE)
@given(body=bodies | st.dictionaries(st.sampled_from(sorted(exact._HARMLESS | exact._IDLE.keys())), scalars))
@example(body={"prompt": [7] * 300})
@example(body={"prompt": list(range(10_000))})
@example(body={"prompt": "a", "stream": True, "suffix": None, "stop": [], "unknown": None})
def test_a_body_that_stays_bytes_is_routed_as_one_that_is_decoded(body: dict[str, Any]) -> None:
    """The router leaves most of a body encoded; this must not change the legs or the routing."""
    raw = msgspec.json.encode(body)
    try:
        kept = legs.parse_body(raw)
    except UserError:
        return
    decoded = {name: as_lax(value, SCALARS.get(name, object)) for name, value in decode_json(raw).items()}
    prompt = body.get("prompt")
    are_ids = isinstance(prompt, list) and all(type(part) is int for part in prompt)
    if not isinstance(prompt, list) or (are_ids and len(prompt) > 1 and "messages" not in body):
        assert legs.shape_of(kept, COMPLETIONS) == legs.shape_of(decoded, COMPLETIONS)
    for dialect in DIALECTS.values():
        assert exact.can_split(kept, dialect) == exact.can_split(decoded, dialect)
        assert dialect.limit_of(kept) == dialect.limit_of(decoded)
        for make in (legs.prefill_body, kept_body):
            assert decode_json(msgspec.json.encode(make(kept, "id", dialect))) == make(decoded, "id", dialect)
    assert legs.is_one_answer(kept) == legs.is_one_answer(decoded)
    assert legs.is_one_token(kept) == legs.is_one_token(decoded)
    assert (legs.with_seed(kept).keys() - kept.keys()) == (legs.with_seed(decoded).keys() - decoded.keys())
    leg = legs.first_token_body(kept, "id")
    assert decode_json(msgspec.json.encode(leg)) == legs.first_token_body(decoded, "id")
    assert decode_json(msgspec.json.encode(legs.decode_body(kept, None))) == legs.decode_body(decoded, None)


def test_a_leg_carries_the_clients_own_bytes() -> None:
    messages = b'[ {"role":"user",  "content":"\\u0041 \\/"} ]'
    raw = b'{"model": "m", "messages": ' + messages + b', "metadata": {"a" : 1e2}, "max_tokens": 5}'
    leg = msgspec.json.encode(legs.decode_body(legs.parse_body(raw), {"do_remote_prefill": True}))
    assert messages in leg
    assert b'{"a" : 1e2}' in leg
    assert leg.endswith(b'"kv_transfer_params":{"do_remote_prefill":true}}')
