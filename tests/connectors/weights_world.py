"""Updates of the weights while a world runs. The KV of a token depends on the weights that compute it."""

from collections.abc import Collection
from typing import Any

from baton.engine.api import EngineOutput, EngineRequest
from tests.connectors.store_world import StoreWorld

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
        for request_id, answer in self.answers.items():
            if request_id not in kept:
                self._use_current_weights(answer.asked)

    def _use_current_weights(self, asked: EngineRequest) -> None:
        current = self.half._identity.current.value
        salt = f"{asked.cache_salt} {current.weights} {current.version}"
        self.ranks.salts[asked.request_id] = salt
        if (row := self.ranks.rows.get(asked.request_id)) is not None:
            row.salt = salt

    def take(self, output: EngineOutput) -> None:
        answer = self.answers[output.request_id]
        salt = self.ranks.salts[output.request_id]
        for token_id in output.new_token_ids:
            known = [*answer.asked.prompt_token_ids, *answer.token_ids]
            assert token_id == next(self.ranks.model.tokens_after(known, salt)), output.request_id
        super().take(output)

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
