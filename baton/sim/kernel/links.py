"""Links between ranks: dialled, reset, stalled and lost, and what a wire does to a read over one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from baton.sim.kernel.connection import Checks, Connection, Request
from baton.sim.kernel.world import World

TRIES = 2  # If an answer does not verify, the reader asks once more.
STALL_S = 4.0  # After this silence of the owner the connection is lost.


class Links(ABC):
    """The base of a network of reads."""

    def __init__(self, world: World, checks: Checks) -> None:
        self.world = world
        self.lost_ways: dict[tuple[Any, Any], None] = {}  # (source, reader) that lost a link, in order.
        self._checks = checks
        self._links: list[Connection] = []

    @abstractmethod
    def fail_reads(self, link: Connection) -> None:
        """The link is lost: end all reads on it, and note their ways."""

    @property
    def num_false_serves(self) -> int:
        return sum(link.num_false_serves for link in self._links)

    def new_link(self) -> Connection:
        self._links.append(Connection(self._checks))
        return self._links[-1]

    def break_link(self, link: Connection, took_s: float) -> None:
        """Reset it during this read or after it, or stall it until a timeout."""
        rng = self.world.rng_of_lies
        if rng.random() < 0.5:
            link.is_stalled = True
            self.world.count("links stalled")
            self.world.after(STALL_S, lambda: self.lose(link))
        else:
            self.world.count("links reset")
            self.world.after(rng.uniform(0, 2 * took_s), lambda: self.lose(link))

    def lose(self, link: Connection) -> None:
        if not link.is_lost:
            link.is_lost, link.is_stalled = True, False
            self.fail_reads(link)

    def exchange(
        self,
        link: Connection,
        request: Request,
        serve: Callable[[tuple[Any, ...]], tuple[Any, ...] | None],
        flip_wanted: Callable[[Any], Any],
        flip_payload: Callable[[Any], Any],
        fits: Callable[[tuple[Any, ...]], bool],
    ) -> tuple[Any, ...] | None:
        """Request and answer on a wire that lies. None: one of them did not verify, and the link is lost.

        `serve`: what the owner answers to wanted ranges; None: they are not in its memory. `fits` sees every
        payload that arrives.
        """
        world, lies = self.world, self.world.faults.read_lies
        for _ in range(TRIES):
            bent = request
            if request.wanted and world.lies(lies):
                what, bent = link.bend_request(world.rng_of_lies, request, flip_wanted)
                world.count(what)
            payload = serve(bent.wanted) if link.serves(bent) else None
            if payload is None:
                break  # The owner ends the connection.
            answer = link.answer(bent, payload)
            has_chance = link.can_replay(request, answer)
            if answer.payload and world.lies(0.5 if has_chance else lies):
                what, answer = link.bend_answer(world.rng_of_lies, request, answer, flip_payload)
                world.count(what)
            if fits(answer.payload) and link.accepts(request, answer):
                accepted: tuple[Any, ...] = answer.payload
                return accepted
            request = link.ask(request.wanted)
        self.lose(link)
        return None
