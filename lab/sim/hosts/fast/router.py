"""Dispatches requests in two legs, loses some of them, retries, and makes mistakes.

pull    the prefill leg; when its ticket has come back, the decode leg
push    both legs at once, with one name; sometimes a ticket as well, as other routers do
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from baton.core.ids import RequestId, TransferId
from baton.core.transfer_params import CONTINUE
from lab.sim.hosts.fast.cluster import Cluster
from lab.sim.hosts.fast.facts import Landing
from lab.sim.hosts.fast.host import Host
from lab.sim.hosts.fast.model import CONTROL_HOST, CONTROL_PORT
from lab.sim.hosts.fast.prefills import Prefill
from lab.sim.kernel.lies import other_text
from lab.sim.kernel.wire import Way

ATTEMPTS_MAX = 3
OTHER_PROMPT = 1000


@dataclass(slots=True)
class Request:
    prompt: int
    request_id: RequestId
    num_tokens: int
    is_probe: bool = False
    num_attempts: int = 0
    done: bool = False
    way: Way | None = None  # P and D; None: the router's choice.


@dataclass(slots=True)
class Attempt:
    """One dispatch: what the router can abort."""

    request: Request
    producer: str
    consumer: str
    continues: bool = False  # D goes on after P's token.
    fetches: list[tuple[Host, Landing]] = field(default_factory=list)
    prefills: list[tuple[Host, Prefill]] = field(default_factory=list)


class Router:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._world = cluster, cluster.world
        self._num_transfers = 0
        self._introductions: dict[str, tuple[Host, str]] = {}
        cluster.on_turn = self._next_turn
        if cluster.is_push:
            for name in cluster.producers:
                self._introduce(name)

    def dispatch(self, request: Request) -> None:
        if request.done or request.num_attempts >= ATTEMPTS_MAX:
            return
        request.num_attempts += 1
        world, rng = self._world, self._world.rng
        producer = rng.choice(self._cluster.producers)
        consumer = rng.choice([name for name in self._cluster.consumers if name != producer])
        continues = self._cluster.has_states and world.rng_of_states.random() < 0.5
        attempt = Attempt(request, *(request.way or (producer, consumer)), continues=continues)
        if self._cluster.is_push:
            self._push(attempt)
        else:
            self._pull(attempt)
        if world.chance(world.faults.abort):
            world.after(rng.uniform(0, 6), lambda: self._abort(attempt))
        if not request.is_probe:
            world.after(rng.uniform(1, 8), lambda: self._timed_out(attempt))

    def _pull(self, attempt: Attempt) -> None:
        self._num_transfers += 1
        transfer_id = TransferId(f"t{self._num_transfers}")
        self._prefill(attempt, transfer_id, lambda params: self._ticket_legs(params, attempt))

    def _push(self, attempt: Attempt) -> None:
        world, name = self._world, attempt.producer
        if not world.chance(world.faults.name_reuse):
            self._num_transfers += 1
        transfer_id = TransferId(f"x{self._num_transfers}")
        if not world.chance(world.faults.old_introduction):
            self._introduce(name)
        introduced, text = self._introductions[name]
        stream: dict[str, Any] = {
            "do_remote_prefill": True,
            "remote_engine_id": name,
            "transfer_id": transfer_id,
        }
        if attempt.continues:
            stream[CONTINUE] = True
        is_named = self._num_transfers % 3 == 2  # Proxies that do not know introductions send an address.
        if is_named:
            stream |= {"remote_host": CONTROL_HOST, "remote_port": CONTROL_PORT}
        else:
            stream["baton_introduction"] = text

        def ticket_too(params: dict[str, Any]) -> None:
            if world.chance(world.faults.ticket_replay / 2):
                world.count("a ticket beside the stream")
                self._ticket_legs(params, attempt)

        def streamer(prompt: int) -> Callable[[Host], None]:
            def fetch(host: Host) -> None:
                producer = self._cluster.hosts[name] if is_named else introduced
                self._fetcher(stream, attempt, prompt, producer)(host)

            return fetch

        self._prefill(attempt, transfer_id, ticket_too)
        self._leg(attempt.consumer, streamer(attempt.request.prompt))
        self._replays(streamer, attempt)

    def _introduce(self, name: str) -> None:
        host = self._cluster.hosts[name]
        text = host.half.introduction()
        assert text is not None
        self._introductions[name] = (host, text)

    def _prefill(
        self, attempt: Attempt, transfer_id: TransferId, on_ticket: Callable[[dict[str, Any]], None]
    ) -> None:
        request = attempt.request

        def prefill(host: Host) -> None:
            added = host.prefills.add(
                request.prompt,
                request.num_tokens,
                transfer_id,
                request.request_id,
                on_ticket,
                continues=attempt.continues,
            )
            if added is not None and self._cluster.is_push:
                attempt.prefills.append((host, added))

        self._leg(attempt.producer, prefill)

    def _ticket_legs(self, params: dict[str, Any], attempt: Attempt) -> None:
        """A client can bring a ticket to any engine, as often as it likes, and damage it."""
        world, prompt = self._world, attempt.request.prompt
        self._leg(attempt.consumer, self._fetcher(params, attempt, prompt))
        if world.chance(world.faults.ticket_alter):
            damaged = {**params, "baton_ticket": other_text(world.rng, params["baton_ticket"])}
            if damaged != params:
                self._leg(attempt.consumer, self._fetcher(damaged, attempt, prompt))
        self._replays(lambda prompt: self._fetcher(params, attempt, prompt), attempt)

    def _next_turn(self, host: Host, landing: Landing, params: dict[str, Any]) -> None:
        """The next turn of a conversation reads what its decode engine keeps."""
        others = [name for name in self._cluster.hosts if name != host.engine_id]
        turn = {**params, "do_remote_decode": False, "do_remote_prefill": True}
        request = Request(landing.prompt, RequestId("turn"), landing.num_tokens)
        attempt = Attempt(request, host.engine_id, self._world.rng.choice(others))
        if self._world.chance(0.7):
            self._leg(attempt.consumer, self._fetcher(turn, attempt, landing.prompt))

    def _replays(self, leg_of: Callable[[int], Callable[[Host], None]], attempt: Attempt) -> None:
        """The decode leg comes again, to this engine or another, for this prompt or another."""
        world, rng = self._world, self._world.rng
        if world.chance(world.faults.ticket_replay):
            prompt = attempt.request.prompt + (0 if world.chance(0.7) else OTHER_PROMPT)
            name = attempt.consumer if world.chance(0.6) else rng.choice(self._cluster.consumers)
            replay = leg_of(prompt)
            delay_s = rng.choice([0.0, rng.uniform(0, 6)])
            world.after(delay_s, lambda: self._leg(name, replay))
            world.after(delay_s + 1.0, lambda: self._leg(name, replay))
        if world.chance(max(world.faults.ticket_replay, world.faults.last_words)):
            # The same leg again at the consumer's successor.
            again = leg_of(attempt.request.prompt)
            self._cluster.on_boot.append((attempt.consumer, lambda: self._leg(attempt.consumer, again)))

    def _fetcher(
        self, params: dict[str, Any], attempt: Attempt, prompt: int, producer: Host | None = None
    ) -> Callable[[Host], None]:
        def ended(delivered: bool) -> None:
            attempt.request.done = attempt.request.done or delivered

        def fetch(host: Host) -> None:
            landing = host.fetches.fetch(params, prompt, attempt.request.num_tokens, ended, producer=producer)
            if landing is not None:
                attempt.fetches.append((host, landing))

        return fetch

    def _leg(self, name: str, action: Callable[[Host], None]) -> None:
        world = self._world
        if world.chance(world.faults.leg_loss):
            return

        def arrive() -> None:
            host = self._cluster.hosts[name]
            host.when_awake(lambda: action(host))

        world.after(world.spread(world.faults.leg_delay_s), arrive)

    def _abort(self, attempt: Attempt) -> None:
        for host, landing in attempt.fetches:
            host.when_awake(partial(host.fetches.abort, landing))
        for host, prefill in attempt.prefills:
            host.when_awake(partial(host.prefills.abort, prefill))

    def _timed_out(self, attempt: Attempt) -> None:
        """Retry. The first attempt is aborted, or goes on as with some routers."""
        if not attempt.request.done and self._world.chance(0.7):
            if self._world.chance(0.5):
                self._abort(attempt)
            self.dispatch(attempt.request)
