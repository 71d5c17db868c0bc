"""Start of the decode leg of a push: with the prefill leg, or late, so that D does not slow the prefill.

A vLLM with a request that waits for a remote prefill steps without pause, and its worker process spins for a
second after each step. On the producer's machine that takes processor time from the prefill that D waits for,
and the bytes that D could read early take milliseconds to read late. There D's leg leaves

    when P has answered        as a pull's: P's ticket is there, and its first token
    or a lead before that      for prompts that take long: D reads what is computed before P has ended

When P will answer is guessed from its last prefills of about that length, the slowest of them; without any,
D's leg waits for the answer. A wrong guess costs time only: one pair of engines does both.
"""

from collections import defaultdict, deque
from urllib.parse import urlsplit

from baton.router.fleet.engine import Engine
from baton.router.settings import DecodeLegStart

LEAD_SHARE = 0.05  # Of the prefill: what D's spinning may cost it is less than a fifth of that.
LEAD_MIN_S = 0.02  # With less, D's leg is hardly there when P ends.
NUM_REMEMBERED = 4


class LateLegs:
    """Not thread-safe: of the router's loop. Durations of prefills that had their engine to themselves."""

    def __init__(self, start: DecodeLegStart) -> None:
        self._start = start
        self._s_per_token: dict[tuple[str, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=NUM_REMEMBERED)
        )

    def note(self, producer: Engine, num_tokens: int, duration_s: float) -> None:
        """A prefill of so many tokens, as counted when it was routed, has taken so long."""
        size = max(1, num_tokens)
        self._s_per_token[producer.url, size.bit_length()].append(duration_s / size)

    def hold_s(self, producer: Engine, consumer: Engine, num_tokens: int) -> float | None:
        """From the start of the prefill leg to that of the decode leg; None: until P has answered."""
        if not self._is_late(producer, consumer):
            return 0.0
        size = max(1, num_tokens)
        seen = self._s_per_token.get((producer.url, size.bit_length()))
        if not seen or producer.load:
            return None  # How long it will wait for its turn is not known.
        expected_s = max(seen) * size
        lead_s = LEAD_SHARE * expected_s
        return expected_s - lead_s if lead_s >= LEAD_MIN_S else None

    def _is_late(self, producer: Engine, consumer: Engine) -> bool:
        match self._start:
            case "at_once":
                return False
            case "late":
                return True
            case "auto":
                return consumer.kind == "vllm" and _host(producer) == _host(consumer)


def _host(engine: Engine) -> str | None:
    return urlsplit(engine.url).hostname
