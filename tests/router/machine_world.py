"""A world of one request: the router's machine, engines' HTTP doors with faults, and a client that checks.

Everything is drawn from one seed. An engine that answers well says TOKENS; one that disagrees says OTHERS.
"""

import json
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec
from msgspec.structs import replace

from baton.core.engine_card import EngineCard
from baton.core.identity import KVIdentity
from baton.router.fleet.admission import Objective, Ticket
from baton.router.fleet.block_index import Match
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.notes import EngineLoad
from baton.router.fleet.pairs import Pairs
from baton.router.fleet.turns import Turn, TurnTable
from baton.router.fleet.view import FleetView
from baton.router.request.answers import LegAnswer
from baton.router.request.events import (
    ClientGone,
    Close,
    Closed,
    Count,
    Doubt,
    Draining,
    Effect,
    Event,
    Failed,
    Found,
    Head,
    Hold,
    HoldOver,
    Leg,
    Look,
    Meet,
    Met,
    Opened,
    Over,
    Piece,
    Queue,
    Rejected,
    Send,
    Stopped,
    StreamEnded,
    TakeBack,
    tell_ended,
)
from baton.router.request.learning import settle
from baton.router.request.machine import LEG_EVENTS, TABLE, Machine, Request
from baton.router.request.step import State
from baton.router.values.dialects import COMPLETIONS, Dialect
from baton.router.values.errors import FailureKind, LegFailure
from baton.router.values.identity import Introduced, is_compatible
from baton.router.values.settings import AdmissionSettings, RouterSettings
from baton.router.values.sse import EventSplitter, data_of

PROMPT = [1, 2, 3]
KV = KVIdentity("architecture", "weights", "float32", 2, 2, 8, "0")
TOKENS, OTHERS = ("H", "i", "!"), ("X", "y", "z")
STREAM = {"content-type": "text/event-stream"}
WHOLE = {"content-type": "application/json"}
EVENTS_MAX = 400
DRAINS = 0.1
LATE_PREFILLS = 0.5
INTRODUCTIONS_MAX = 2  # Refused introductions after which a decode leg leaves without one.
PREFILL_S = 5.0  # Duration of earlier prefills; it decides how long a decode leg is held back.
LEGS_MAX = 14  # Two attempts at each engine, two introductions, and one for each kind of refusal.
RESUMED_LEGS_MAX = 4  # Two attempts at each role, for the rest of a stream.


@dataclass
class Client:
    """Checks that it gets one answer, whose text is what engines say."""

    is_stream: bool
    num_tokens: int  # Length of the whole answer.
    status: int | None = None
    gets_stream: bool = False  # An engine may answer otherwise.
    has_ended: bool = False
    has_error: bool = False
    is_done: bool = False
    text: str = ""
    body: bytes = b""
    events: EventSplitter = field(default_factory=EventSplitter)

    def head(self, effect: Head) -> None:
        assert self.status is None, "one answer"
        self.status = effect.status
        self.gets_stream = effect.headers.get("content-type", "").startswith("text/event-stream")

    def take(self, effect: Send) -> None:
        assert self.status is not None, "no bytes before the status"
        assert not self.has_ended, "nothing after the end"
        self.has_ended = effect.is_last
        self.body += effect.data
        assert b"kv_transfer_params" not in self.body, "what the router adds is not for clients"
        self.events.push(effect.data)
        if not self.gets_stream:
            return
        while (event := self.events.next()) is not None:
            assert not self.is_done, "nothing after [DONE]"
            self._take_event(data_of(event))
        assert any("".join(tokens).startswith(self.text) for tokens in (TOKENS, OTHERS)), self.text

    def _take_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:  # A broken event of D, passed on as it is.
            self.has_error = True
            return
        self.has_error = self.has_error or "error" in chunk
        for choice in chunk.get("choices", []):
            assert "token_ids" not in choice, "the client has not asked for them"
            self.text += choice["text"]

    @property
    def is_right(self) -> bool:
        """Whether the client has a complete answer without an error."""
        if self.status != 200 or not self.has_ended:
            return False
        if self.gets_stream != self.is_stream:
            return False
        if self.is_stream:
            return self.is_done and not self.has_error and self.text in self.answers
        answer = json.loads(self.body)
        return bool(answer) and answer["choices"][0]["text"] in self.answers

    @property
    def answers(self) -> Sequence[str]:
        return ["".join(tokens[: self.num_tokens]) for tokens in (TOKENS, OTHERS)]


