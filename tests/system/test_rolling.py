"""Every engine is restarted, one after the other, under load: they leave, come back, and no request fails."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.cli.processes import Child, Fleet, free_ports
from tests.system.engines import START_S, WAIT_S, Engines, make_prompt, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("forked_programs")]

NUM_CLIENTS, PAUSE_S = 4, 0.1
KEY = "key-of-all-engines-0123456789"
ROLES = {"p0": "kv_producer", "d0": "kv_consumer", "d1": "kv_consumer"}


class Router:
    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False)
        self._client.headers["authorization"] = f"Bearer {KEY}"

    def close(self) -> None:
        self._client.close()

    def states(self) -> dict[str, str]:
        fleet = self._client.get("/fleet").raise_for_status().json()["engines"]
        return {one["url"]: one["state"] for engines in fleet.values() for one in engines}

    def wait(self, is_so: Callable[[dict[str, str]], bool], what: str) -> None:
        wait_until(lambda: is_so(self.states()), lambda: f"{what}: {self.states()}", START_S)

    def num_remote(self) -> float:
        """Prompts that a prefill engine has computed."""
        text = self._client.get("/metrics").raise_for_status().text
        lines = [line for line in text.splitlines() if line.startswith("baton:router_prefills_total")]
        return sum(float(line.rpartition(" ")[2]) for line in lines if 'where="remote"' in line)


class Clients:
    """Ask one question after another, streamed and not, until they are told to stop."""

    def __init__(self, url: str, expected: Callable[[list[int]], list[int]]) -> None:
        self._prompts = [make_prompt(seed, 60 + 7 * seed) for seed in range(12)]
        self._expected = [expected(prompt) for prompt in self._prompts]
        self._url, self._stopping = url, threading.Event()
        self.num_answered, self.wrong = 0, list[str]()
        self._threads = [threading.Thread(target=self._ask, args=(one,)) for one in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=WAIT_S, trust_env=False) as client:
            client.headers["authorization"] = f"Bearer {KEY}"
            while not self._stopping.wait(PAUSE_S):
                number += 1
                which = number % len(self._prompts)
                try:
                    found = self._answer(client, self._prompts[which], is_streamed=number % 3 > 0)
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    found = f"{type(error).__name__}: {error}"
                if found == self._expected[which]:
                    self.num_answered += 1
                else:
                    self.wrong.append(f"prompt {which}: {found}")

    def _answer(self, client: httpx.Client, prompt: list[int], *, is_streamed: bool) -> Any:
        body = {
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "max_tokens": 12,
            "stream": is_streamed,
        }
        answer = client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return f"{answer.status_code}: {answer.text[:300]}"
        if not is_streamed:
            return answer.json()["choices"][0]["token_ids"]
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        return [token for event in events for token in json.loads(event)["choices"][0]["token_ids"]]


@contextmanager
def recorded(url: str, folder: Path) -> Iterator[None]:
    """Film the fleet's page, if `scripts/screenshots` asks for it."""
    path = os.environ.get("RECORD_PAGE")
    if path is None:
        yield
        return
    from tests.page.browser import Recording, chromium

    with chromium(folder / "profile") as browser:
        recording = Recording(browser, url, KEY)
        yield
        recording.save(Path(path))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path / "logs") as fleet:
        yield fleet


@pytest.mark.timeout(600)  # Six starts of an engine, on a busy machine.
def test_a_rolling_restart_of_engines_that_register_fails_no_request(
    model: Path, expected: Callable[[list[int]], list[int]], fleet: Fleet, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(KEY)
    keys = ["--api-key-file", str(tmp_path / "key")]
    (port,) = free_ports(1)
    command = [
        sys.executable,
        "-m",
        "baton.cli",
        "route",
        "--port",
        str(port),
        "--members",
        "register",
        *keys,
    ]
    router_child: Child = fleet.start("router", command)
    options = ["--register", f"http://127.0.0.1:{port}", "--drain-timeout-s", "30", *keys]
    with closing(Engines(fleet)) as engines, closing(Router(f"http://127.0.0.1:{port}")) as router:
        started = engines.start(
            *((name, model, {"kv_role": role}) for name, role in ROLES.items()),
            options=dict.fromkeys(ROLES, options),
        )
        router.wait(lambda states: list(states.values()) == ["up"] * len(ROLES), "not all have registered")
        clients = Clients(router.url, expected)
        began_s = time.monotonic()
        with recorded(router.url, tmp_path):
            try:
                for engine in started:
                    num_before = clients.num_answered
                    engine.child.send_signal(signal.SIGTERM)
                    router.wait(lambda states, url=engine.url: states.get(url) != "up", "it has not left")  # type: ignore[misc]
                    wait_until(engine.child.has_ended, engine.child.log_tail)
                    assert engine.child.exit_status() == 0, engine.child.log_tail()
                    fleet.forget(ended := engine.child)
                    engine.child = fleet.start_again(ended)
                    router.wait(lambda states, url=engine.url: states.get(url) == "up", "it is not back")  # type: ignore[misc]
                    assert clients.num_answered > num_before
            finally:
                clients.stop()
                took_s = time.monotonic() - began_s
        assert clients.wrong == []
        assert router.num_remote() > 0
        assert list(router.states().values()) == ["up"] * len(ROLES)
        assert not router_child.has_ended()
        num_remote = router.num_remote()
        figures = f"{clients.num_answered} requests in {took_s:.0f} s, 0 failed, {num_remote:.0f} handed over"
        print(figures)  # Shown with -s.
