"""Requests as ranks know them: from what steps tell, and the salt.

Real ranks have the salt in the block hashes that the scheduler gave them. The ids of blocks that a request of
a group with a window has freed stay in its tables: attention does not look there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.engine.step import SchedulerOutput


@dataclass(slots=True)
class Row:
    request_id: str
    tokens: list[int]
    tables: list[list[int]]  # Block ids, for each KV-cache group, from token 0 on.
    salt: str | None
    num_prompt: int
    num_computed: int


class Rows:
    def __init__(self, salts: Mapping[str, str | None], *, runs_ahead: bool = False) -> None:
        """`salts`: the salt of every request, by id.

        `runs_ahead`: the ranks run a step before the scheduler has the results of earlier ones, and it may
        discard their tokens.
        """
        self._salts = salts
        self._runs_ahead = runs_ahead
        self._by_id: dict[str, Row] = {}

    def __getitem__(self, request_id: str) -> Row:
        return self._by_id[request_id]

    def get(self, request_id: str) -> Row | None:
        return self._by_id.get(request_id)

    def take_over(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self._by_id.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self._by_id, "a request is new once"
            self._by_id[new.req_id] = Row(
                new.req_id,
                [*new.prompt_token_ids, *new.output_token_ids],
                [list(block_ids) for block_ids in new.block_ids],
                self._salts[new.req_id],
                len(new.prompt_token_ids),
                new.num_computed_tokens,
            )
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            row, new_blocks = self._by_id[request_id], cached.new_block_ids[index]
            row.num_computed = cached.num_computed_tokens[index]
            if request_id in cached.resumed_req_ids:
                assert new_blocks is not None
                row.tables = [list(block_ids) for block_ids in new_blocks]
                row.tokens = list(cached.all_token_ids[request_id])
            elif new_blocks is not None:
                for table, block_ids in zip(row.tables, new_blocks, strict=True):
                    table += block_ids
            num_known = row.num_prompt + cached.num_output_tokens[index]
            if self._runs_ahead:
                del row.tokens[num_known:]
            assert len(row.tokens) == num_known