class StrictMachine(Machine):
    """A machine that fails at an event without a row, and at a state that the row does not name."""

    def on(self, event: Event, now_s: float) -> Sequence[Effect]:
        before, leg = self._state, getattr(event, "leg", None)
        effects = super().on(event, now_s)
        if leg is None or not leg.is_broken or isinstance(event, Closed):
            row = TABLE[before, type(event), leg.role if leg is not None else None]
            assert self._state in row.to, f"{type(event).__name__} in {before.name} led to {self._state.name}"
        return effects

    def _report_unexpected(self, event: Event) -> None:
        raise AssertionError(f"{type(event).__name__} in {self._state.name}")


class World:
    dialect: Dialect = COMPLETIONS
    client_type = Client
    kinds_drawn: Sequence[str] = ("baton", "baton", "vllm", "other")

    def __init__(
        self, seed: int, machine: type[Machine] = StrictMachine, *, is_healthy: bool = False
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.rng_of_hedges = random.Random(f"hedge {seed}")
        self.rng_of_loans = random.Random(f"loans {seed}")
        self.rng_of_updates = rng_of_updates = random.Random(f"updates {seed}")
        self.is_healthy = is_healthy
        # Engines have different weights during an update; the router may not know yet.
        self.has_versions = rng_of_updates.random() < 0.4
        self.is_lagging = self.has_versions and not is_healthy and rng_of_updates.random() < 0.3
        self.fault_rate = 0.0 if is_healthy else rng.choice([0.1, 0.3, 0.6])
        self.disagree = not is_healthy and rng.random() < 0.2 and not self.has_versions
        settings = RouterSettings(
            prefill_urls=("http://p0", "http://p1"),
            decode_urls=("http://d0", "http://d1"),
            mode=rng.choice(["pull", "push"]),
            decode_leg=rng.choice(["at_once", "late"]),
            first_token=rng.random() < 0.7,
            on_prefill_failure=rng.choice(["local", "local", "fail"]),
            policy=random.Random(f"policy {seed}").choice(["least_in_flight", "cost"]),
            admission=AdmissionSettings(max_running=1),
            hedge_prefill=self.rng_of_hedges.random() < 0.7,
        )
        self.fleet = Fleet(settings, unix_clock=lambda: 0.0)
        self.taken_back: list[Mapping[str, Any]] = []
        turns = TurnTable(lambda engine, params: self.taken_back.append(params))
        self.view = FleetView(settings, self.fleet, Pairs(), turns)
        is_spent = not is_healthy and self.rng_of_hedges.random() < 0.2
        while is_spent and self.view.retries.take(0.0):
            pass
        self.view.look_min_tokens = 0 if settings.policy == "cost" else None
        self.others = self._fill(random.Random(f"queue {seed}").choice([0, 0, 2]))
        self.versions = {one: rng_of_updates.randrange(2) for one in self.fleet.engines}
        self.lent_versions: dict[str, int] = {}  # Versions of the weights, by ticket and by transfer id.
        self.kinds: dict[Engine, str] = {}
        for engine in self.fleet.engines:
            self.kinds[engine] = rng.choice(self.kinds_drawn)
        places: Sequence[tuple[str, ...]] = [(), ("host",), ("cache",), ("cache", "host")]
        self.lends = {one: self.rng_of_loans.choice(places) for one in self.fleet.engines}
        self.client = self.client_type(is_stream=rng.random() < 0.7, num_tokens=rng.choice([1, 3, 3, 3]))
        self.session = rng.choice([None, "session"])
        body = {**self.asked(), "temperature": 0, "stream": self.client.is_stream}
        objective = Objective(ttft_s=100.0)
        request = Request(
            "id", body, dialect=self.dialect, session=self.session, received_at_s=0.0, objective=objective
        )
        self.machine = machine(self.view, request)
        self.now_s = 0.0
        self.scripts: dict[Leg, deque[Event]] = {}  # Coming events of each open leg.
        self.closing: set[Leg] = set()
        self.waiting: list[Event] = []  # Met, HoldOver.
        self.prefilling: set[Leg] = set()  # Prefill legs that are waited for.
        self.lent: dict[str, Leg] = {}
        self.come_for: set[str] = set()
        self.held: set[str] = set()  # Transfers whose decode leg is held back for a time.
        for engine in self.fleet.engines:
            if engine.role == "prefill":
                engine.prefill_rate.note(random.Random(f"rate {seed}").choice([1e4, 1e8]))
            if engine.role == "prefill" and rng.random() < 0.5:
                self.view.late_legs.note(engine, len(PROMPT), PREFILL_S)
        self.tickets_used: set[str] = set()  # Tickets that a decode engine may have received.
        self.turns_used: set[str] = set()
        self.turn_legs: set[Leg] = set()  # Legs that may have brought the turn to an engine.
        self.faults: Counter[str] = Counter()  # Faults and other events, by what happened.
        self.turn: str | None = None  # Ticket of what the session's last answer left at an engine.
        if self.session is not None and rng.random() < 0.5:
            self.turn = "of the last turn"
            params = {"do_remote_decode": True, "baton_ticket": self.turn}
            keeper = self.fleet.engines[-1]
            if self.has_versions:
                self._note_introduced(keeper)
            turns.put(self.session, Turn(keeper, params, keeper.kv_identity), 0.0)
            self.turn_kv = keeper.kv_identity
        if random.Random(f"known {seed}").random() < 0.5:
            for engine in self.fleet.engines:
                engine.was_asked = True
                self._note_introduced(engine)
        # Decode engines never accept what P says of itself.
        self.refuses_introductions = not is_healthy and rng.random() < 0.1
        self.legs: list[Leg] = []
        self.num_resumed = 0
        self.num_refused = 0  # Refused introductions since a decode leg left without one.
        self.has_left = self.was_stopped = self.was_rejected = False
        self.over: Over | None = None

    def asked(self) -> dict[str, Any]:
        return {"prompt": PROMPT, "max_tokens": 3}

    def _fill(self, num_others: int) -> list[Ticket]:
        """Admit other requests before the machine's own; two are the limit."""
        tickets = [Ticket("", 0, "other", 0.0, inf, 10, 1.0) for _ in range(num_others)]
        assert self.view.admission is not None
        for ticket in tickets:
            assert self.view.admission.ask(ticket, 0.0) is None
        return tickets

    def _wait(self, effect: Queue) -> None:
        """Make the request wait until another one ends, or past its deadline."""
        assert self.view.admission is not None
        assert effect.ticket.is_waiting
        assert not effect.displaced
        assert self.others, "a request waits once"
        effect.ticket.tell = self.waiting.append
        if self.is_healthy or self.rng.random() < 0.8:
            self.view.admission.leave(self.others.pop(), self.now_s)
        else:
            self.now_s = effect.ticket.deadline_s
            self.faults["waits for too long"] += 1
        tell_ended(self.view.admission.pump(self.now_s))

    def run(self) -> None:
        self._carry_out(self.machine.begin(self.now_s))
        for _ in range(EVENTS_MAX):
            if self.over is not None:
                break
            self.now_s += self.rng.random()
            event = self._draw()
            if isinstance(event, Closed):
                del self.scripts[event.leg]
            elif isinstance(event, Opened):
                self._note_opened(event)
                if event.answer.status != 200:
                    self.turn_legs.discard(event.leg)  # The engine has not used the turn.
            elif isinstance(event, Failed) and event.failure.was_sent:
                self.tickets_used.add(_ticket_of(event.leg))
            elif isinstance(event, Failed):
                self.turn_legs.discard(event.leg)
            elif isinstance(event, Rejected):
                self.was_rejected = True
            if isinstance(event, Closed | Failed | Opened):
                self.prefilling.discard(event.leg)
            if isinstance(event, LEG_EVENTS) and event.leg in self.closing and not isinstance(event, Closed):
                self.faults["an event of a leg that is being closed"] += 1
            if isinstance(event, Failed | Closed):
                self.faults[f"{type(event).__name__} in {self.machine._state.name}"] += 1
            self._carry_out(self.machine.on(event, self.now_s))
        self._check_end()

    @property
    def is_ending(self) -> bool:
        return self.has_left or self.was_stopped

    def _draw(self) -> Event:
        rng = self.rng
        if self.has_versions and not self.is_healthy and self.rng_of_updates.random() < 0.05:
            self._update()
        # These are rare and short.
        is_short = self.machine._state in (State.ENDING, State.COMPARING)
        rate = 0.2 if is_short else 0.02
        if not self.is_healthy and rng.random() < rate:
            self.has_left = True
            self.faults[f"the client leaves in {self.machine._state.name}"] += 1
            return ClientGone()
        if not self.is_healthy and rng.random() < rate / 2:
            self.was_stopped = True
            self.faults[f"the router stops in {self.machine._state.name}"] += 1
            return Stopped()
        choices: list[Leg | Event] = [*self.scripts, *self.waiting]
        holds = [choice for choice in choices if isinstance(choice, HoldOver)]
        if holds and self.machine._state is State.PREFILLING and self.rng_of_hedges.random() < LATE_PREFILLS:
            choices = [holds[-1]]
        soon = [choice for choice in choices if not isinstance(choice, HoldOver)]
        if soon and rng.random() < 0.8:
            choices = soon  # Engines answer before most holds end.
        assert choices, "the request waits for nothing, and has not ended"
        chosen = rng.choice(choices)
        if not isinstance(chosen, Leg):
            self.waiting.remove(chosen)
            if isinstance(chosen, HoldOver):
                self.held.remove(chosen.transfer_id)
            return chosen
        script = self.scripts[chosen]
        if self.machine._state is State.RELAYING and chosen.role == "decode" and rng.random() < DRAINS:
            self.faults["an engine drains"] += 1
            return Draining(chosen)
        if chosen in self.closing and rng.random() < 0.5:
            script.clear()  # The rest was not read.
        elif is_short and script and rng.random() < self.fault_rate / 2:
            script.clear()
            script.append(self._failed(chosen, "broken"))
        return script.popleft() if script else Closed(chosen)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            assert self.over is None, "nothing after the end"
            match effect:
                case Leg():
                    assert not self.is_ending, "nothing new for a request that ends"
                    self.legs.append(effect)
                    usual = [leg for leg in self.legs if leg.role == leg.engine.role]
                    num_extra = self.faults["hedges"] + RESUMED_LEGS_MAX * self.num_resumed
                    assert len(usual) <= LEGS_MAX + num_extra
                    is_used = effect.role == "decode" and _ticket_of(effect) in self.tickets_used - {""}
                    assert not is_used, "two decode engines never use one ticket"
                    params = effect.body.get("kv_transfer_params") or {}
                    is_early = "baton_introduction" in params and params["transfer_id"] in self.held
                    assert not is_early, "a leg that is held leaves when its own time is up"
                    if effect.role == "prefill" and self.turn is not None and _ticket_of(effect) == self.turn:
                        assert not self.prefilling, "a turn is for one engine"
                        assert is_compatible(effect.kv_identity, self.turn_kv), "a turn of other weights"
                        self.turn_legs.add(effect)
                    if effect.role == "prefill":
                        self._note_prefilling(effect)
                    else:
                        self._check_weights(effect)
                    self.scripts[effect] = deque(self._answer(effect))
                case Close(leg):
                    self.closing.add(leg)
                    self.prefilling.discard(leg)
                case Queue():
                    self._wait(effect)
                case Look():
                    urls = [engine.url for engine in self.fleet.engines]
                    held = {url: sorted(self.rng.choices(range(500), k=3)) for url in urls}
                    cached = {url: Match(*numbers) for url, numbers in held.items()}
                    num_tokens = self.rng.choice([0, 300])
                    if self.rng_of_loans.random() < 0.5:  # A long prompt that a busy engine has.
                        num_tokens, holder = 4000, self.rng_of_loans.choice(self.fleet.engines)
                        cached = {holder.url: Match(0, 3900, 3900)}
                        holder.elsewhere = EngineLoad(holder.key, num_queued_tokens=100_000)
                    self.waiting.append(Found(num_tokens, cached))
                case Meet(engine):
                    self._introduce(engine)
                    self.waiting.append(Met())
                case Hold(transfer_id=transfer_id):
                    self.held.add(transfer_id)
                    self.waiting.append(HoldOver(transfer_id))
                case Head():
                    self.client.head(effect)
                case Send():
                    self.client.take(effect)
                case TakeBack(_, params):
                    self.taken_back.append(params)
                case Count(metric="hedges" | "hedges_won" as metric):
                    self.faults[metric] += 1
                case Count(metric="retries_refused"):
                    self.faults["no retry is left"] += 1
                case Count(metric="resumed_streams"):
                    self.num_resumed += 1
                    self.faults["a stream is resumed"] += 1
                case Count():
                    pass
                case Doubt():
                    self._settle(effect)
                case Over():
                    self.over = effect

    def _settle(self, doubt: Doubt) -> None:
        """The engines are asked at once: an update that the router did not know of is no fault."""
        for engine in (doubt.lent.engine, doubt.used.engine):
            self._note_introduced(engine)
        outcome = settle(self.view, doubt, self.now_s)
        if doubt.outcome == "computed":
            assert outcome == "other_weights", "no engine is at fault"
            self.faults["a prompt is computed because of other weights"] += 1

    def _update(self) -> None:
        """Change the weights of an engine's next answers."""
        engine, own = self.rng_of_updates.choice(list(self.versions.items()))
        latest = max(self.versions.values())
        least = own + 1 if self.is_lagging else 0  # Else it may be a rollback.
        choices = [version for version in range(least, latest + 2) if version != own]
        self.versions[engine] = self.rng_of_updates.choice(choices)
        self.faults["an update that the router does not know" if self.is_lagging else "an update"] += 1
        if not self.is_lagging and engine.is_introduced:
            self._note_introduced(engine)

    def _check_weights(self, leg: Leg) -> None:
        """Check that KV goes only to engines with the same weights, as far as the router knows them."""
        params = leg.body.get("kv_transfer_params") or {}
        if (lent := self.lent.get(_ticket_of(leg))) is not None:
            assert is_compatible(leg.kv_identity, lent.kv_identity), "KV of other weights"
        if "baton_introduction" not in params:
            self.num_refused = 0
        else:
            assert self.num_refused < INTRODUCTIONS_MAX
            (p,) = [
                one for one in self.legs if one.role == "prefill" and _transfer_of(one) == _transfer_of(leg)
            ]
            assert is_compatible(leg.kv_identity, p.kv_identity), "KV of other weights"

    def _note_prefilling(self, leg: Leg) -> None:
        others = {other.engine for other in self.prefilling}
        assert leg.engine not in others, "two legs of a prompt go to two engines"
        assert len(others) < 2, "a prompt is hedged once"
        assert not others or self.view.settings.hedge_prefill
        self.prefilling.add(leg)

    def _check_end(self) -> None:
        assert self.over is not None, "every request ends"
        assert not self.scripts, "every leg is closed"
        assert all(engine.in_flight == 0 for engine in self.fleet.engines)
        assert all(engine.num_queued_tokens == 0 for engine in self.fleet.engines)
        assert self.view.admission is not None
        counts = [row["running"] for row in self.view.admission.snapshot()]
        assert counts == [len(self.others)], "a request's place is free when it has ended"
        returned = [params["baton_ticket"] for params in self.taken_back if "baton_ticket" in params]
        unseen = [params["transfer_id"] for params in self.taken_back if "baton_ticket" not in params]
        assert not self.lent.keys() & {f"of {name}" for name in unseen}, "its ticket is known"
        assert len(set(returned)) == len(returned), "a loan is taken back once"
        assert not self.come_for & set(returned), "a loan that is used is not taken back"
        kept = self.lent.keys() - self.come_for - set(returned)
        assert not kept, f"no engine comes for {kept}"
        self._check_turn(returned)
        if self.was_rejected and not self.is_ending:
            assert self.over.error is not None, "a request that has waited for too long gets an error"
            assert self.over.error.status == 429
        if self.has_left:
            return
        assert (self.over.error is None) == (self.client.status is not None), "an answer, or an error"
        if self.client.status is not None:
            assert self.client.has_ended
            assert self.client.is_done or not self.client.gets_stream
        if self.is_healthy:
            assert self.client.is_right, self.client

    def _check_turn(self, returned: Sequence[str]) -> None:
        """What an engine keeps for the session is used, taken back, or still known."""
        is_known = self.view.turns.take(self.session, self.now_s) is not None
        if self.turn is not None:
            assert self.turn in self.turns_used or (self.turn in returned) != is_known
            assert not (self.turn_legs and is_known), "a turn that an engine may have is not brought again"

    # --- Engines ---------------------------------------------------------------------------------------

    def _introduce(self, engine: Engine) -> None:
        engine.was_asked = True
        if self._fails():
            self.faults["no introduction"] += 1
            return
        self._note_introduced(engine)

    def _note_introduced(self, engine: Engine) -> None:
        kind = self.kinds[engine]
        found = Introduced(None, None, None, None, None)
        if kind != "other":
            kv = replace(KV, version=str(self.versions[engine])) if self.has_versions else None
            card = EngineCard(engine.url, "signed", lends=self.lends[engine], kv_identity=kv)
            found = Introduced("baton" if kind == "baton" else "vllm", card, 100, None, None)
        if self.fleet.models.note_introduced(engine, found):
            self.view.turns.forget(engine)

    def _fails(self) -> bool:
        return self.rng.random() < self.fault_rate

    def _answer(self, leg: Leg) -> Iterator[Event]:
        if self._fails():
            yield from self._failure(leg)
            return
        body = leg.body
        params = body.get("kv_transfer_params") or {}
        if self.refuses_introductions and "baton_introduction" in params:
            self.faults["an introduction is refused"] += 1
            yield self._refusal(leg, 400, "kv_transfer_params.baton_introduction")
            return
        if params.get("baton_lend_stored"):
            yield self._stored(leg)
            return
        yield from self._say(leg, params)

    def _say(self, leg: Leg, params: Mapping[str, Any]) -> Iterator[Event]:
        """Answer a leg that finds its engine in health."""
        body = leg.body
        tokens = OTHERS if self.disagree and self.rng.random() < 0.5 else TOKENS
        if self.has_versions and not self.is_lagging:
            tokens = OTHERS if self.versions[leg.engine] % 2 else TOKENS
        self.faults["other tokens"] += tokens is OTHERS
        is_prefill = bool(params.get("do_remote_decode")) or body.get("max_tokens") == 1
        ends_at_first = self.client.num_tokens == 1
        prompt = json.loads(msgspec.json.encode(body["prompt"]))
        assert prompt[: len(PROMPT)] == PROMPT
        given = [*prompt[len(PROMPT) :], *params.get("baton_output_token_ids", ())]
        if given and self.has_versions:
            assert given == [ord(token) for token in tokens[: len(given)]], "tokens of other weights"
        elif given:
            tokens = TOKENS if given[0] == ord(TOKENS[0]) else OTHERS
            assert given == [ord(token) for token in tokens[: len(given)]]
        tokens = tokens[len(given) : self.client.num_tokens]
        assert tokens, "an answer that is whole is not continued"
        if is_prefill and not params.get("baton_first_token"):
            tokens = tokens[:1]
        ticket = self._ticket(leg) if params.get("do_remote_decode") else None
        if body.get("stream"):
            ends_early = is_prefill and bool(params.get("baton_first_token"))
            yield from self._stream(leg, tokens[:1] if ends_early else tokens, params, ticket)
        else:
            finish = None if params.get("baton_first_token") else "length"
            finish = "stop" if ends_at_first else finish
            if params.get("baton_first_token"):
                tokens = tokens[:1]
            choice: dict[str, Any] = {"text": "".join(tokens), "finish_reason": finish}
            if body.get("return_token_ids"):
                choice |= {"token_ids": [ord(tokens[0])], "prompt_token_ids": PROMPT}
            answer = {"choices": [choice], **({"kv_transfer_params": ticket} if ticket else {})}
            yield Opened(leg, LegAnswer(200, WHOLE, json.dumps(answer).encode()))

    def _stored(self, leg: Leg) -> Event:
        """Answer without a token, and perhaps with a loan."""
        answer: dict[str, Any] = {"choices": [{"text": "", "finish_reason": "length"}]}
        if self.rng_of_loans.random() < 0.8:
            name = f"stored {len(self.lent)}"
            ticket = {"baton_ticket": f"of {name}", "transfer_id": name, "do_remote_prefill": True}
            answer["kv_transfer_params"] = {**ticket, "remote_num_tokens": self.rng_of_loans.randint(1, 300)}
        self.faults["a loan of what is stored is asked for"] += 1
        return Opened(leg, LegAnswer(200, WHOLE, json.dumps(answer).encode()))

    def _stream(
        self, leg: Leg, tokens: Sequence[str], params: Mapping[str, Any], ticket: Mapping[str, Any] | None
    ) -> Iterator[Event]:
        is_split = bool(params.get("do_remote_decode"))
        data = b""
        for index, token in enumerate(tokens):
            is_last = index + 1 == len(tokens)
            choice: dict[str, Any] = {"text": token, "finish_reason": "length" if is_last else None}
            if self.client.num_tokens == 1:
                choice["finish_reason"] = "stop"
            elif is_split:
                choice["finish_reason"] = None
            is_first = bool(params.get("baton_first_token")) and index == 0
            if self.kinds[leg.engine] == "baton" and (is_first or params.get("baton_token_ids")):
                choice["token_ids"] = [ord(token)]
            elif self.kinds[leg.engine] == "vllm" and leg.body.get("return_token_ids"):
                choice["token_ids"] = [ord(token)]
                if index == 0:
                    choice["prompt_token_ids"] = json.loads(msgspec.json.encode(leg.body["prompt"]))
            chunk: dict[str, Any] = {"choices": [choice]}
            if is_last and ticket:
                chunk["kv_transfer_params"] = ticket
            data += b"data: " + json.dumps(chunk).encode() + b"\n\n"
        data += b"data: [DONE]\n\n"
        pieces = list(self._cut(data))
        fault = self.rng.choice(["cut", "ends early", "garbage"]) if self._fails() else None
        if fault is not None:
            self.faults[f"a stream: {fault}"] += 1
            pieces = pieces[: self.rng.randint(1, len(pieces))]
            if fault == "garbage":
                pieces.append(b"\n\ndata: {garbage\n\n")
            elif pieces[-1].endswith(b"[DONE]\n\n"):
                pieces[-1] = pieces[-1][:-3]
        given = params.get("baton_output_token_ids")
        headers = {**STREAM, **({"x-baton-given": str(len(given))} if given else {})}
        lent = self.lent_versions.get(_ticket_of(leg), self.lent_versions.get(_transfer_of(leg)))
        if lent is not None and self.kinds[leg.engine] == "baton":
            num_loaded = 100 if lent == self.versions[leg.engine] else 0
            headers["x-baton-prompt"] = f"total=100; local=0; transferred={num_loaded}"
        yield Opened(leg, LegAnswer(200, headers, pieces[0], is_stream=True))
        for piece in pieces[1:]:
            yield Piece(leg, piece)
        yield self._failed(leg, "broken") if fault == "cut" else StreamEnded(leg)

    def _cut(self, data: bytes) -> Iterator[bytes]:
        while data:
            size = self.rng.randint(1, len(data))
            yield data[:size]
            data = data[size:]

    def _failure(self, leg: Leg) -> Iterator[Event]:
        number = self.rng.randrange(8)
        self.faults[f"failure {number}"] += 1
        match number:
            case 0:
                yield Failed(leg, LegFailure("unreachable", leg.engine.url, "refused", was_sent=False))
            case 1:
                yield self._failed(leg, "timeout")
            case 2:
                yield self._failed(leg, "broken")
            case 3:
                yield self._refusal(leg, 400, "prompt")
            case 4 | 5 if leg.body.get("kv_transfer_params"):
                yield self._refusal(leg, 400, "kv_transfer_params.baton_ticket")
            case 6:
                yield Opened(leg, LegAnswer(200, WHOLE, b"[]"))
            case _:
                yield self._refusal(leg, 503, None)

    def _failed(self, leg: Leg, kind: FailureKind) -> Failed:
        return Failed(leg, LegFailure(kind, leg.engine.url, "a fault", was_sent=True))

    def _refusal(self, leg: Leg, status: int, param: str | None) -> Opened:
        body = json.dumps({"error": {"message": "no", "param": param}}).encode()
        return Opened(leg, LegAnswer(status, WHOLE, body))

    def _ticket(self, leg: Leg) -> dict[str, Any] | None:
        if self.kinds[leg.engine] == "other":
            return None
        transfer_id = leg.body["kv_transfer_params"]["transfer_id"]
        if self.has_versions:
            self.lent_versions[f"of {transfer_id}"] = self.lent_versions[transfer_id] = self.versions[
                leg.engine
            ]
        return {"baton_ticket": f"of {transfer_id}", "transfer_id": transfer_id, "do_remote_prefill": True}

    def _note_opened(self, event: Opened) -> None:
        """Note that P has lent its KV, or that D has come for it."""
        params = event.leg.body.get("kv_transfer_params") or {}
        if event.answer.status != 200:
            if b"baton_introduction" in event.answer.body and event.leg not in self.closing:
                self.num_refused += 1
            return
        is_computed = event.answer.headers.get("x-baton-prompt", "").endswith("=0")
        is_ignored = (
            is_computed or event.leg in self.closing or self.machine._state is State.ENDING
        )  # P's answer is the whole answer.
        if event.leg.role == "decode" and "transfer_id" in params and not is_ignored:
            self.come_for.add(f"of {params['transfer_id']}")
        elif event.leg.role == "prefill":
            self.turns_used.add(_ticket_of(event.leg))
        if event.leg.role == "prefill" and not event.answer.is_stream:
            answer = json.loads(event.answer.body)
            ticket = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
            if ticket:
                self.lent[ticket["baton_ticket"]] = event.leg


def _transfer_of(leg: Leg) -> str:
    return str((leg.body.get("kv_transfer_params") or {}).get("transfer_id", ""))


def _ticket_of(leg: Leg) -> str:
    """The ticket that the leg brings. Empty: none."""
    return str((leg.body.get("kv_transfer_params") or {}).get("baton_ticket", ""))
