"""The HTTP door of an engine, as a leg of the router sees it: a body in, the pieces of an answer out."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from baton.engine.api import EngineOutput
from baton.router.request.answers import GIVEN_HEADER, PROMPT_HEADER, WEIGHTS_HEADER, LegAnswer
from baton.router.request.events import Draining, Event, Failed, Leg, Opened, Piece, StreamEnded
from baton.router.values.dialects import MESSAGES
from baton.router.values.errors import FailureKind, LegFailure
from baton.router.values.legs import FIRST_TOKEN, OUTPUT_TOKEN_IDS, PARAMS, TOKEN_IDS
from baton.router.values.sse import sse_event
from lab.sim.host.legs import Leg as EngineLeg
from lab.sim.kernel.process import SOON_S

if TYPE_CHECKING:
    from lab.sim.host.router import _Answer

OF_THE_SERVER = (FIRST_TOKEN, TOKEN_IDS, OUTPUT_TOKEN_IDS)
DONE = b"data: [DONE]\n\n"
STREAM, WHOLE = {"content-type": "text/event-stream"}, {"content-type": "application/json"}


class Door:
    def __init__(self, answer: _Answer, leg: Leg) -> None:
        self._answer, self._leg, self._world = answer, leg, answer.router.world
        self._is_closed = self._has_begun = False
        self._waiting: deque[Event] = deque()  # Events after the second part of a piece.
        self._engine_leg: EngineLeg | None = None  # None: the server has refused.
        self._token_ids: list[int] = []  # Tokens of an answer that is not streamed.
        self._weights_id = ""
        leg.engine.waits[self] = None
        body = leg.body
        params: dict[str, Any] | None = body.get(PARAMS)
        flags = params or {}
        self._dialect, self._num_events = answer.machine.dialect, 0
        self._is_stream = bool(body.get("stream"))
        self._is_prefill = bool(flags.get("do_remote_decode"))
        self._is_first_token = bool(flags.get(FIRST_TOKEN))
        self._ends_early = self._is_first_token and self._is_prefill and body["max_tokens"] > 1
        if self._world.chance(self._world.faults.door_refuses):
            self._world.after(self._world.spread(self._world.faults.leg_delay_s), self._refuse_for_engine)
            return
        if params is not None:
            params = {name: value for name, value in params.items() if name not in OF_THE_SERVER}
            answer.router.on_params(leg.role, params, answer.ask)
            self._world.count("turns resumed", self._is_prefill and "baton_ticket" in params)
        self._engine_leg = answer.router.leg(
            leg.engine.url.removeprefix("http://"),
            answer.ask,
            params or None,
            leg.wait_s,
            self._hear,
            self._failed,
            prompt=body["prompt"],
            max_tokens=1 if self._ends_early else body["max_tokens"],
            output=flags.get(OUTPUT_TOKEN_IDS, []),
        )

    @property
    def has_begun(self) -> bool:
        return self._has_begun

    def give_up(self) -> None:
        self._failed("ejected", was_sent=True, is_noted=True)

    def hand_over(self) -> None:
        self._put(Draining(self._leg))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._leg.engine.waits.pop(self, None)
            if self._engine_leg is not None:
                self._engine_leg.close()
            self._world.after(SOON_S, lambda: self._answer.closed(self._leg))

    def _refuse_for_engine(self) -> None:
        if not self._is_closed:
            self._world.count("leg: refused by the server")
            self._answer.ask.causes.add(f"{self._leg.engine.url}: 503")
            self._opened(LegAnswer(503, WHOLE, b'{"error": {"message": "no room"}}'))
            self.close()

    def _failed(self, kind: FailureKind, was_sent: bool, is_noted: bool = False) -> None:
        if self._is_closed:
            return
        self._world.count(f"leg: {kind}")
        self._answer.ask.causes.add(f"{self._leg.engine.url}: {kind}")
        failure = LegFailure(kind, self._leg.engine.url, kind, was_sent=was_sent)
        failure.is_noted = is_noted
        self.close()  # First: the failure may eject the engine, which gives up the legs that are open.
        self._answer.on(Failed(self._leg, failure))

    def _hear(self, output: EngineOutput) -> None:
        self._leg.engine.num_heard += 1
        self._weights_id = self._weights_id or output.weights_id
        if self._is_closed:
            return
        if output.finish_reason == "abort":
            self._failed("broken", was_sent=True)
        elif output.error is not None:
            self._refuse(output)
        elif self._is_stream:
            self._stream(output)
        else:
            self._whole(output)

    def _refuse(self, output: EngineOutput) -> None:
        error = output.error
        assert error is not None
        spec = self._answer.router.cluster.specs[self._leg.engine.url.removeprefix("http://")]
        if spec.policy == "fail" and error.load_failure is not None:
            self._answer.ask.causes.add(f"{spec.name}: load failed")
        described = {"error": {"message": error.message, "param": error.field}}
        if self._has_begun:
            is_named = not self._dialect.has_token_ids
            told = self._named({"type": "error", **described}) if is_named else sse_event(described) + DONE
            self._put(Piece(self._leg, told))
            self._put(StreamEnded(self._leg))
            return
        status = 400 if error.is_users else 500
        self._opened(LegAnswer(status, WHOLE, json.dumps(described).encode()))
        self.close()

    def _whole(self, output: EngineOutput) -> None:
        self._token_ids += output.new_token_ids
        self._note(output)
        if output.finish_reason is None:
            return
        choice = self._choice(self._token_ids, output)
        body: dict[str, Any] = {"choices": [choice]}
        if output.kv_transfer_params is not None:
            body[PARAMS] = output.kv_transfer_params
        self._opened(LegAnswer(200, {**WHOLE, **self._counts(output)}, json.dumps(body).encode()))
        self.close()

    def _stream(self, output: EngineOutput) -> None:
        self._note(output)
        if not output.new_token_ids and output.finish_reason is None:
            return
        data, token_ids = b"", output.new_token_ids
        if self._is_first_token and not self._has_begun and len(token_ids) > 1:
            data, token_ids = self._event(token_ids[:1]), token_ids[1:]
        data += self._event(token_ids, output)
        later = b""
        if self._world.chance(self._world.faults.door_cuts):
            self._world.count("pieces cut")
            cut = self._world.rng.randint(1, len(data))
            data, later = data[:cut], data[cut:]
        if self._has_begun:
            self._put(Piece(self._leg, data))
        else:
            self._opened(LegAnswer(200, {**STREAM, **self._counts(output)}, data, is_stream=True))
        if later:
            self._put(Piece(self._leg, later), is_late=True)
        if output.finish_reason is not None:
            self._put(StreamEnded(self._leg))

    def _event(self, token_ids: list[int], last: EngineOutput | None = None) -> bytes:
        """`last`: an output whose other fields the event has too."""
        if not self._dialect.has_token_ids:
            return self._named_events(token_ids, last)
        chunk: dict[str, Any] = {"choices": [self._choice(token_ids, last)]}
        if last is not None and last.kv_transfer_params is not None:
            chunk[PARAMS] = last.kv_transfer_params
        return sse_event(chunk) + (DONE if last is not None and last.finish_reason is not None else b"")

    def _named_events(self, token_ids: list[int], last: EngineOutput | None) -> bytes:
        """Events of a message, or of a response."""
        is_message, data = self._dialect is MESSAGES, b""
        if not self._num_events:
            data = self._named({"type": "message_start" if is_message else "response.created"})
            data += self._named({"type": "content_block_start", "index": 0}) if is_message else b""
        kind = "content_block_delta" if is_message else "response.output_text.delta"
        data += self._named({"type": kind, "index": 0, "token_ids": token_ids})
        if last is None or last.finish_reason is None:
            return data
        if is_message:
            return data + self._named({"type": "content_block_stop", "index": 0}, {"type": "message_stop"})
        return data + self._named(
            {"type": "response.completed", "response": {PARAMS: last.kv_transfer_params}}
        )

    def _named(self, *events: dict[str, Any]) -> bytes:
        data = b""
        for event in events:
            data += sse_event({**event, "sequence_number": self._num_events}, event["type"])
            self._num_events += 1
        return data

    def _put(self, event: Event, *, is_late: bool = False) -> None:
        """Deliver events in order: those that follow a late event wait for it."""
        if is_late and not self._waiting:
            self._world.after(self._world.spread(self._world.faults.leg_delay_s), self._put_waiting)
        if is_late or self._waiting:
            self._waiting.append(event)
        elif not self._is_closed:
            self._answer.on(event)
            if isinstance(event, StreamEnded):
                self.close()

    def _put_waiting(self) -> None:
        events, self._waiting = self._waiting, deque()
        for event in events:
            self._put(event)

    def _opened(self, answer: LegAnswer) -> None:
        self._has_begun = True
        self._count_refused(answer)
        self._answer.on(Opened(self._leg, answer))

    def _count_refused(self, answer: LegAnswer) -> None:
        giver, weights_id = self._answer.machine._engines.giver, answer.headers.get(WEIGHTS_HEADER, "")
        is_other = giver is not None and bool(weights_id) and weights_id != giver.weights_id
        self._world.count("a continued stream of other weights", is_other and GIVEN_HEADER in answer.headers)

    def _choice(self, token_ids: list[int], output: EngineOutput | None) -> dict[str, Any]:
        finish = output.finish_reason if output is not None else None
        if self._ends_early and finish == "length":
            finish = None
        text = "".join(f"<{token_id}>" for token_id in token_ids)
        return {"index": 0, "text": text, "token_ids": token_ids, "finish_reason": finish}

    def _counts(self, output: EngineOutput) -> Mapping[str, str]:
        total, transferred = len(self._leg.body["prompt"]), output.num_transferred_tokens
        local = max(0, output.num_cached_tokens - transferred)
        given = (self._leg.body.get(PARAMS) or {}).get(OUTPUT_TOKEN_IDS)
        return {
            **({GIVEN_HEADER: str(len(given))} if given else {}),
            **({WEIGHTS_HEADER: self._weights_id} if self._weights_id else {}),
            PROMPT_HEADER: f"total={total}; local={local}; transferred={transferred}",
        }

    def _note(self, output: EngineOutput) -> None:
        ask = self._answer.ask
        if self._leg.role == "decode":
            ask.num_transferred = max(ask.num_transferred, output.num_transferred_tokens)
