"""States of blocks that a transfer uses, between "allocated" and "free".

    loading   parked in WAITING_FOR_REMOTE_KVS; a connector fills its blocks
                 finished_recving ---------------> arrived: back to the scheduler, computed as far as valid
                 failed / invalid, "recompute" --> as above, but valid only up to the first bad block
                 failed / invalid, "fail" -------> finished with an error; blocks held
                 arriving ---------> as arrived, but the load goes on layer by layer; blocks are not preempted
                     finished_recving -----------> an ordinary request
                     invalid --------------------> rolled back to the first bad block; or finished
    held      finished, but its blocks are in use by a transfer
                 lent (delay_free)  until finished_sending
                 being filled       until finished_recving; also of an arriving request
                 both ended ---------------------> blocks free, request forgotten

A failed load is not repeated: the request is recomputed here, so that every handoff ends. Reports about
requests in none of these states are late or wrong; they are counted and change nothing.
"""

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.core.config import LoadFailurePolicy
from baton.engine.cache.kv_cache import KVCache, KVCacheBlocks
from baton.engine.request import Request, RequestStatus

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Load:
    """`| local hit | external |`; the first `num_valid_tokens` tokens of both are valid."""

    request: Request
    num_local_tokens: int
    num_external_tokens: int
    num_valid_tokens: int
    is_failed: bool = False
    is_stale: bool = False  # The weights have changed since it began: nothing of it is of use.

    def was_filled_at(self, token_index: int) -> bool:
        """Whether the connector loads this token, instead of the local cache."""
        return self.num_local_tokens <= token_index < self.num_local_tokens + self.num_external_tokens


@dataclass(slots=True)
class StepLoads:
    """Loads that one step orders."""

    sync: dict[str, Load] = field(default_factory=dict)  # Done before the step computes.
    parked: list[Request] = field(default_factory=list)  # Done in the background.


@dataclass(slots=True)
class _Hold:
    request: Request
    is_lent: bool
    is_being_filled: bool
    # The load, if requests that share its blocks may compute before it has filled them.
    arriving: Load | None


class LoadFailures:
    """Requests to roll back or fail now. A failed background load under "recompute" waits for its end.

    The tokens of this step of `affected_ids` were computed on bad blocks.
    """

    __slots__ = ("affected_ids", "failed", "to_fail", "to_roll_back")

    def __init__(self) -> None:
        # Each with the number of tokens that are still valid.
        self.to_roll_back: list[tuple[Request, int]] = []
        self.to_fail: list[Request] = []
        self.failed: list[Request] = []  # Requests whose own load failed.
        self.affected_ids: set[str] = set()

    def roll_back(self, request: Request, num_valid_tokens: int) -> None:
        self.affected_ids.add(request.request_id)
        self.to_roll_back.append((request, num_valid_tokens))

    def fail(self, request: Request) -> None:
        self.affected_ids.add(request.request_id)
        self.to_fail.append(request)


