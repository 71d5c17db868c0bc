"""A queue of requests in front of the engines: caps, priorities, shares and early refusals. Pure.

An engine that has much to do answers all requests late, in the order of arrival. So the router admits only
as many requests as the caps of the engines allow. The others wait here, and go in this order:

    1. the least `priority` of the request's body, as in vLLM: less is earlier
    2. the tenant that was served the least: start-time fair queueing (Goyal et al., 1996), with weights. A
       request costs its prompt and twice its answer, in tokens (Sheng et al., 2024, have these weights)
    3. the earliest deadline of a first token

No request overtakes the next one in this order: else a long prompt would never fit.

A request is refused with 429 and Retry-After if its first token is predicted to be later than its deadline
(Mooncake's early rejection), if its deadline passes while it waits, or if the queue is full and none in it
has a lower priority.

An engine has room for a prompt while it has fewer tokens to compute than its cap. If the engines compute
urgent prompts first (`by_priority`), the tokens of less urgent ones do not count. Requests count from
admission until they end. Each pool, the engines of one model, has a queue of its own.
"""

import hashlib
import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, inf, nan
from typing import Any, NamedTuple

from baton.core.errors import UserError
from baton.router.values.errors import RouterError
from baton.router.values.rates import Rate
from baton.router.values.settings import AdmissionSettings

OUTPUT_WEIGHT = 2.0  # Cost of a token of the answer, compared with one of the prompt.
RETRY_AFTER_MAX_S = 60
PRIORITY_MAX = 2**31 - 1
TENANT_CHARS_MAX = 256
TTFT_HEADER = "x-slo-ttft-ms"
TENANTS_MAX = 4096  # Tenants of a pool whose served tokens are remembered.


class Objective(NamedTuple):
    """What a client asks of the queue (llm-d has InferenceObjective)."""

    priority: int = 0
    tenant: str = ""
    ttft_s: float = inf
    max_output: float = inf  # Tokens of the answer at most.


NO_OBJECTIVE = Objective()


def objective_of(
    settings: AdmissionSettings, body: Mapping[str, Any], headers: Mapping[str, str], tenant: str = ""
) -> Objective:
    """The objective in a request's body and headers. Raises UserError.

    `tenant`: the name that the client's key or token has. If it is empty, a header that a gateway sets names
    the tenant, or the API key stands for it. llm-d's header `x-slo-ttft-ms` is the time in which the client
    needs the first token.
    """
    priority = body.get("priority")
    if priority is None:
        priority = 0
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > PRIORITY_MAX:
        raise UserError(f"must be an integer of 32 bits, is {priority!r}", field="priority")
    if priority < settings.least_priority:
        raise UserError(f"must be at least {settings.least_priority} here, is {priority}", field="priority")
    header = settings.tenant_header
    if not tenant:
        tenant = headers.get(header.lower(), "") if header is not None else _key_name(headers)
    if len(tenant) > TENANT_CHARS_MAX:
        raise UserError(f"must have at most {TENANT_CHARS_MAX} characters", field=header or "authorization")
    ttft_s = settings.ttft_s
    if (text := headers.get(TTFT_HEADER)) is not None:
        ttft_s = min(ttft_s, _seconds(text))
    limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
    asked = next(filter(None, limits), None)
    return Objective(priority, tenant, ttft_s, asked if isinstance(asked, int) and asked > 0 else inf)


def _key_name(headers: Mapping[str, str]) -> str:
    key = headers.get("authorization") or headers.get("x-api-key")
    return "" if key is None else hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


def _seconds(text: str) -> float:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = nan
    if not 0.0 < milliseconds < inf:
        raise UserError(f"must be a positive number of milliseconds, is {text!r}", field=TTFT_HEADER)
    return milliseconds / 1e3


