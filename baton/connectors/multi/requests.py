"""Calls of a Multi connector to its children about one request, from its arrival to its end.

Every child gets every call. The ledger records which child loads the request and which keep its blocks. A
child that raises fails for this request only, and is not queried for matches of it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from baton.connectors.multi.child import Child
from baton.connectors.multi.ledger import Choice, Ledger
from baton.contract import KVConnectorSchedulerHalf, NullSchedulerHalf, host
from baton.core.errors import UserError
from baton.core.kv_groups import NULL_BLOCK_ID

logger = logging.getLogger(__name__)

Finished = tuple[bool, dict[str, Any] | None]
"""Result of `request_finished`."""


class RequestCalls:
    def __init__(
        self, children: Sequence[Child], ledger: Ledger, *, block_tokens: int, prefers_longest: bool
    ) -> None:
        """`prefers_longest`: the child with the most tokens loads, not the first that has some.

        The last token is computed in any case, and does not count. A child with all others does not wait for
        undecided children.
        """
        self._children = children
        self._ledger = ledger
        self._block_tokens = block_tokens
        self._prefers_longest = prefers_longest
        self._excluded: dict[str, set[int]] = {}  # Children that failed for a request; not queried.
        # Requests whose load started since `take_loads`.
        self._begun: list[list[str]] = [[] for _ in children]
        self._sync_blocks: list[set[int]] = [set() for _ in children]

    def announce(self, request: host.Request) -> None:
        self.call_all("on_new_request", lambda child: child.half.on_new_request(request), request.request_id)

    def find_match(self, request: host.Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Queries every child, so that none depends on its position. A child's UserError ends the request."""
        choice: Choice | None = None
        num_chosen = 0
        num_useful = (request.num_tokens - 1) // self._block_tokens * self._block_tokens - num_computed_tokens
        is_later = False
        for child in self._children:
            if child.position in self._excluded.get(request.request_id, ()):
                continue
            answer = child.find_tokens(request, num_computed_tokens)
            if answer is None:
                self._excluded.setdefault(request.request_id, set()).add(child.position)
                continue
            num_tokens, is_async = answer
            if num_tokens is None:
                is_later = True
            elif num_tokens and (
                choice is None or (self._prefers_longest and min(num_tokens, num_useful) > num_chosen)
            ):
                choice = Choice(child.position, num_computed_tokens, is_async)
                num_chosen = num_tokens
        if self._prefers_longest and choice is not None and num_chosen >= num_useful:
            is_later = False
        if is_later:
            choice = None
        self._ledger.match(request.request_id, choice)
        if is_later:
            return None, False
        return (0, False) if choice is None else (num_chosen, choice.is_async)

    def allocated(self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int) -> None:
        """Re-raises the error of the child that was to load, because its load may or may not have started."""
        choice = self._ledger.chosen(request.request_id) if num_external_tokens else None
        assert choice is not None or not num_external_tokens, "the host loads tokens that no child offered"
        if choice is not None:
            self._note_load(request, blocks, num_external_tokens, choice)
        failure: Exception | None = None

        def call(child: Child) -> None:
            nonlocal failure
            if choice is None or child.position != choice.position:
                child.half.update_state_after_alloc(request, blocks, 0)
                return
            try:
                child.half.update_state_after_alloc(request, blocks, num_external_tokens)
            except Exception as error:  # Contained, then re-raised: no other child loads it.
                failure = error
                self._forget_load(request.request_id, child.position)
                raise

        self.call_all("update_state_after_alloc", call, request.request_id)
        if failure is not None:
            raise failure

    def _note_load(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external: int, choice: Choice
    ) -> None:
        if choice.is_async:
            self._ledger.begin_load(request.request_id, choice.position)
            self._begun[choice.position].append(request.request_id)
            return
        first = choice.num_local_tokens // self._block_tokens
        last = -(-(choice.num_local_tokens + num_external) // self._block_tokens)
        groups = blocks.get_block_ids()
        for group in groups:
            self._sync_blocks[choice.position].update(group[first:last])
        if len(groups) > 1:
            self._sync_blocks[choice.position].discard(NULL_BLOCK_ID)

    def _forget_load(self, request_id: str, position: int) -> None:
        """The host ends the request and does not wait for the load."""
        if self._ledger.end_load(request_id, position):
            self._begun[position].remove(request_id)

    def chosen_half(self, request_id: str) -> KVConnectorSchedulerHalf:
        """Half of the child that was to load; a null half if there is none."""
        choice = self._ledger.chosen(request_id)
        return _NO_CHILD if choice is None else self._children[choice.position].half

    def finished(
        self, request: host.Request, finish: Callable[[KVConnectorSchedulerHalf], Finished]
    ) -> Finished:
        request_id = request.request_id
        self._excluded.pop(request_id, None)
        params: dict[str, Any] = {}
        delayed_by: set[int] = set()
        for child in self._children:
            is_delayed, of_child = child.contain(
                "request_finished", partial(finish, child.half), request_id=request_id
            )
            if is_delayed:
                delayed_by.add(child.position)
            if of_child:
                self._add_params(params, of_child, child, request_id)
        return self._ledger.finish(request_id, delayed_by), params or None

    def _add_params(
        self, params: dict[str, Any], of_child: Mapping[str, Any], child: Child, request_id: str
    ) -> None:
        """Adds a child's params. If they contradict an earlier child's, they are dropped and taken back."""
        clashes = sorted(key for key in of_child if key in params and params[key] != of_child[key])
        if not clashes:
            params.update(of_child)
            return
        logger.error(
            "the connector %s answers request %s with other kv_transfer_params than an earlier one (%s); "
            "its answer is dropped",
            child.name,
            request_id,
            ", ".join(clashes),
        )
        child.num_errors += 1
        with suppress(UserError):
            child.contain("take_back", partial(child.half.take_back, of_child))

    def take_loads(self, child: Child) -> tuple[list[str], set[int]]:
        """Requests whose load started since the last call, and blocks to load synchronously in the step."""
        begun, self._begun[child.position] = self._begun[child.position], []
        sync_blocks, self._sync_blocks[child.position] = self._sync_blocks[child.position], set()
        return begun, sync_blocks

    def call_all(self, method: str, call: Callable[[Child], None], request_id: str = "") -> None:
        """Calls every child; then raises the first UserError if there was one."""
        wrong: UserError | None = None
        for child in self._children:
            is_done = False
            try:
                is_done = child.succeeds(method, partial(call, child), request_id=request_id)
            except UserError as error:
                wrong = wrong or error
            if request_id and not is_done:
                self._excluded.setdefault(request_id, set()).add(child.position)
        if wrong is not None:
            raise wrong


_NO_CHILD = NullSchedulerHalf()
"""Answers for a load that no child has."""
