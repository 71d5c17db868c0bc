"""Combination of the ranks' answers by an executor."""

from typing import Self

from baton.contract import KVConnectorOutput, KVConnectorWorkerMetadata
from baton.contract.aggregator import KVOutputAggregator
from baton.engine.executor.answers import RankAnswers
from baton.engine.step import ModelRunnerOutput


class Alone(KVConnectorWorkerMetadata):
    def aggregate(self, other: Self) -> Self:
        raise ValueError("I am alone")


def combined(*of_ranks: ModelRunnerOutput, unsent: str | None = None) -> ModelRunnerOutput:
    answers = RankAnswers()
    answers.note_sent(unsent)
    output = answers.combine(of_ranks, KVOutputAggregator(len(of_ranks)))
    assert answers.take_sampled() == [[5]]
    assert answers.take_sampled() == []
    return output


def sampled(**fields: object) -> ModelRunnerOutput:
    return ModelRunnerOutput(req_ids=["a"], sampled_token_ids=[[5]], **fields)  # type: ignore[arg-type]


def test_a_load_that_one_rank_could_not_begin_has_failed() -> None:
    broken = ModelRunnerOutput(loads_failed=True, connector_error="start_load_kv: broken")
    output = combined(sampled(), ModelRunnerOutput(), broken)
    assert output.loads_failed
    assert output.connector_error == "start_load_kv: broken"
    assert output.sampled_token_ids == [[5]]
    assert not combined(sampled(), ModelRunnerOutput()).loads_failed


def test_the_first_error_is_reported() -> None:
    of_rank = ModelRunnerOutput(connector_error="wait_for_save: broken")
    assert combined(sampled(), of_rank, unsent="unsent").connector_error == "unsent"
    report = KVConnectorOutput(kv_connector_worker_meta=Alone())
    output = combined(sampled(kv_connector_output=report), ModelRunnerOutput(kv_connector_output=report))
    assert output.connector_error == "aggregate of kv_connector_worker_meta: ValueError: I am alone"
    assert output.kv_connector_output is None
    assert combined(sampled(), ModelRunnerOutput()).connector_error is None
