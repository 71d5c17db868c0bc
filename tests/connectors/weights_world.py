"""Updates of the weights while a world runs. The KV of a token depends on the weights that compute it."""

from collections.abc import Collection
from typing import Any

from baton.engine.api import EngineRequest
from tests.connectors.store_world import StoreWorld
from tests.engine_sched.world import kv_of, next_token

NAMES = [(None, None), (None, "a"), (None, "b"), ("w", None), ("w2", None)]  # "w": those of the start.


class ChangesWeights(StoreWorld):
    """Each token is checked when it comes, with the weights that its request has at that time."""

    half: Any

    def add(self, asked: EngineRequest) -> None:
        super().add(asked)
        self._use_current_weights(asked)

    def change_weights(
        self, weights: str | None = None, version: str | None = None, *, kept: Collection[str] = ()
    ) -> None:
        """Changes the weights as a host does between two steps. The host's own cache must be off.

        `kept`: running requests that go on with the KV that they have. All others compute theirs again.
        """
        for request in self.scheduler.queues.holders():
            if request.request_id not in kept:
                self.scheduler._rollback.restart(request)
        assert self.half.set_weights(weights, version) is True
        for request_id, asked in self.asked.items():
            if request_id not in kept:
                self._use_current_weights(asked)

    def _use_current_weights(self, asked: EngineRequest) -> None:
        current = self.half._identity.current.value
        for rank, _ in self._ranks:
            salt = rank.salts[asked.request_id] = f"{asked.cache_salt} {current.weights} {current.version}"
            if (row := rank.rows.get(asked.request_id)) is not None:
                row.salt = salt

    def step(self) -> None:
        before = {request_id: len(answer.token_ids) for request_id, answer in self.answers.items()}
        super().step()
        for request_id, answer in self.answers.items():
            salt = self._ranks[0][0].salts[request_id]
            for end in range(before[request_id], len(answer.token_ids)):
                known = [*self.asked[request_id].prompt_token_ids, *answer.token_ids[:end]]
                assert answer.token_ids[end] == next_token(kv_of(known, salt)[-1]), request_id

    def check_answers(self, on_failure: str) -> None:
        for answer in self.answers.values():
            assert answer.reason in ("length", "abort")

    def serve_again(self, name: str, asked: EngineRequest) -> int:
        """Returns the number of tokens that were loaded."""
        self.add(asked)
        self.run()
        last = self.answers[name].last
        assert last is not None
        return last.num_transferred_tokens
