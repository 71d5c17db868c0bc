"""One engine in memory: the real scheduler, steps in flight, and the answers of its requests.

    add_request --> | schedule -> begin ... finish -> update_from_output | --> answers

Subclasses add what runs a step, their clocks, wires and faults.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from baton.contract import KVConnectorSchedulerHalf
from baton.core.config import EngineConfig
from baton.engine.api import EngineOutput, EngineOutputs, EngineRequest
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.step import ModelRunnerOutput, SchedulerOutput
from baton.testing.host.ranks import Ranks
from baton.testing.host.workers import WorkerSteps

STEPS_MAX = 3000  # Steps until an engine is at rest.


@dataclass(slots=True)
class Answer:
    asked: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    last: EngineOutput | None = None

    @property
    def reason(self) -> str | None:
        return self.last.finish_reason if self.last is not None else None

    def take(self, output: EngineOutput) -> None:
        assert self.last is None, f"{output.request_id} ended twice"
        self.token_ids += output.new_token_ids
        if output.finish_reason is not None:
            self.last = output


class Engine:
    """`ranks` and `worker_steps` run each step when its result is taken, as late as possible."""

    ranks: Ranks
    worker_steps: WorkerSteps

    def __init__(
        self,
        config: EngineConfig,
        half: KVConnectorSchedulerHalf,
        salts: dict[str, str | None],
        *,
        depth: int = 1,
    ) -> None:
        """`salts`: filled with the salt of every request, by id.

        `depth`: the most steps in flight, including the one whose result is awaited.
        """
        self.config = config
        self.depth = depth
        self._salts = salts
        self.scheduler = Scheduler(config, half)
        self.answers: dict[str, Answer] = {}
        self.in_flight: deque[tuple[SchedulerOutput, Any]] = deque()  # Steps, and what `begin` returned.

    def add_request(self, asked: EngineRequest) -> None:
        """Raises UserError, without any effect, if the request can never run."""
        self._salts[asked.request_id] = asked.cache_salt
        ended = self.scheduler.add_request(asked)
        self.answers[asked.request_id] = Answer(asked)
        if ended is not None:
            self.take(ended)

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.in_flight.append((output, self.begin(output)))
        return output

    def begin(self, output: SchedulerOutput) -> Any:
        """Begin a step. The answer is passed to `finish`."""

    def finish(self, output: SchedulerOutput, begun: Any) -> ModelRunnerOutput:
        """Return the result of a step."""
        self.ranks.take_over(output)
        self.worker_steps.begin(output)
        self.show_layers(output)
        result = self.ranks.execute(output)
        result.kv_connector_output = self.worker_steps.end()
        return result

    def show_layers(self, output: SchedulerOutput) -> None:
        """Call the halves' hooks of the layers of a step."""
        self.worker_steps.show_layers()

    def finish_oldest(self) -> EngineOutputs:
        output, begun = self.in_flight.popleft()
        outputs = self.scheduler.update_from_output(output, self.finish(output, begun))
        for piece in outputs.outputs:
            self.take(piece)
        return outputs

    def take(self, output: EngineOutput) -> None:
        self.answers[output.request_id].take(output)

    def step(self) -> SchedulerOutput:
        """Run the next step, and take results until fewer than `depth` steps are in flight."""
        output = self.schedule()
        while len(self.in_flight) >= self.depth:
            self.finish_oldest()
        return output

    def step_if_useful(self) -> None:
        """Like the engine core: no step without tokens while others are in flight."""
        if self.in_flight and not self.scheduler.has_idle_requests():
            self.finish_oldest()
        else:
            self.step()

    @property
    def is_at_rest(self) -> bool:
        return not self.in_flight and not self.scheduler.has_requests()

    def run(self) -> None:
        """Step until no work is left."""
        for _ in range(STEPS_MAX):
            if self.is_at_rest:
                return
            self.step_if_useful()
        raise AssertionError(f"still not at rest after {STEPS_MAX} steps: {self.scheduler.requests}")
