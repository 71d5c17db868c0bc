"""`kv_transfer_params` of any shape at a real server that validates them for a real connector: a 200 or a
400.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from baton.assemble import make_door
from baton.core.config import ClusterSecret, EngineConfig, KVTransferConfig
from baton.protocol.ticket import sign_ticket
from tests.protocol.tokens import ticket
from tests.server.fakes import JSON, LiveServer, ScriptedEngine, model_config, service_around

# The server and its clients are shared by all examples, and a busy machine is no failure.
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
KEYS = (
    "do_remote_decode",
    "do_remote_prefill",
    "baton_ticket",
    "baton_introduction",
    "remote_engine_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "remote_request_id",
    "remote_num_tokens",
    "tp_size",
    "transfer_id",
)

TICKET = sign_ticket(ticket(), None)
ALLOWED = ("127.0.0.1", 14600)  # The host and port that clients may name.

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=30)
    | st.sampled_from(["p", "t", TICKET, TICKET[:-9], "\x00", "🙂\u202e", ALLOWED[0], ALLOWED[1]])
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
params = trees | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), trees, max_size=8)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with service_around(ScriptedEngine()) as service, LiveServer(service) as server:
        yield server


@pytest.fixture(scope="module", params=["kv_producer", "kv_consumer", "kv_both", "kv_both push", None])
def client(server: LiveServer, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    transfer = None
    if request.param is not None:
        role, _, does_push = request.param.partition(" ")
        peers = {"allowed_peers": ["{}:{}".format(*ALLOWED)]} if does_push else {}
        transfer = KVTransferConfig(
            kv_connector="BatonPushConnector" if does_push else "BatonPullConnector",
            kv_role=role,
            kv_load_failure_policy="fail",
            kv_connector_extra_config={"transports": ["memory"], **peers},
        )
    config = EngineConfig(
        model_config=model_config(),
        kv_transfer_config=transfer,
        cluster_secret=ClusterSecret(b"sixteen bytes or more") if transfer else None,
    )
    server.reset(ScriptedEngine())
    server.service.check_params = make_door(config)
    with server.client() as client:
        yield client
        assert client.get("/health").status_code == 200


@settings(max_examples=60, suppress_health_check=SHARED)
@given(raw=params, is_stream=st.booleans())
@example(raw={"do_remote_prefill": True, "remote_engine_id": "p", "baton_ticket": TICKET}, is_stream=False)
@example(raw={"do_remote_decode": True, "transfer_id": "🙂" * 256}, is_stream=True)
@example(raw={"do_remote_decode": True, "transfer_id": ""}, is_stream=True)
@example(
    raw={
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "remote_host": ALLOWED[0],
        "remote_port": ALLOWED[1],
    },
    is_stream=False,
)
@example(raw=[], is_stream=False)
@example(
    raw={"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [[1], 2]}, is_stream=False
)
def test_any_params_get_a_200_or_a_400_that_names_the_field(
    server: LiveServer, client: httpx.Client, raw: Any, is_stream: bool
) -> None:
    engine = server.service.engine
    assert isinstance(engine, ScriptedEngine)
    num_seen = len(engine.requests)
    body = {"prompt": "a", "max_tokens": 1, "stream": is_stream, "kv_transfer_params": raw}
    answer = client.post("/v1/completions", content=msgspec.json.encode(body), headers=JSON)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert len(engine.requests) == num_seen, "a refused request must not reach the engine"
        assert answer.json()["error"]["param"], answer.text


@settings(max_examples=40, suppress_health_check=SHARED)
@given(raw=st.binary(max_size=60))
@example(raw=b'"\\ud800"')
@example(raw=b'{"do_remote_decode": true, "transfer_id": "\\udfff"}')
@example(raw=b"[" * 2000)
@example(raw=b"1e999999")
def test_any_bytes_as_params_are_refused_or_harmless(client: httpx.Client, raw: bytes) -> None:
    body = b'{"prompt": "a", "max_tokens": 1, "kv_transfer_params": ' + raw + b"}"
    assert client.post("/v1/completions", content=body, headers=JSON).status_code in (200, 400)


@settings(max_examples=30, suppress_health_check=SHARED)
@given(given_id=st.binary(max_size=40).filter(lambda raw: b"\r" not in raw and b"\n" not in raw))
@example(given_id=b"\xff\xfe")
@example(given_id=b"x" * 300)
def test_any_request_id_in_the_header_is_taken_or_refused(client: httpx.Client, given_id: bytes) -> None:
    headers = [(b"x-request-id", given_id), (b"content-type", b"application/json")]
    try:
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
    except (httpx.LocalProtocolError, httpx.RemoteProtocolError):
        return  # One of the two sides does not accept it as HTTP.
    assert answer.status_code in (200, 400), answer.text