class RemoteKV:
    def __init__(self, kv_cache: KVCache, policy: LoadFailurePolicy) -> None:
        self._kv_cache = kv_cache
        self._policy = policy
        self._loading: dict[str, Load] = {}
        self._arriving: dict[str, Load] = {}
        self._step_loads = StepLoads()  # Loads of the step that is being decided.
        self._held: dict[str, _Hold] = {}
        self.num_ignored_reports = 0

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def num_held(self) -> int:
        return len(self._held)

    # --- Admission -------------------------------------------------------------------------------

    def has_room_to_load(self, request: Request, hits: KVCacheBlocks, others: Iterable[Request]) -> bool:
        """Whether a load may take blocks; they cannot be preempted until it ends.

        True only if every prompt that has blocks already (`others`, and those loading) can still be computed
        to its end. Otherwise loads and half-computed prompts could deadlock over the pool.
        """
        missing = self._kv_cache.num_blocks_missing
        promised = sum(missing(other, other.num_tokens) for other in others)
        promised += sum(missing(load.request, _num_held(load.request)) for load in self._loading.values())
        # Hits in groups with a window may be outside it when the load ends.
        shared = sum(
            block.ref_cnt > 0
            for group, blocks in zip(self._kv_cache.groups, hits.blocks, strict=True)
            if group.window is None
            for block in blocks
        )
        needed = missing(request, _num_held(request)) - shared
        return needed + promised <= self._kv_cache.block_pool.num_free_blocks

    def park(self, request: Request, num_local_tokens: int, num_external_tokens: int) -> None:
        """Start to wait for a background load, whose blocks are allocated."""
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        end = num_local_tokens + num_external_tokens
        request.num_computed_tokens = end  # Counted in advance; no other request may use these tokens.
        self._loading[request.request_id] = Load(request, num_local_tokens, num_external_tokens, end)
        self._step_loads.parked.append(request)

    def note_sync_load(self, request: Request, num_local_tokens: int, num_external_tokens: int) -> None:
        """Add a load that the step being decided performs before it computes."""
        self._step_loads.sync[request.request_id] = Load(
            request, num_local_tokens, num_external_tokens, num_local_tokens + num_external_tokens
        )

    def take_step_loads(self) -> StepLoads:
        """Loads of the step that has just been decided."""
        taken, self._step_loads = self._step_loads, StepLoads()
        return taken

    def still_loading(self, loads: StepLoads) -> list[Request]:
        """Requests that began to wait with a step, and still wait."""
        return [request for request in loads.parked if request.request_id in self._loading]

    def find_unheard(self, loads: StepLoads) -> tuple[set[int], list[Request]]:
        """Find what is lost when no rank has got a step's loads.

        Returns (blocks that its synchronous loads have not filled, requests that wait for a load which may
        never be reported).
        """
        unfilled: set[int] = set()
        for load in loads.sync.values():
            unfilled.update(block_id for _, block_id in self._blocks_of(load))
        return unfilled, self.still_loading(loads)

    def _blocks_of(self, load: Load) -> list[tuple[int, int]]:
        """(index in the table, block id) of the blocks that the connector fills."""
        first = load.num_local_tokens // self._kv_cache.block_size
        last = -(-(load.num_local_tokens + load.num_external_tokens) // self._kv_cache.block_size)
        return self._kv_cache.blocks_between(load.request.request_id, first, last)

    def arriving_blocks(self) -> set[int]:
        """Blocks that loads fill while requests use them."""
        return {block_id for load in self._arriving_loads() for _, block_id in self._blocks_of(load)}

    def arriving_requests(self) -> list[Request]:
        """Requests that use blocks while a load fills them, and that have not ended."""
        return [load.request for load in self._arriving.values()]

    def _arriving_loads(self) -> list[Load]:
        of_held = [hold.arriving for hold in self._held.values() if hold.arriving is not None]
        return [*self._arriving.values(), *of_held]

    def loading_among(self, request_ids: Iterable[str]) -> list[Request]:
        return [self._loading[r].request for r in sorted(request_ids) if r in self._loading]

    def loading_requests(self) -> list[Request]:
        return [load.request for load in self._loading.values()]

    # --- Failures --------------------------------------------------------------------------------

    def find_failures(
        self,
        failed_recving: Iterable[str],
        invalid_block_ids: Iterable[int],
        others: Iterable[Request],
        loads: StepLoads,
    ) -> LoadFailures:
        """`others`: requests with blocks that are not loading, in order. `loads`: the reporting step's."""
        failures, bad = LoadFailures(), set(invalid_block_ids)
        arriving = {load.request.request_id: load for load in self._arriving_loads()}
        for request_id in sorted(failed_recving):
            if (load := self._loading.get(request_id)) is not None:
                self._fail_load(load, load.num_local_tokens, failures)
            elif (load := arriving.get(request_id)) is not None:
                bad.update(block_id for _, block_id in self._blocks_of(load))
            elif request_id not in self._held:
                self._ignore("failed_recving", request_id)
        if bad:
            self._find_invalid(bad, list(others), loads, failures)
        return failures

    def _find_invalid(
        self, bad: set[int], others: list[Request], loads: StepLoads, failures: LoadFailures
    ) -> None:
        """Find every request that computed on the bad blocks.

        The blocks that a request computed after a bad block are bad too, and may be shared with requests
        that have another, good block in the bad one's place. So the search repeats until it adds nothing.
        """
        untouched = [load.request for load in self._loading.values()] + others
        found = True
        while found:
            found = False
            for request in list(untouched):
                num_computed = -(-request.num_computed_tokens // self._kv_cache.block_size)
                computed = self._kv_cache.blocks_between(request.request_id, 0, num_computed)
                first_bad = next((i for i, block_id in computed if block_id in bad), None)
                if first_bad is None:
                    continue
                untouched.remove(request)
                after = self._kv_cache.blocks_between(request.request_id, first_bad, sys.maxsize)
                bad.update(block_id for _, block_id in after)
                self._fail_request(request, first_bad * self._kv_cache.block_size, loads, failures)
                found = True
        self._kv_cache.evict_blocks(bad)  # Includes blocks of ended requests that are held for a load.

    def _fail_request(
        self, request: Request, num_valid_tokens: int, loads: StepLoads, failures: LoadFailures
    ) -> None:
        if (load := self._loading.get(request.request_id)) is not None:
            if load.was_filled_at(num_valid_tokens):
                self._fail_load(load, num_valid_tokens, failures)
            else:  # The token is in the local hit, which others could find before the load ended.
                load.num_valid_tokens = min(load.num_valid_tokens, num_valid_tokens)
                self._kv_cache.distrust(request, num_valid_tokens)
            return
        own_load = loads.sync.get(request.request_id) or self._arriving.get(request.request_id)
        is_own_load = own_load is not None and own_load.was_filled_at(num_valid_tokens)
        if is_own_load:
            failures.failed.append(request)
            request.asks_connector = False
        # A request that only shares the block has no load: it is recomputed under either policy.
        if is_own_load and self._policy == "fail":
            self._kv_cache.distrust(request, num_valid_tokens)
            failures.fail(request)
        else:
            failures.roll_back(request, num_valid_tokens)

    def _fail_load(self, load: Load, num_valid_tokens: int, failures: LoadFailures) -> None:
        load.num_valid_tokens = min(load.num_valid_tokens, num_valid_tokens)
        if load.is_failed:
            return
        load.is_failed = True
        load.request.asks_connector = False
        failures.failed.append(load.request)
        if self._policy == "fail":
            failures.fail(load.request)

    # --- Ends ------------------------------------------------------------------------------------

    def take_arriving(self, request_ids: Iterable[str]) -> list[Load]:
        """Loads of these to settle, which go on. The requests of others wait for the end of their load."""
        loads = [self._loading[r] for r in sorted(request_ids) if r in self._loading]
        going_on = [
            load
            for load in loads
            if not (load.is_failed or load.request.computes_nothing or self._kv_cache.is_hybrid)
        ]
        for load in going_on:
            load.request.is_arriving = True
            self._arriving[load.request.request_id] = self._loading.pop(load.request.request_id)
        return going_on

    def take_arrived(self, finished_recving: Iterable[str]) -> tuple[list[Load], list[Request]]:
        """Returns (ended loads to settle, requests whose blocks to free)."""
        arrived, to_free = [], []
        for request_id in sorted(finished_recving):
            if (load := self._loading.pop(request_id, None)) is not None:
                arrived.append(load)
            elif (load := self._arriving.pop(request_id, None)) is not None:
                load.request.is_arriving = False
            elif (hold := self._held.get(request_id)) is not None and hold.is_being_filled:
                hold.is_being_filled, hold.arriving = False, None
                to_free += self._released(hold)
            else:
                self._ignore("finished_recving", request_id)
        return arrived, to_free

    def take_sent(self, finished_sending: Iterable[str]) -> list[Request]:
        """Returns the requests whose blocks to free."""
        to_free: list[Request] = []
        for request_id in sorted(finished_sending):
            if (hold := self._held.get(request_id)) is not None and hold.is_lent:
                hold.is_lent = False
                to_free += self._released(hold)
            else:
                self._ignore("finished_sending", request_id)
        return to_free

    def hold(self, request: Request, *, is_lent: bool) -> bool:
        """Keep the blocks of a request that has ended, if a transfer uses them; returns whether one does."""
        loading = self._loading.pop(request.request_id, None)
        arriving = self._arriving.pop(request.request_id, None)
        is_being_filled = loading is not None or arriving is not None
        if is_lent or is_being_filled:
            self._held[request.request_id] = _Hold(request, is_lent, is_being_filled, arriving)
            return True
        return False

    def make_loads_stale(self) -> None:
        """Drop what the loads under way bring, and the local hits before it, when they end."""
        for load in self._loading.values():
            load.is_failed = load.is_stale = True
            load.num_valid_tokens = 0

    def settle(self, load: Load, *, is_continued: bool = False) -> bool:
        """End a load: make its valid blocks findable, and set what the request has computed.

        `is_continued`: output tokens come with the load, so the next token to compute is after the prompt.
        Returns False if nothing of the load is of use and the request has to free its blocks: with windows,
        blocks for the end of the load are not those that the end of a part of it needs, and a recurrent state
        after the last token cannot compute that token again.
        """
        request = load.request
        is_short = load.num_valid_tokens < request.num_computed_tokens
        is_beyond = load.num_valid_tokens == request.num_tokens and not is_continued
        is_useless = (self._kv_cache.is_hybrid and is_short) or (self._kv_cache.has_states and is_beyond)
        # The blocks of a stale load are freed, not filled again: some may be shared with a loan.
        if is_useless or load.is_stale:
            request.asks_connector &= is_short  # A load that was not short would bring the same again.
            self._kv_cache.distrust(request, load.num_valid_tokens)
            request.num_computed_tokens = request.num_transferred_tokens = 0
            return False
        request.status = RequestStatus.PREEMPTED if request.is_known_to_ranks else RequestStatus.WAITING
        request.num_computed_tokens = load.num_valid_tokens
        self._kv_cache.cache_blocks(request, load.num_valid_tokens)
        if request.num_computed_tokens == request.num_tokens and not is_continued:
            request.num_computed_tokens -= 1  # The last token is computed here, for its logits.
        request.num_transferred_tokens = max(0, request.num_computed_tokens - load.num_local_tokens)
        return True

    def _released(self, hold: _Hold) -> list[Request]:
        if hold.is_lent or hold.is_being_filled:
            return []
        del self._held[hold.request.request_id]
        return [hold.request]

    def _ignore(self, report: str, request_id: str) -> None:
        level = logging.DEBUG if self.num_ignored_reports else logging.WARNING
        self.num_ignored_reports += 1
        logger.log(level, "ignored %s for %r, for which no such transfer is open", report, request_id)


def _num_held(request: Request) -> int:
    """Tokens whose KV a request holds when its next token is computed. The last of an answer needs none."""
    return min(request.num_tokens + 1, request.num_prompt_tokens + request.max_tokens - 1)
