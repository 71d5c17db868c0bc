"""The machine of one request for /v1/messages or /v1/responses in simulated worlds (see `machine_world`)."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.router.fleet.engine import Engine
from baton.router.request.engines import Engines
from baton.router.request.events import Event, Leg, Opened, Piece, StreamEnded
from baton.router.request.lending import Lending
from baton.router.request.reply import Reply
from baton.router.values.dialects import MESSAGES, RESPONSES, Dialect, Messages, Responses
from tests.router.dialect_fakes import ASKS, EVENTS, WHOLE, named
from tests.router.machine_world import OTHERS, STREAM, TOKENS, Client, LegAnswer, World
from tests.router.machine_world import WHOLE as WHOLE_HEADERS
from tests.router.test_dialects import is_in_order

WORLDS = 300
MUTANT_WORLDS_MAX = 3000
ENDS = {"/v1/messages": "message_stop", "/v1/responses": "response.completed"}


@dataclass
class DialectClient(Client):
    """Checks that what it gets is the beginning of one right stream, and perhaps an error."""

    seen: list[bytes] = field(default_factory=list)

    def _take_event(self, data: bytes) -> None:
        event = json.loads(data)
        self.is_done = event["type"] in ("error", *ENDS.values())
        self.has_error = self.has_error or event["type"] == "error"
        if event["type"] == "error":
            assert event["error"]["message"]
            assert event.get("sequence_number", len(self.seen)) == len(self.seen)
            return
        self.seen.append(named(event))
        delta = event.get("delta", "")
        self.text += delta if isinstance(delta, str) else delta.get("text", "")

    @property
    def is_right(self) -> bool:
        if self.is_stream or self.gets_stream or self.status != 200:
            path = (
                "/v1/messages" if any(b"message_start" in event for event in self.seen) else "/v1/responses"
            )
            is_whole = self.is_done and not self.has_error and self.text in self.answers
            return is_whole and is_in_order(path, self.seen) and self.gets_stream == self.is_stream
        return any(f'"the answer is {answer}"'.encode() in self.body for answer in self.answers)


class DialectWorld(World):
    client_type = DialectClient
    kinds_drawn = ("vllm", "vllm", "other")

    def __init__(self, seed: int, dialect: Dialect, *, is_healthy: bool = False) -> None:
        self.dialect = dialect
        self.lacking: list[Engine] = []
        super().__init__(seed, is_healthy=is_healthy)

    def asked(self) -> dict[str, Any]:
        return dict(ASKS[self.dialect.path])

    def _say(self, leg: Leg, params: Mapping[str, Any]) -> Iterator[Event]:
        assert leg.engine not in self.lacking, "an engine without the path is not asked again"
        if not self.is_healthy and self.rng.random() < 0.1:
            self.faults["no such path"] += 1
            self.lacking.append(leg.engine)
            yield Opened(leg, LegAnswer(404, WHOLE_HEADERS, b'{"detail": "Not Found"}'))
            return
        path, tokens = self.dialect.path, OTHERS if self.disagree and self.rng.random() < 0.5 else TOKENS
        if self.has_versions and not self.is_lagging:
            tokens = OTHERS if self.versions[leg.engine] % 2 else TOKENS
        tokens = tokens[: self.client.num_tokens]
        ticket = self._ticket(leg) if params.get("do_remote_decode") else None
        if not leg.body.get("stream"):
            told = {**WHOLE[path], "text": f"the answer is {''.join(tokens)}"}
            answer = {**told, **({"kv_transfer_params": ticket} if ticket else {})}
            yield Opened(leg, LegAnswer(200, WHOLE_HEADERS, json.dumps(answer).encode()))
            return
        assert leg.role == "decode" or not params.get("do_remote_decode")
        events = EVENTS[path](tokens)
        fault = self.rng.choice(["cut", "ends early", "garbage", "twice", "lost"]) if self._fails() else None
        if fault is not None:
            self.faults[f"a stream: {fault}"] += 1
            number = self.rng.randrange(len(events) - 1)
            if fault == "twice":
                # Nothing tells two equal texts of a message from one that came twice.
                is_text = path == "/v1/messages" and b"_delta" in events[number]
                events.insert(number, events[0 if is_text else number])
            elif fault == "lost":
                events = events[:1] if path == "/v1/responses" else events[1:]
            else:
                events = events[: number + 1]
            if fault == "garbage":
                events.append(b"data: {garbage\n\n")
        data = b"".join(events).replace(b', "kv_transfer_params": null', b"")
        pieces = list(self._cut(data))
        yield Opened(leg, LegAnswer(200, STREAM, pieces[0], is_stream=True))
        for piece in pieces[1:]:
            yield Piece(leg, piece)
        yield self._failed(leg, "broken") if fault == "cut" else StreamEnded(leg)


@pytest.mark.parametrize("dialect", [MESSAGES, RESPONSES])
def test_every_request_ends_and_leaves_nothing(dialect: Dialect) -> None:
    faults: Counter[str] = Counter()
    num_right = 0
    for seed in range(WORLDS):
        world = DialectWorld(seed, dialect)
        world.run()
        faults += world.faults
        num_right += not world.is_ending and world.client.is_right
    assert 0.2 * WORLDS < num_right < WORLDS
    wanted = {"no such path", "hedges", "an engine drains", "an introduction is refused"}
    wanted |= {f"a stream: {fault}" for fault in ("cut", "ends early", "garbage", "twice", "lost")}
    wanted |= {f"the client leaves in {state}" for state in ("PREFILLING", "DECODING", "RELAYING")}
    assert wanted - faults.keys() == set()


@pytest.mark.parametrize("dialect", [MESSAGES, RESPONSES])
def test_in_health_every_answer_is_complete(dialect: Dialect) -> None:
    for seed in range(WORLDS):
        DialectWorld(seed, dialect, is_healthy=True).run()


# --- Mutants ------------------------------------------------------------------------------------------


def _always_in_order(self: Dialect) -> Any:
    return lambda event: f"event: {ENDS[self.path]}\n".encode() in event


def _openais_error(self: Dialect, message: str, *, status: int = 502, num_sent: int = 0) -> bytes:
    return Dialect().error_event(message, status=status)


def _count_none(self: Reply, message: str, *, status: int = 502) -> None:
    self.send(self._dialect.error_event(message, status=status), is_last=True)


@pytest.mark.parametrize(
    ("dialect", "owner", "name", "mutant"),
    [
        (MESSAGES, Messages, "reads_end", _always_in_order),
        (RESPONSES, Responses, "reads_end", _always_in_order),
        (MESSAGES, Messages, "error_event", _openais_error),
        (RESPONSES, Responses, "error_event", _openais_error),
        (RESPONSES, Reply, "_send_error", _count_none),
        (MESSAGES, Engines, "note_lacking", lambda *_: False),
        (RESPONSES, Lending, "take_back", lambda _: None),
    ],
)
def test_a_mutant_is_noticed(
    dialect: Dialect, owner: type, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    for seed in range(MUTANT_WORLDS_MAX):
        try:
            DialectWorld(seed, dialect).run()
        except Exception:
            return
    raise AssertionError("no world notices it")