class Capacity(NamedTuple):
    """Room that the engines of a pool have, all together."""

    num_requests: float = inf
    num_requests_elsewhere: int = 0  # Requests that other processes of this router have at the engines.
    num_with_room: float = inf  # Engines that have fewer tokens to compute than their cap.
    num_queued_tokens: int = 0  # Tokens that all of them compute before a new prompt.
    num_computing: int = 1  # Engines that compute prompts.
    tokens_per_s: float | None = None  # Prefill speed of one engine. None: not known.


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's place in the queue, and later among the admitted requests."""

    pool: str
    priority: int
    tenant: str
    arrived_s: float
    deadline_s: float  # When the first token is due.
    num_tokens: int  # Tokens of the prompt.
    num_output: float  # Tokens of the answer, as expected.
    # Callback that gets `Admitted` or `Rejected`. The executor of the machine's effects sets it.
    tell: Callable[[Any], None] = field(default=lambda event: None, repr=False)
    is_waiting: bool = False
    admitted_s: float | None = None  # None: the request is not admitted.

    @property
    def cost(self) -> float:
        return self.num_tokens + OUTPUT_WEIGHT * self.num_output


class Ended(NamedTuple):
    """A ticket does not wait any more. `error`: why it is refused; None: it is admitted."""

    ticket: Ticket
    error: RouterError | None


class _Pool:
    """Tickets of the requests to one model."""

    def __init__(self) -> None:
        self.num_requests = 0  # Requests that are admitted and have not ended.
        self.starting: dict[Ticket, None] = {}  # Admitted requests that no engine has yet.
        self.held_s = Rate()  # Seconds from admission to the request's end.
        self.served: dict[str, float] = {}  # Tokens that each tenant got, divided by its share.
        self.clock = 0.0  # Virtual time of the fair queue: start tag of the request admitted last.
        self.queues: dict[int, dict[str, list[tuple[float, int, Ticket]]]] = {}
        self.num_waiting = 0
        self._numbers = itertools.count()

    def put(self, ticket: Ticket) -> None:
        ticket.is_waiting = True
        self.num_waiting += 1
        tenants = self.queues.setdefault(ticket.priority, {})
        if ticket.tenant not in tenants:
            # A tenant that was away has no claim to what it did not use.
            self.served[ticket.tenant] = max(self.served.get(ticket.tenant, 0.0), self.clock)
        entry = (ticket.deadline_s, next(self._numbers), ticket)
        heapq.heappush(tenants.setdefault(ticket.tenant, []), entry)

    def next(self) -> Ticket | None:
        """The ticket that goes first. It stays in the queue."""
        if not self.num_waiting:
            return None
        tenants = self.queues[min(self.queues)]
        tenant = min(tenants, key=lambda name: (self.served[name], tenants[name][0][:2]))
        return tenants[tenant][0][2]

    def remove(self, ticket: Ticket) -> None:
        ticket.is_waiting = False
        self.num_waiting -= 1
        tenants = self.queues[ticket.priority]
        queue = tenants[ticket.tenant]
        if queue[0][2] is ticket:
            heapq.heappop(queue)
        else:
            queue[:] = [entry for entry in queue if entry[2] is not ticket]
            heapq.heapify(queue)
        if not queue:
            del tenants[ticket.tenant]
        if not tenants:
            del self.queues[ticket.priority]

    @property
    def waiting(self) -> list[Ticket]:
        return [entry[2] for tenants in self.queues.values() for queue in tenants.values() for entry in queue]

    def ahead_of(self, ticket: Ticket) -> tuple[int, int]:
        """Requests and tokens that go before a new one."""
        num_requests = num_tokens = 0
        for priority, tenants in self.queues.items():
            if priority > ticket.priority:
                continue
            waiting = [entry[2] for queue in tenants.values() for entry in queue]
            total = len(waiting), sum(one.num_tokens for one in waiting)
            if priority == ticket.priority:
                # The tenants take turns: each waiting request of its own tenant costs it one round.
                own = [entry[2] for entry in tenants.get(ticket.tenant, [])]
                num_turns = len(tenants) + (not own)
                fair = (
                    len(own) * num_turns + num_turns - 1,
                    (sum(one.num_tokens for one in own) + ticket.num_tokens) * num_turns - ticket.num_tokens,
                )
                total = min(total[0], fair[0]), min(total[1], fair[1])
            num_requests, num_tokens = num_requests + total[0], num_tokens + total[1]
        return num_requests, num_tokens


