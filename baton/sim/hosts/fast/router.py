"""Dispatches requests in two legs, loses some of them, retries, and makes mistakes.

PullRouter    the prefill leg; when its ticket has come back, the decode leg
PushRouter    both legs at once, with one name; sometimes a ticket as well, as other routers do
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from baton.core.ids import RequestId, TransferId
from baton.sim.hosts.fast.cluster import Cluster
from baton.sim.hosts.fast.facts import Landing
from baton.sim.hosts.fast.host import Host
from baton.sim.hosts.fast.model import CONTROL_HOST, CONTROL_PORT
from baton.sim.hosts.fast.prefills import Prefill
from baton.sim.kernel.wire import Way

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
    fetches: list[tuple[Host, Landing]] = field(default_factory=list)
    prefills: list[tuple[Host, Prefill]] = field(default_factory=list)


class Router(ABC):
    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._world = cluster, cluster.world
        self._num_transfers = 0
        cluster.on_turn = self._next_turn

    def dispatch(self, request: Request) -> None:
        if request.done or request.num_attempts >= ATTEMPTS_MAX:
            return
        request.num_attempts += 1
        world, rng = self._world, self._world.rng
        producer = rng.choice(self._cluster.producers)
        consumer = rng.choice([name for name in self._cluster.consumers if name != producer])
        attempt = Attempt(request, *(request.way or (producer, consumer)))
        self._send(attempt)
        if world.chance(world.faults.abort):
            world.after(rng.uniform(0, 6), lambda: self._abort(attempt))
        if not request.is_probe:
            world.after(rng.uniform(1, 8), lambda: self._timed_out(attempt))

    @abstractmethod
    def _send(self, attempt: Attempt) -> None:
        """One leg, or both."""

    def _ticket_legs(self, params: dict[str, Any], attempt: Attempt) -> None:
        """A client can bring a ticket to any engine, as often as it likes, and damage it."""
        world, rng = self._world, self._world.rng
        if world.chance(world.faults.ticket_alter):
            text = params["baton_ticket"]
            at = rng.randrange(len(text))
            altered = text[:at] + rng.choice("Aa0_") + text[at + 1 :]
            if altered != text:
                damaged = {**params, "baton_ticket": altered}
                self._leg(attempt.consumer, self._fetcher(damaged, attempt, attempt.request.prompt))
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
        def fetch(host: Host) -> None:
            landing = host.fetches.fetch(
                params, prompt, attempt.request.num_tokens, self._ender(attempt), producer=producer
            )
            if landing is not None:
                attempt.fetches.append((host, landing))

        return fetch

    def _ender(self, attempt: Attempt) -> Callable[[bool], None]:
        def ended(delivered: bool) -> None:
            attempt.request.done = attempt.request.done or delivered

        return ended

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


class PullRouter(Router):
    def _send(self, attempt: Attempt) -> None:
        request = attempt.request
        self._num_transfers += 1
        transfer_id = TransferId(f"t{self._num_transfers}")

        def take(params: dict[str, Any]) -> None:
            self._leg(attempt.consumer, self._fetcher(params, attempt, request.prompt))
            self._ticket_legs(params, attempt)

        def prefill(host: Host) -> None:
            host.prefills.add(request.prompt, request.num_tokens, transfer_id, request.request_id, take)

        self._leg(attempt.producer, prefill)


class PushRouter(Router):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._introductions = {name: _introduction(cluster.hosts[name]) for name in cluster.producers}

    def _send(self, attempt: Attempt) -> None:
        world, request = self._world, attempt.request
        if not world.chance(world.faults.name_reuse):
            self._num_transfers += 1
        transfer_id = TransferId(f"x{self._num_transfers}")
        if not world.chance(world.faults.old_introduction):
            self._introductions[attempt.producer] = _introduction(self._cluster.hosts[attempt.producer])
        introduced, text = self._introductions[attempt.producer]
        stream: dict[str, Any] = {
            "do_remote_prefill": True,
            "remote_engine_id": attempt.producer,
            "transfer_id": transfer_id,
        }
        is_named = self._num_transfers % 3 == 2  # As proxies do that do not know introductions.
        if is_named:
            stream |= {"remote_host": CONTROL_HOST, "remote_port": CONTROL_PORT}
        else:
            stream["baton_introduction"] = text

        def prefill(host: Host) -> None:
            prefill = host.prefills.add(
                request.prompt,
                request.num_tokens,
                transfer_id,
                request.request_id,
                lambda params: self._ticket_too(params, attempt),
            )
            if prefill is not None:
                attempt.prefills.append((host, prefill))

        def streamer(prompt: int) -> Callable[[Host], None]:
            def fetch(host: Host) -> None:
                producer = self._cluster.hosts[attempt.producer] if is_named else introduced
                self._fetcher(stream, attempt, prompt, producer)(host)

            return fetch

        self._leg(attempt.producer, prefill)
        self._leg(attempt.consumer, streamer(request.prompt))
        self._replays(streamer, attempt)

    def _ticket_too(self, params: dict[str, Any], attempt: Attempt) -> None:
        if self._world.chance(self._world.faults.ticket_replay / 2):
            self._world.count("a ticket beside the stream")
            self._leg(attempt.consumer, self._fetcher(params, attempt, attempt.request.prompt))
            self._ticket_legs(params, attempt)


def _introduction(host: Host) -> tuple[Host, str]:
    text = host.half.introduction()
    assert text is not None
    return host, text
