"""An engine as the router knows it: what it is, how busy it is, and whether it may get requests."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

from baton.core.engine_card import EngineCard
from baton.core.identity import KVIdentity
from baton.router.fleet.breaker import Health, Status
from baton.router.fleet.cost import TOKEN_S
from baton.router.fleet.notes import EngineLoad, Speeds
from baton.router.fleet.outlier_detection import Answers
from baton.router.values.identity import Identity, Kind, ModelCard, weights_of
from baton.router.values.members import Member
from baton.router.values.rates import BusyTime, Line, Rate
from baton.router.values.settings import EngineKey, Role, without_credentials

LEAST_LOAD_GAP = 3.0  # Two steps tell what one more answer adds if their running answers differ by this.
SLOW_SHARE = 0.1  # Share of an engine that is much slower than its peers: enough to see it recover.


@dataclass(slots=True, eq=False)
class Engine:
    address: str = field(repr=False)  # Where requests go. Only `url` is shown.
    role: Role
    health: Health = field(default_factory=Health, repr=False)
    model: str | None = None  # The model's name by the operator, for an engine that reports none.
    weight: float = 1.0  # Share of requests, compared with 1 of the others.
    in_flight: int = 0
    num_requests: int = 0
    num_failures: int = 0  # Legs without an answer, and answers of 500 and above.
    num_heard: int = 0  # Pieces of answers that have come from it.
    num_queued_tokens: int = 0  # Tokens of prompts that it has still to compute, of this process.
    num_queued_at: Counter[int] = field(default_factory=Counter, repr=False)  # The same, by priority.
    num_indexed_blocks: int | None = None  # Blocks of its cache, known from its KV events.
    prefill_rate: Rate = field(default_factory=Rate, repr=False)  # Tokens per second.
    busy: BusyTime = field(default_factory=BusyTime, repr=False)  # Time spent on this process's prompts.
    steps: Line = field(
        default_factory=lambda: Line(TOKEN_S, LEAST_LOAD_GAP), repr=False
    )  # Step time by the number of other answers.
    next_step_sample_s: float = 0.0
    elsewhere: EngineLoad = field(init=False)  # Load from the other processes of this router.
    lacks: dict[str, float] = field(
        default_factory=dict, repr=False
    )  # Paths, and until when; see `pass_through`.
    waits: dict["Wait", None] = field(default_factory=dict, repr=False)  # Legs that wait for it, in order.
    last_error: str | None = None
    last_error_unix_s: float | None = None
    kind: Kind | None = None  # None: not known, or another one.
    max_model_len: int | None = None  # Tokens of prompt and answer together, if it says so.
    introduction: EngineCard | None = None
    is_introduced: bool = False  # The engine was asked and answered, perhaps that it has none.
    asks_connector_at_s: float = 0.0  # A vLLM's, which is asked by a request.
    was_asked: bool = False  # The router has asked for its introduction at least once.
    identity: Identity | None = None  # The identity reported last, also while the engine is down.
    cards: tuple[ModelCard, ...] | None = field(default=None, repr=False)  # Model and adapters.
    names: tuple[str, ...] | None = None  # Values of a request's `model` that it answers to; None: not known.
    refused: str | None = None  # Why its model keeps it from getting requests.
    drain_until_s: float | None = None  # No requests are sent; those that run may end until then.
    is_leaving: bool = False  # The engine is removed when it has drained.
    is_removed: bool = False
    is_slow: bool = False  # Much slower than its peers.
    # A prompt is late here, or the last answer was an error; nothing else has come from the engine since.
    late_until_s: float = 0.0
    rests_until_s: float = 0.0  # The last `Retry-After` ends then.
    # Answers to this process: all of them (None), and by the model that the request names.
    answers: defaultdict[str | None, Answers] = field(
        default_factory=lambda: defaultdict(Answers), repr=False
    )
    admin_port: int | None = None  # Port of /baton/*, as /health reports; None: the main port.
    url: str = field(init=False)  # The address without credentials.

    def __post_init__(self) -> None:
        self.url = without_credentials(self.address)
        self.elsewhere = EngineLoad(self.key)

    @property
    def key(self) -> EngineKey:
        """The engine's name in every process of this router."""
        return self.role, self.url

    @property
    def kv_identity(self) -> KVIdentity | None:
        """The identity that the engine reported last. None: it reports none."""
        return self.introduction.kv_identity if self.introduction is not None else None

    @property
    def member(self) -> Member:
        return Member(self.role, self.address, self.model, self.weight)

    @property
    def load(self) -> int:
        """Requests in flight, in all processes of this router."""
        return self.in_flight + self.elsewhere.in_flight

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts that the engine has still to compute, for all processes of this router."""
        return self.num_queued_tokens + self.elsewhere.num_queued_tokens

    def num_queued_before(self, priority: int) -> int:
        """The same, of prompts that are as urgent or more. Those of other processes all count."""
        own = sum(count for one, count in self.num_queued_at.items() if one <= priority)
        return own + self.elsewhere.num_queued_tokens

    @property
    def speeds(self) -> Speeds | None:
        """Speeds that this process has learned. None: it has learned none."""
        rate, step_s = self.prefill_rate.value, self.steps.base_s
        if rate is None and step_s is None:
            return None
        return Speeds(rate, step_s, None if step_s is None else self.steps.slope_s)

    @property
    def admin_address(self) -> str:
        """Address for requests to /baton/*."""
        if self.admin_port is None:
            return self.address
        parts = urlsplit(self.address)
        host = parts.netloc.removesuffix(f":{parts.port}")
        return urlunsplit(parts._replace(netloc=f"{host}:{self.admin_port}"))

    @property
    def weights(self) -> str | None:
        """Name of the weights, for operators. None: the engine does not report them."""
        return weights_of(self.kv_identity) if self.kv_identity is not None else None

    @property
    def status(self) -> Status:
        return self.health.status

    @property
    def is_up(self) -> bool:
        return self.health.is_up

    def share(self, now_s: float) -> float:
        """Share of the usual requests: less in slow start, and while late or much slower than its peers."""
        is_slow = self.is_slow or now_s < self.late_until_s
        return self.health.share(now_s) * (SLOW_SHARE if is_slow else 1.0) * self.weight

    def may_be_asked(self, now_s: float, model: object, *, is_again: bool) -> bool:
        """`is_again`: the request has failed at another engine, and is not to try this one out."""
        is_on_trial = self.health.breaker(now_s) == "half_open"
        if self.rests_until_s > now_s or (is_again and is_on_trial):
            return False
        return (
            not isinstance(model, str)
            or model not in self.answers
            or not self.answers[model].is_ejected(now_s)
        )

    @property
    def is_member(self) -> bool:
        return self.refused is None and self.drain_until_s is None

    @property
    def is_eligible(self) -> bool:
        return self.is_up and self.is_member

    @property
    def state(self) -> str:
        """The engine's state in words, for operators."""
        if self.drain_until_s is not None:
            return "draining" if self.load else "drained"
        if self.refused is not None:
            return "refused"
        return "slow" if self.is_slow and self.is_up else self.status


class Wait(Protocol):
    @property
    def has_begun(self) -> bool:
        """The client may have a part of the answer: no other engine can give the rest."""

    def give_up(self) -> None:
        """End it, because the engine is ejected."""

    def hand_over(self) -> None:
        """Let another engine go on, if one can, because this one drains."""