class Admission:
    """Queues of all pools. Not thread-safe: only the router's loop uses it.

    Call `pump` after `on_room`, at `wakes_at_s`, and now and then, because engines come and go.
    """

    def __init__(self, settings: AdmissionSettings, capacity: Callable[[str, int], Capacity | None]) -> None:
        """`capacity`: the function from pool and priority to the pool's capacity.

        It returns None for a pool without an engine. A request to such a pool does not wait.
        """
        self._settings, self._capacity = settings, capacity
        self._shares = dict(settings.shares)
        self._pools: dict[str, _Pool] = {}
        self._deadlines: list[tuple[float, int, Ticket]] = []  # Some of these do not wait any more.
        self._numbers = itertools.count()
        self.on_room: Callable[[], None] = lambda: None

    @property
    def num_waiting(self) -> int:
        return sum(pool.num_waiting for pool in self._pools.values())

    @property
    def wakes_at_s(self) -> float:
        """When the next deadline passes."""
        while self._deadlines and not self._deadlines[0][2].is_waiting:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else inf

    def ask(self, ticket: Ticket, now_s: float) -> list[Ended] | None:
        """Admit a new request, and return None; or let it wait, and return the tickets that it displaces.

        Raises RouterError.
        """
        pool, capacity = self._pool(ticket.pool), self._capacity(ticket.pool, ticket.priority)
        if capacity is None:
            self._admit(pool, ticket, now_s)
            return None
        self._check_deadline(pool, capacity, ticket, now_s)
        if min(pool.queues, default=inf) > ticket.priority and _has_room(pool, capacity):
            if not pool.num_waiting:
                pool.served.clear()  # No tenant waits for another one.
                pool.clock = 0.0
            self._admit(pool, ticket, now_s)
            return None
        displaced = []
        if self.num_waiting >= self._settings.max_waiting:
            last = max(pool.waiting, key=lambda one: (one.priority, one.arrived_s), default=None)
            if last is None or last.priority <= ticket.priority:
                raise _busy("too many requests wait", _wait_s(pool, capacity, ticket))
            pool.remove(last)
            capacity = self._capacity(last.pool, last.priority) or capacity
            error = _busy("more important requests wait", _wait_s(pool, capacity, last))
            displaced.append(Ended(last, error))
        pool.put(ticket)
        heapq.heappush(self._deadlines, (ticket.deadline_s, next(self._numbers), ticket))
        return displaced

    def pump(self, now_s: float) -> list[Ended]:
        """Admit the tickets for which there is room now, and refuse those that are too late."""
        ended = []
        while self.wakes_at_s <= now_s:
            late = heapq.heappop(self._deadlines)[2]
            pool, capacity = self._pools[late.pool], self._capacity(late.pool, late.priority)
            pool.remove(late)
            wait_s = _wait_s(pool, capacity, late) if capacity is not None else 0.0
            ended.append(Ended(late, _busy("the request has waited for too long", wait_s)))
        for name, pool in self._pools.items():
            while (ticket := pool.next()) is not None:
                capacity = self._capacity(name, ticket.priority)
                if capacity is not None and not _has_room(pool, capacity):
                    break
                pool.remove(ticket)
                self._admit(pool, ticket, now_s)
                ended.append(Ended(ticket, None))
        return ended

    def note_start(self, ticket: Ticket) -> None:
        """An engine gets the request: its prompt is in the engine's queue from now on."""
        self._pools[ticket.pool].starting.pop(ticket, None)

    def leave(self, ticket: Ticket, now_s: float, num_output: int | None = None) -> None:
        """The request has ended, or does not wait any more. `num_output`: tokens of its answer, if known."""
        pool = self._pools[ticket.pool]
        if ticket.is_waiting:
            pool.remove(ticket)
        self.note_start(ticket)
        if ticket.admitted_s is None:
            return
        pool.num_requests -= 1
        pool.held_s.note(now_s - ticket.admitted_s)
        ticket.admitted_s = None
        if num_output is not None and ticket.tenant in pool.served:
            more = OUTPUT_WEIGHT * (num_output - ticket.num_output)
            pool.served[ticket.tenant] += more / self._shares.get(ticket.tenant, 1.0)
        self.on_room()

    def snapshot(self) -> list[Mapping[str, Any]]:
        """Running and waiting requests of each pool, for operators."""
        return [
            {
                "pool": name,
                "running": pool.num_requests,
                "waiting": {str(priority): _count(tenants) for priority, tenants in pool.queues.items()},
            }
            for name, pool in self._pools.items()
        ]

    def _pool(self, name: str) -> _Pool:
        return self._pools.setdefault(name, _Pool())

    def _admit(self, pool: _Pool, ticket: Ticket, now_s: float) -> None:
        pool.num_requests += 1
        pool.starting[ticket] = None
        ticket.admitted_s = now_s
        pool.clock = max(pool.served.get(ticket.tenant, 0.0), pool.clock)
        pool.served[ticket.tenant] = pool.clock + ticket.cost / self._shares.get(ticket.tenant, 1.0)
        if len(pool.served) > TENANTS_MAX:
            active = {tenant for tenants in pool.queues.values() for tenant in tenants}
            pool.served = {
                name: served for name, served in pool.served.items() if served > pool.clock or name in active
            }

    def _check_deadline(self, pool: _Pool, capacity: Capacity, ticket: Ticket, now_s: float) -> None:
        """Raises RouterError."""
        wait_s = _wait_s(pool, capacity, ticket)
        late_s = now_s + wait_s - ticket.deadline_s
        if late_s > 0.0:
            why = f"the first token is predicted in {wait_s:.1f} s, {late_s:.1f} s too late"
            raise _busy(why, late_s)


