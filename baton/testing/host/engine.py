"""One engine in memory: the real scheduler, steps in flight, and the answers of its requests.

    add --> | schedule -> begin ... finish -> update_from_output | --> answers

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
from baton.testing.host.workers import Workers

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
    """`ranks` and `workers` run each step when its result is taken, as late as possible."""

    ranks: Ranks
    workers: Workers

    def __init__(self, config: EngineConfig, half: KVConnectorSchedulerHalf) -> None:
        self.config = config
        self.scheduler = Scheduler(config, half)
        self.answers: dict[str, Answer] = {}
        self.in_flight: deque[tuple[SchedulerOutput, Any]] = deque()  # With what `begin` returned.

    def add(self, asked: EngineRequest) -> None:
        self.answers[asked.request_id] = Answer(asked)
        self.scheduler.add_request(asked)

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.in_flight.append((output, self.begin(output)))
        return output

    def begin(self, output: SchedulerOutput) -> Any:
        """Begin a step. The answer is passed to `finish`."""

    def finish(self, output: SchedulerOutput, begun: Any) -> ModelRunnerOutput:
        """Return the result of a step."""
        self.ranks.take_over(output)
        self.workers.begin(output)
        self.workers.show_layers()
        result = self.ranks.execute(output)
        result.kv_connector_output = self.workers.end()
        return result

    def finish_oldest(self) -> EngineOutputs:
        output, begun = self.in_flight.popleft()
        outputs = self.scheduler.update_from_output(output, self.finish(output, begun))
        for piece in outputs.outputs:
            self.take(piece)
        return outputs

    def take(self, output: EngineOutput) -> None:
        self.answers[output.request_id].take(output)

    def step(self) -> SchedulerOutput:
        output = self.schedule()
        self.finish_oldest()
        return output

    @property
    def is_at_rest(self) -> bool:
        return not self.in_flight and not self.scheduler.has_requests()

    def run(self) -> None:
        """Step until no work is left."""
        for _ in range(STEPS_MAX):
            if self.is_at_rest:
                return
            self.step()
        raise AssertionError(f"still not at rest after {STEPS_MAX} steps: {self.scheduler.requests}")
