"""The events that a request's machine takes, and the effects that it asks for. See `machine`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from baton.core.identity import KVIdentity
from baton.router.fleet.admission import Ended, Ticket
from baton.router.fleet.block_index import Match
from baton.router.fleet.engine import Engine
from baton.router.fleet.notes import Outcome
from baton.router.request.answers import LegAnswer, PrefillReader
from baton.router.values.errors import LegFailure, RouterError
from baton.router.values.identity import has_other_weights
from baton.router.values.rates import Window
from baton.router.values.settings import Role

# --- Events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Met:
    """The router has asked the engine for its introduction. The engine may not have answered."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A leg's answer has come: the whole answer, or the first piece of its stream."""

    leg: "Leg"
    answer: LegAnswer


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of a leg's stream."""

    leg: "Leg"
    data: bytes


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A leg's stream has ended in order."""

    leg: "Leg"


@dataclass(frozen=True, slots=True)
class Failed:
    leg: "Leg"
    failure: LegFailure


@dataclass(frozen=True, slots=True)
class Draining:
    """The leg's engine drains. The leg may go on, but another engine should continue its answer."""

    leg: "Leg"


@dataclass(frozen=True, slots=True)
class Closed:
    """A leg has left its engine, after `Close`."""

    leg: "Leg"


@dataclass(frozen=True, slots=True)
class HoldOver:
    """The time of this transfer's `Hold` is over. It delays the decode leg in push, and times the prefill leg
    in pull.
    """

    transfer_id: str


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client has closed its connection, or does not read."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The router shuts down, and the time that this request had to end is over."""


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to `Look`."""

    num_tokens: int  # Tokens of the prompt; 0: not known.
    cached: Mapping[str, Match]  # Cached tokens of the prompt at each engine, by URL.
    home: int = 0  # See `block_index.home_key`.


@dataclass(frozen=True, slots=True)
class Admitted:
    """The ticket of `Queue` may go to the engines."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The ticket of `Queue` has waited for too long, or made room for a more important one."""

    error: RouterError


Event: TypeAlias = (
    Admitted
    | Rejected
    | Found
    | Met
    | Opened
    | Piece
    | StreamEnded
    | Failed
    | Draining
    | Closed
    | HoldOver
    | ClientGone
    | Stopped
)

# --- Effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Queue:
    """Let the request wait until its ticket's `tell` brings `Admitted` or `Rejected`.

    `displaced`: tickets that do not wait any more. Their requests have to be told.
    """

    ticket: Ticket
    displaced: Sequence[Ended]


@dataclass(frozen=True, slots=True)
class Meet:
    """Ask the engine for its introduction, unless that is under way; then report `Met`."""

    engine: Engine


@dataclass(frozen=True, slots=True)
class Look:
    """Ask which engines have the beginning of this prompt; then report `Found`, soon and in any case."""

    prompt: Any  # The prompt in the request's body; None: `tokenizer` turns a chat into token ids.
    adapter: str | None
    salt: str | None
    tokenizer: Engine | None = None
    chat: Mapping[str, Any] = field(default_factory=dict)  # Body for /tokenize.


@dataclass(slots=True, eq=False)
class Leg:
    """Effect: send this request to an engine. The answer comes as events that name the leg."""

    role: Role
    engine: Engine
    body: Mapping[str, Any]
    wait_s: float  # Time limit for a whole answer, or for the first piece of a stream.
    started_at_s: float
    was_alone: bool  # The engine had no other request at the leg's start.
    num_queued_tokens: int = 0  # Prompt tokens in the engine's queue; 0 when computed, or when the leg ends.
    num_tokens_before: int = 0  # Tokens of other prompts in the engine's queue at the leg's start.
    expected_s: float | None = None  # Predicted time from the start to the first token; None: not known.
    num_chunks: int = 0  # Chunks of its stream since the start of `window`.
    num_chunks_before: int = 0  # Chunks of its stream before the start of `window`.
    window: Window | None = None  # Beginning of the running sample of its stream.
    reader: PrefillReader | None = None
    priority: int = 0
    outcome: str = "cancelled"  # Label in the metrics.
    raw: bytes | None = None  # The whole body, instead of `body`.
    is_broken: bool = False  # The engine sent no valid answer; the router does not read the rest.
    kv_identity: KVIdentity | None = field(init=False)  # The engine's at the leg's start.
    has_told: bool = False  # The answer has told whether this prefill has lent something.
    weights_id: str = field(default="", init=False)  # Names the answer's weights; empty: not known.

    def __post_init__(self) -> None:
        self.kv_identity = self.engine.kv_identity

    @property
    def is_outdated(self) -> bool:
        """Whether the engine's weights have changed since: the leg may have KV and tokens of both."""
        return self.kv_identity is not None and self.kv_identity != self.engine.kv_identity

    @property
    def is_as_chosen(self) -> bool:
        """Whether the answer comes from the weights that the engine was chosen for, as far as is known."""
        if self.is_outdated:
            return False
        return self.kv_identity is None or self.weights_id in ("", self.kv_identity.weights_id)


@dataclass(frozen=True, slots=True)
class Close:
    """Close the leg: the engine aborts what it still does for it; then report `Closed`."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Hold:
    """Report `HoldOver` after so many seconds, even if the transfer has ended by then."""

    seconds: float
    transfer_id: str


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of the client's answer."""

    status: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Send:
    """Bytes of the client's answer. `is_last`: they end it."""

    data: bytes
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Take a loan back: tell the engine that no other engine will come for what it keeps."""

    engine: Engine
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Doubt:
    """D has not used what P has lent. Ask both engines for their introductions; then `settle`.

    D cannot use the loan if the weights of one engine were updated and the router does not know of it yet.
    That is no fault.
    """

    lent: Leg
    used: Leg
    outcome: Outcome

    @property
    def has_other_weights(self) -> bool:
        """Whether unlike weights kept D from the loan, as far as the engines are known by now."""
        is_outdated = self.lent.is_outdated or self.used.is_outdated
        return is_outdated or has_other_weights(self.lent.kv_identity, self.used.kv_identity)


@dataclass(frozen=True, slots=True)
class Count:
    """Add to a counter, or observe a time in seconds (`value`)."""

    metric: str
    labels: tuple[str, ...] = ()
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Over:
    """The request has ended and its legs are closed. `error`: the answer, if nothing was sent before."""

    status: int | None
    error: RouterError | None = None


Effect: TypeAlias = Queue | Look | Meet | Leg | Close | Hold | Head | Send | TakeBack | Doubt | Count | Over


def tell_ended(ended: Sequence[Ended]) -> None:
    """Tell requests that they do not wait any more."""
    for ticket, error in ended:
        ticket.tell(Admitted() if error is None else Rejected(error))
