"""A handoff between real processes whose HTTP connections all have TLS and a client certificate."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from baton.cli.processes import Fleet, free_ports
from tests.certificates import Authority, context_of
from tests.system.engines import POLL_S, SECRET, START_S, WAIT_S, make_prompt, tokens_of

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("forked_programs")]

KEY, ADMIN_KEY = "key-of-all-clients-0123456789", "key-of-the-administrator-0123456789"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    env = {**os.environ, "BATON_SECRET": SECRET, "BATON_API_KEY": KEY, "BATON_ADMIN_API_KEY": ADMIN_KEY}
    with Fleet(tmp_path / "logs", env=env) as fleet:
        yield fleet


@pytest.mark.timeout(400)
def test_engines_register_and_hand_over_through_a_router_with_tls_everywhere(
    model: Path, expected: Callable[[list[int]], list[int]], fleet: Fleet, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "ours")
    router_port, *engine_ports = free_ports(3)
    router = f"https://127.0.0.1:{router_port}"

    def options(name: str) -> list[str]:
        files = authority.issue("127.0.0.1", file=name)
        return ["--tls-cert", files.cert, "--tls-key", files.key, "--tls-client-ca", authority.ca]

    baton = [sys.executable, "-m", "baton.cli"]
    command = [*baton, "route", "--members", "register", "--port", str(router_port), "--workers", "1"]
    children = [fleet.start("router", [*command, *options("router"), "--engine-ca", authority.ca])]
    for role, port in zip(("kv_producer", "kv_consumer"), engine_ports, strict=True):
        config = {"kv_connector": "BatonPullConnector", "engine_id": role, "kv_role": role}
        command = [*baton, "serve", str(model), "--port", str(port), "--max-model-len", "2048"]
        command += ["--block-size", "16", "--num-blocks", "256", "--kv-transfer-config", json.dumps(config)]
        command += ["--register", router, "--register-ca", authority.ca]
        children.append(fleet.start(role, [*command, *options(role)]))

    context = context_of(authority.ca, authority.issue("client", file="client"))
    with httpx.Client(verify=context, timeout=WAIT_S, trust_env=False) as client:

        def get(url: str) -> httpx.Response:
            return client.get(url, headers={"authorization": f"Bearer {ADMIN_KEY}"}).raise_for_status()

        deadline_s = time.monotonic() + START_S
        while True:
            assert not any(child.has_ended() for child in children)
            assert time.monotonic() < deadline_s, [child.log_tail() for child in children]
            try:
                engines = get(f"{router}/fleet").json()["engines"]
            except httpx.ConnectError:
                engines = {}  # The router is still starting.
            if (
                sum(one["state"] == "up" for one in (*engines.get("prefill", ()), *engines.get("decode", ())))
                == 2
            ):
                break
            time.sleep(POLL_S)

        prompt = make_prompt(1)
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        key = {"authorization": f"Bearer {KEY}"}
        answer = client.post(f"{router}/v1/completions", json={**body, "max_tokens": 12}, headers=key)
        assert tokens_of(answer) == expected(prompt)
        producer, consumer = (f"https://127.0.0.1:{port}" for port in engine_ports)
        received = get(f"{consumer}/metrics").text
        [line] = [one for one in received.splitlines() if one.startswith("baton:kv_transfer_bytes_total")]
        assert float(line.rpartition(" ")[2]) > 0
        assert client.get(f"{producer}/metrics", headers=key).status_code == 401
    for url in (router, producer, consumer):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", verify=context_of(authority.ca), trust_env=False)
