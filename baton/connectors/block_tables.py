"""Block tables of requests, updated from the changes that each step's output reports, and offered states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from baton.contract import host


class HasTables(Protocol):
    """A connector's record of a request."""

    tables: tuple[list[int], ...]
    """One for each KV-cache group. Blocks that have left a window since they were added remain listed."""


def follow_tables(
    output: host.SchedulerOutput, requests: Mapping[str, HasTables]
) -> Iterator[tuple[str, int]]:
    """Updates the tables of the step's requests. Yields (request id, tokens computed before the step).

    Requests that are not in `requests` are ignored. A yielded request has its tables for this step.
    """
    for new in output.scheduled_new_reqs:
        if (request := requests.get(new.req_id)) is not None:
            request.tables = tuple(list(table) for table in new.block_ids)
            yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    for request_id, block_ids, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if (request := requests.get(request_id)) is None:
            continue
        if request_id in cached.resumed_req_ids:
            request.tables = tuple(list(table) for table in block_ids or ())
        elif block_ids is not None:
            for table, added in zip(request.tables, block_ids, strict=True):
                table += added
        yield request_id, num_computed


def offered_states(output: host.SchedulerOutput, request_id: str) -> dict[int, dict[int, int]]:
    """{tokens: {group: block}}: recurrent states of a request that can be copied after the forward pass.

    Each is the state after exactly so many tokens; see `host.KVConnectorBlockState`.
    """
    offered: dict[int, dict[int, int]] = {}
    state = output.kv_connector_block_state
    if state is not None:
        for group, block, num_tokens in state.boundary_state_offloads.get(request_id, ()):
            offered.setdefault(num_tokens, {})[group] = block
    return offered