def _has_room(pool: _Pool, capacity: Capacity) -> bool:
    return (
        pool.num_requests + capacity.num_requests_elsewhere < capacity.num_requests
        and len(pool.starting) < capacity.num_with_room
    )


def _wait_s(pool: _Pool, capacity: Capacity, ticket: Ticket) -> float:
    """Predicted time to the first token. A part that is not known yet counts as 0."""
    num_ahead, num_tokens_ahead = pool.ahead_of(ticket)
    num_running = pool.num_requests + capacity.num_requests_elsewhere
    prefill_s = slot_s = 0.0
    if capacity.tokens_per_s:
        num_starting = sum(one.num_tokens for one in pool.starting)
        num_tokens = capacity.num_queued_tokens + num_starting + num_tokens_ahead
        queue_s = num_tokens / (capacity.tokens_per_s * capacity.num_computing)
        prefill_s = queue_s + ticket.num_tokens / capacity.tokens_per_s
    if pool.held_s.value is not None and capacity.num_requests < inf:
        # Little's law: places become free at this rate.
        num_to_end = max(0.0, num_running + num_ahead + 1 - capacity.num_requests)
        slot_s = num_to_end * pool.held_s.value / max(1.0, capacity.num_requests)
    return max(prefill_s, slot_s)


def _busy(why: str, wait_s: float) -> RouterError:
    """`wait_s`: time after which a request like this one is expected to be served in time."""
    retry_after_s = min(max(1, ceil(wait_s)), RETRY_AFTER_MAX_S)
    return RouterError(
        429, f"the engines are busy: {why}; try again in {retry_after_s} s", retry_after_s=retry_after_s
    )


def _count(tenants: Mapping[str, list[Any]]) -> int:
    return sum(map(len, tenants.values()))
