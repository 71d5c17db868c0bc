"""Model of one data connection: what its ends prove to each other, and what a wire does to its messages.

    reader: ask(wanted)   -- DataRequest(counter, wanted, mac) -->    owner: serves? then reads its memory
    reader: accepts?      <-- DataAnswer(counter, payload, mac) --    owner: answer(request, payload)

A MAC is perfect in this model: it is the tuple of all that it covers, with the key of the session. The wire
can copy a MAC; it cannot make one. A message that does not verify ends the connection, and its read fails.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NUM_TAPED = 16  # Answers that the wire remembers of each connection, to replay them.


class Checks(NamedTuple):
    """What the ends of a connection verify. A mutant leaves one of them out."""

    requests: bool = True  # The owner verifies the MAC of a request.
    bound_answers: bool = True  # The MAC of an answer covers the request, not the payload alone.
    counters: bool = True  # MACs cover the counter, and each end compares it.


class DataRequest(NamedTuple):
    counter: int
    wanted: tuple[Any, ...]  # Addresses and lengths.
    mac: Hashable


class DataAnswer(NamedTuple):
    counter: int
    payload: Any
    mac: Hashable


ALL_CHECKS = Checks()
_sessions = itertools.count()


@dataclass(eq=False, slots=True)
class Connection:
    checks: Checks
    is_lost: bool = False
    is_stalled: bool = False  # True: the connection carries nothing; a timeout turns that into a loss.
    num_false_serves: int = 0  # Requests that were served and that the reader did not make.
    _session: int = field(default_factory=lambda: next(_sessions))
    _num_asked: int = 0
    _asked: set[tuple[Any, ...]] = field(default_factory=set)
    _served: set[int] = field(default_factory=set)
    _tape: deque[tuple[DataRequest, DataAnswer]] = field(default_factory=lambda: deque(maxlen=NUM_TAPED))

    # --- The two ends -----------------------------------------------------------------------------

    def ask(self, wanted: tuple[Any, ...]) -> DataRequest:
        self._num_asked += 1
        self._asked.add(wanted)
        return DataRequest(self._num_asked, wanted, self._mac("ask", self._num_asked, wanted))

    def serves(self, request: DataRequest) -> bool:
        """Whether the owner believes that its reader made this request, and made it once."""
        checks = self.checks
        if checks.requests and request.mac != self._mac("ask", request.counter, request.wanted):
            return False
        if checks.counters and request.counter in self._served:
            return False
        self._served.add(request.counter)
        if request.wanted not in self._asked:
            self.num_false_serves += 1
        return True

    def answer(self, request: DataRequest, payload: Any) -> DataAnswer:
        answer = DataAnswer(
            request.counter, payload, self._mac_of_answer(request.counter, request.wanted, payload)
        )
        self._tape.append((request, answer))
        return answer

    def accepts(self, asked: DataRequest, answer: DataAnswer) -> bool:
        """Whether the reader takes the payload for what it asked for."""
        if self.checks.counters and answer.counter != asked.counter:
            return False
        return bool(answer.mac == self._mac_of_answer(answer.counter, asked.wanted, answer.payload))

    def _mac(self, way: str, counter: int, *covered: Any) -> Hashable:
        return (self._session, way, counter if self.checks.counters else 0, *covered)

    def _mac_of_answer(self, counter: int, wanted: tuple[Any, ...], payload: Any) -> Hashable:
        if not self.checks.bound_answers:
            return ("unkeyed", payload)
        return self._mac("answer", counter, wanted, payload)

    # --- The wire ---------------------------------------------------------------------------------

    def bend_request(
        self, rng: random.Random, request: DataRequest, flip: Callable[[Any], Any]
    ) -> tuple[str, DataRequest]:
        """What was done to the request, and what arrives at the owner. `flip` alters a wanted range."""
        wanted = request.wanted
        older = [taped for taped, _ in self._tape if taped.wanted != wanted]
        match rng.randrange(4):
            case 0 if older:
                return "request replayed", rng.choice(older)
            case 1 if len(wanted) > 1:
                return "request truncated", request._replace(wanted=wanted[: rng.randrange(1, len(wanted))])
            case 2:
                return "request renumbered", request._replace(counter=request.counter + rng.randint(1, 3))
            case _:
                at = rng.randrange(len(wanted))
                bent = (*wanted[:at], flip(wanted[at]), *wanted[at + 1 :])
                return "request flipped", request._replace(wanted=bent)

    def bend_answer(
        self, rng: random.Random, request: DataRequest, answer: DataAnswer, flip: Callable[[Any], Any]
    ) -> tuple[str, DataAnswer]:
        """What was done to the answer, and what arrives at the reader. `flip` alters the payload.

        An answer that was taped has the counter of its own request, or is renumbered to fit.
        """
        alike = self._alike(request, answer.payload)
        others = [old for taped, old in self._tape if taped.wanted != request.wanted]
        match rng.randrange(4):
            case _ if alike:
                return "answer replayed", self._renumbered(rng, rng.choice(alike), answer)
            case 0 | 1 if others:
                return "answer exchanged", self._renumbered(rng, rng.choice(others), answer)
            case 2 if answer.payload:
                return "answer truncated", answer._replace(payload=answer.payload[:-1])
            case _:
                return "answer flipped", answer._replace(payload=flip(answer.payload))

    def can_replay(self, request: DataRequest, answer: DataAnswer) -> bool:
        """Whether the wire has an older answer to an equal request, with other contents."""
        return bool(self._alike(request, answer.payload))

    def _alike(self, request: DataRequest, payload: Any) -> list[DataAnswer]:
        return [old for taped, old in self._tape if taped.wanted == request.wanted and old.payload != payload]

    def _renumbered(self, rng: random.Random, old: DataAnswer, answer: DataAnswer) -> DataAnswer:
        return old._replace(counter=answer.counter) if rng.random() < 0.5 else old
