"""Start of the decode leg of a push: with the prefill leg, or late, so that D does not slow the prefill.

A vLLM with a request that waits for a remote prefill steps without pause, and its worker process polls for a
second after each step. If D is on the producer's host, this takes processor time from the prefill that D
waits for. Reading all blocks after the prefill instead costs milliseconds only. So D's leg to such a host
leaves

    when P has answered        as in a pull: P's ticket has come, and its first token
    or a lead before that      for prompts that take long: D reads blocks before P has computed the last one

The router predicts P's answer from P's last prefills of about that length: it takes the slowest of them.
Without such a prefill, D's leg waits for the answer. A wrong prediction only costs time, because the same two
engines serve the request in both cases.
"""

from collections import defaultdict, deque
from urllib.parse import urlsplit

from baton.router.fleet.engine import Engine
from baton.router.values.settings import DecodeLegStart

LEAD_SHARE = 0.05  # D's leg leaves when 5 % of the expected prefill remain: its polling costs P under 1 %.
LEAD_MIN_S = 0.02  # D's leg would hardly arrive before P ends with a shorter lead.
NUM_REMEMBERED = 4


class LateLegs:
    """Durations of prefills that ran alone on their engine. Not thread-safe."""

    def __init__(self, start: DecodeLegStart) -> None:
        self._start = start
        self._s_per_token: dict[tuple[str, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=NUM_REMEMBERED)
        )

    def note(self, producer: Engine, num_tokens: int, duration_s: float) -> None:
        """Note how long a prefill took. `num_tokens`: its tokens, as counted when it was routed."""
        size = max(1, num_tokens)
        self._s_per_token[producer.url, size.bit_length()].append(duration_s / size)

    def hold_s(self, producer: Engine, consumer: Engine, num_tokens: int) -> float | None:
        """Seconds from the prefill leg's start to the decode leg's; None: wait until P has answered."""
        if not self._is_late(producer, consumer):
            return 0.0
        size = max(1, num_tokens)
        seen = self._s_per_token.get((producer.url, size.bit_length()))
        if not seen or producer.load:
            return None  # The router does not know how long the prompt waits in P's queue.
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
