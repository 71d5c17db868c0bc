"""Combined reports: the same for any interleaving of ranks and steps, and each id once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Annotated, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.connectors.pull.stats import PullStats
from baton.contract import (
    AllRanks,
    AnyRank,
    BlockStored,
    EveryRank,
    FailedOf,
    KVConnectorOutput,
    KVConnectorWorkerMetadata,
    KVOutputAggregator,
    Max,
    NullSchedulerHalf,
    QuorumKVEvents,
    RankCombiner,
    RankReport,
    Sum,
)

IDS = [f"r{i}" for i in range(6)]


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, dict[str, list[int]], list[set[str]]]:
    """(number of ranks, step in which each rank reports each id, ids that each rank reports as failed)."""
    num_ranks = draw(st.integers(1, 4))
    steps = draw(
        st.fixed_dictionaries(
            {}, optional={i: st.lists(st.integers(0, 7), min_size=num_ranks, max_size=num_ranks) for i in IDS}
        )
    )
    failed = draw(st.lists(st.sets(st.sampled_from(IDS)), min_size=num_ranks, max_size=num_ranks))
    return num_ranks, steps, [ids & set(steps) for ids in failed]


@given(histories(), st.randoms(use_true_random=False))
def test_each_id_comes_out_once_when_the_last_rank_has_reported_it(
    history: tuple[int, dict[str, list[int]], list[set[str]]], order: random.Random
) -> None:
    num_ranks, steps, failed = history
    aggregator = KVOutputAggregator(num_ranks)
    received: dict[str, int] = {}
    failures: dict[str, int] = {}
    for step in range(8):
        outputs: list[KVConnectorOutput | None] = []
        for rank in range(num_ranks):
            ids = {i for i, at in steps.items() if at[rank] == step}
            outputs.append(
                KVConnectorOutput(finished_recving=ids, failed_recving=ids & failed[rank])
                if ids or order.random() < 0.5
                else None
            )
        output = aggregator.aggregate(outputs)
        for id_ in (output and output.finished_recving) or ():
            assert id_ not in received
            received[id_] = step
        for id_ in (output and output.failed_recving) or ():
            failures[id_] = step
    assert received == {i: max(at) for i, at in steps.items()}
    # If one rank fails, the combined result is a failure, emitted together with the end.
    assert failures == {i: received[i] for i in set().union(*failed)}


@given(histories(), st.randoms(use_true_random=False))
def test_the_order_of_ranks_does_not_matter(
    history: tuple[int, dict[str, list[int]], list[set[str]]], order: random.Random
) -> None:
    num_ranks, steps, failed = history
    renamed = list(range(num_ranks))
    order.shuffle(renamed)
    one, other = KVOutputAggregator(num_ranks), KVOutputAggregator(num_ranks)
    for step in range(8):
        ids = [{i for i, at in steps.items() if at[rank] == step} for rank in range(num_ranks)]
        outputs = [
            KVConnectorOutput(
                finished_sending=ids[rank], finished_recving=ids[rank], failed_recving=failed[rank]
            )
            for rank in range(num_ranks)
        ]
        assert one.aggregate(outputs) == other.aggregate([outputs[rank] for rank in renamed])


def test_a_repeated_report_of_a_rank_counts_once() -> None:
    aggregator = KVOutputAggregator(2)
    again = KVConnectorOutput(finished_sending={"r"})
    assert aggregator.aggregate([again, None]) is None
    assert aggregator.aggregate([again, None]) is None
    assert aggregator.aggregate([None, again]) == KVConnectorOutput(finished_sending={"r"})


def test_invalid_blocks_are_emitted_at_once() -> None:
    aggregator = KVOutputAggregator(2)
    output = aggregator.aggregate(
        [KVConnectorOutput(invalid_block_ids={1}), KVConnectorOutput(invalid_block_ids={2})]
    )
    assert output == KVConnectorOutput(invalid_block_ids={1, 2})


def test_no_reports_combine_to_none() -> None:
    aggregator = KVOutputAggregator(2)
    assert aggregator.aggregate([None, None]) is None
    assert aggregator.aggregate([KVConnectorOutput(), None]) is None


def test_more_reports_than_ranks_may_be_expected() -> None:
    aggregator = KVOutputAggregator(4, num_ranks=2)
    both = [KVConnectorOutput(finished_sending={"r"})] * 2
    assert aggregator.aggregate(both) is None
    assert aggregator.aggregate(both) == KVConnectorOutput(finished_sending={"r"})


def test_the_connector_says_how_many_reports_it_expects() -> None:
    class OneSpeaks(NullSchedulerHalf):
        def get_finished_count(self) -> int | None:
            return 1

    sent = KVConnectorOutput(finished_sending={"r"})
    assert KVOutputAggregator.from_connector(OneSpeaks(), 2).aggregate([None, sent]) == sent
    assert KVOutputAggregator.from_connector(NullSchedulerHalf(), 2).aggregate([None, sent]) is None


def test_events_of_ranks_need_a_quorum() -> None:
    stored = BlockStored(block_hashes=[1], parent_block_hash=None, token_ids=[1, 2], block_size=2)
    only_here = BlockStored(block_hashes=[2], parent_block_hash=1, token_ids=[3, 4], block_size=2)
    here, there = QuorumKVEvents(), QuorumKVEvents()
    here.add_events([stored, only_here])
    there.add_events([stored])
    aggregator = KVOutputAggregator(2)
    output = aggregator.aggregate(
        [KVConnectorOutput(kv_cache_events=here), KVConnectorOutput(kv_cache_events=there)]
    )
    assert output is not None
    assert output.kv_cache_events is not None
    assert output.kv_cache_events.get_number_of_workers() == 2
    assert output.kv_cache_events.aggregate().get_all_events() == [stored]


class Talk(KVConnectorWorkerMetadata):
    """Concatenated words; those of a rank that reports "unheard of" cannot be combined with others."""

    def __init__(self, *words: str) -> None:
        self.words = sorted(words)

    def aggregate(self, other: Self) -> Talk:
        if "unheard of" in (*self.words, *other.words):
            raise ValueError("what was that?")
        return Talk(*self.words, *other.words)


def loans(count: int) -> PullStats:
    stats = PullStats()
    stats.add(num_loans=count)
    return stats


def test_connector_metadata_is_combined_by_its_own_aggregate() -> None:
    output = KVOutputAggregator(3).aggregate(
        [
            KVConnectorOutput(kv_connector_worker_meta=Talk("a"), kv_connector_stats=loans(1)),
            KVConnectorOutput(kv_connector_worker_meta=Talk("b"), kv_connector_stats=loans(2)),
            KVConnectorOutput(kv_connector_worker_meta=Talk("c")),
        ]
    )
    assert output is not None
    assert isinstance(output.kv_connector_worker_meta, Talk)
    assert output.kv_connector_worker_meta.words == ["a", "b", "c"]
    assert output.kv_connector_stats == loans(3)


def test_only_a_field_that_cannot_be_combined_is_dropped() -> None:
    aggregator = KVOutputAggregator(2)
    garbled = [
        KVConnectorOutput(
            finished_sending={"r"},
            invalid_block_ids={rank},
            kv_connector_worker_meta=Talk(word),
            kv_connector_stats=loans(1),
        )
        for rank, word in enumerate(("a", "unheard of"))
    ]
    assert aggregator.aggregate(garbled) == KVConnectorOutput(
        finished_sending={"r"}, invalid_block_ids={0, 1}, kv_connector_stats=loans(2)
    )
    assert aggregator.error == "aggregate of kv_connector_worker_meta: ValueError: what was that?"
    clear = KVConnectorOutput(finished_sending={"s"}, kv_connector_worker_meta=Talk("a"))
    assert aggregator.aggregate([clear, clear]) is not None
    assert aggregator.error is None


# --- A connector's own report ------------------------------------------------------------------------


@dataclass(kw_only=True)
class Stored(RankReport):
    jobs: AllRanks[set[int]] = field(default_factory=set)
    failed: Annotated[set[int] | None, FailedOf("jobs")] = None
    touched: AnyRank[set[int] | None] = None
    nbytes: Sum[int | None] = None
    slowest_s: Max[float | None] = None
    is_healthy: EveryRank[bool | None] = None


def test_a_connectors_report_combines_by_the_same_rules() -> None:
    combiner = RankCombiner(Stored, 2)
    first = Stored(rank=0, jobs={1, 2}, touched={7}, nbytes=5, slowest_s=0.5, is_healthy=True)
    second = Stored(rank=1, jobs={1}, failed={1}, touched={8}, nbytes=6, slowest_s=0.25, is_healthy=False)
    combined = combiner.combine(first.aggregate(second).each_rank())
    assert combined.jobs == {1}
    assert combined.failed == {1}
    assert combined.touched == {7, 8}
    assert combined.nbytes == 11
    assert combined.slowest_s == 0.5
    assert combined.is_healthy is False
    assert combiner.combine(Stored(rank=1, jobs={2}).each_rank()).jobs == {2}


@given(st.permutations(range(4)))
def test_reports_are_gathered_in_any_order(order: list[int]) -> None:
    reports = [Stored(rank=rank, jobs={1}, nbytes=rank) for rank in order]
    gathered = reports[0].aggregate(reports[1]).aggregate(reports[2].aggregate(reports[3]))
    assert sorted(rank for rank, _ in gathered.each_rank()) == [0, 1, 2, 3]
    combined = RankCombiner(Stored, 4).combine(gathered.each_rank())
    assert (combined.jobs, combined.nbytes) == ({1}, 6)


def test_gathering_does_not_change_the_reports() -> None:
    first, second = Stored(rank=0, jobs={1}), Stored(rank=1, jobs={2})
    first.aggregate(second)
    assert (first, second) == (Stored(rank=0, jobs={1}), Stored(rank=1, jobs={2}))


def test_a_field_without_a_rule_is_refused() -> None:
    @dataclass(kw_only=True)
    class Careless(RankReport):
        count: int = 0

    with pytest.raises(TypeError, match=r"Careless\.count needs exactly one rule"):
        RankCombiner(Careless, 2)


def test_failures_of_no_field_are_refused() -> None:
    @dataclass(kw_only=True)
    class Lost(RankReport):
        failed: Annotated[set[int] | None, FailedOf("jobs")] = None

    with pytest.raises(TypeError, match="not an AllRanks field"):
        RankCombiner(Lost, 2)


# --- Requests that are gone --------------------------------------------------------------------------


def test_the_counts_of_a_request_are_dropped_with_it() -> None:
    aggregator = KVOutputAggregator(2)
    first = KVConnectorOutput(finished_recving={"gone", "held"}, failed_recving={"gone", "held"})
    assert aggregator.aggregate([first, None]) is None
    aggregator.forget_all_but({"held"})
    late = KVConnectorOutput(finished_recving={"gone", "held"})
    assert aggregator.aggregate([None, late]) == KVConnectorOutput(
        finished_recving={"held"}, failed_recving={"held"}
    )
    # A later request with the same id waits for both ranks, and has not failed.
    aggregator.forget_all_but(set())
    again = KVConnectorOutput(finished_recving={"gone"})
    assert aggregator.aggregate([again, None]) is None
    assert aggregator.aggregate([None, again]) == again


@given(histories(), st.sets(st.sampled_from(IDS)), st.integers(0, 7))
def test_forgetting_requests_does_not_affect_the_others(
    history: tuple[int, dict[str, list[int]], list[set[str]]], gone: set[str], gone_at: int
) -> None:
    num_ranks, steps, failed = history
    aggregator, undisturbed = KVOutputAggregator(num_ranks), KVOutputAggregator(num_ranks)
    for step in range(8):
        ids = [{i for i, at in steps.items() if at[rank] == step} for rank in range(num_ranks)]
        reports = [
            KVConnectorOutput(finished_recving=ids[rank], failed_recving=ids[rank] & failed[rank])
            for rank in range(num_ranks)
        ]
        without = [
            KVConnectorOutput(
                finished_recving=ids[rank] - gone, failed_recving=(ids[rank] & failed[rank]) - gone
            )
            for rank in range(num_ranks)
        ]
        reported, wanted = aggregator.aggregate(reports), undisturbed.aggregate(without)
        assert ((reported and reported.finished_recving) or set()) - gone == (
            (wanted and wanted.finished_recving) or set()
        )
        assert ((reported and reported.failed_recving) or set()) - gone == (
            (wanted and wanted.failed_recving) or set()
        )
        if step >= gone_at:
            aggregator.forget_all_but(set(IDS) - gone)


def test_a_changed_count_applies_to_ids_with_reports() -> None:
    aggregator = KVOutputAggregator(3)
    reported = KVConnectorOutput(finished_sending={"r"})
    assert aggregator.aggregate([reported, reported, None]) is None
    two_are_enough = KVConnectorOutput(expected_finished_count=2)
    assert not two_are_enough.is_empty(), "an empty report would not be sent"
    assert aggregator.aggregate([None, None, two_are_enough]) == KVConnectorOutput(
        finished_sending={"r"}, expected_finished_count=2
    )


def test_if_ranks_differ_the_last_ranks_count_is_used() -> None:
    aggregator = KVOutputAggregator(2)
    reported = [KVConnectorOutput(expected_finished_count=count) for count in (1, 2)]
    output = aggregator.aggregate(reported)
    assert output is not None
    assert output.expected_finished_count == 2
    assert aggregator.aggregate([KVConnectorOutput(finished_sending={"r"}), None]) is None


def test_an_increased_count_applies_to_waiting_ids() -> None:
    aggregator = KVOutputAggregator(2)
    reported = KVConnectorOutput(finished_recving={"r"})
    assert aggregator.aggregate([reported, None]) is None
    aggregator.aggregate([None, KVConnectorOutput(expected_finished_count=3)])
    assert aggregator.aggregate([None, reported]) is None
    assert aggregator.aggregate([None, reported]) == reported


def test_the_results_of_steps_share_no_objects() -> None:
    aggregator = KVOutputAggregator(1)
    report = KVConnectorOutput(finished_sending={"a"})
    first = aggregator.aggregate([report])
    assert first is not None
    assert first.finished_sending is not None
    first.finished_sending.add("of the scheduler half")
    first.invalid_block_ids.add(7)
    assert report == KVConnectorOutput(finished_sending={"a"})
    second = aggregator.aggregate([KVConnectorOutput(finished_sending={"b"})])
    assert second == KVConnectorOutput(finished_sending={"b"})
