"""Rules of a Multi connector: which child loads, which delays, and the effect of a child's errors.

`test_multi_random_worlds` draws loads, delayed frees and errors in a step of two children.
"""

from typing import Any

import pytest

from baton.connectors.multi import MultiSchedulerHalf, MultiStats, MultiWorkerHalf
from baton.connectors.multi.stats import OWN
from baton.contract import (
    BlockRemoved,
    ConnectorDead,
    KVConnectorKVEvents,
    KVConnectorOutput,
    KVConnectorTransferResults,
    NullSchedulerHalf,
    NullWorkerHalf,
    QuorumKVEvents,
)
from baton.contract.guard import STEP_ERRORS_MAX
from baton.core.errors import BadTransferParams, ConfigError
from baton.core.prefilled import PrefilledTokens
from baton.engine.step import SchedulerOutput
from tests.connectors.multi_world import MultiWorld, ScriptedScheduler, Step, request_of
from tests.connectors.pull_world import FakeBlocks

TABLE = FakeBlocks([10, 11, 12, 13, 14])
HEARD = [
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_expected_finished_count",
    "build_connector_worker_meta",
    "clear_connector_metadata",
]


def load(world: MultiWorld, request_id: str, child: str, *, is_async: bool = True, count: int = 8) -> None:
    world.schedulers[child].answers[request_id] = (count, is_async)
    request = request_of(request_id)
    assert world.half.get_num_new_matched_tokens(request, 4) == (count, is_async)
    world.half.update_state_after_alloc(request, TABLE, count)


def finish(world: MultiWorld, request_id: str, **at_end: Any) -> tuple[bool, dict[str, Any] | None]:
    for child, answer in at_end.items():
        world.schedulers[child].at_end[request_id] = answer
    return world.half.request_finished(request_of(request_id), [10])


def report(world: MultiWorld, child: str, *, ranks: tuple[int, ...] = (0, 1), **results: set[str]) -> None:
    for rank in ranks:
        world.workers[rank][child].results = KVConnectorTransferResults(
            results.get("sent", set()), results.get("received", set()), results.get("failed", set())
        )


# --- Loads --------------------------------------------------------------------------------------


def test_the_first_child_with_tokens_loads_and_the_others_see_the_blocks() -> None:
    world = MultiWorld(("a", "b", "c"))
    world.schedulers["c"].answers["r"] = (12, False)
    load(world, "r", "b")
    allocated = {name: half.allocated for name, half in world.schedulers.items()}
    assert allocated == {"a": [("r", 0)], "b": [("r", 8)], "c": [("r", 0)]}
    world.half.update_state_after_alloc(request_of("r"), TABLE, 0)
    assert world.schedulers["b"].allocated[-1] == ("r", 0), "scheduled after its load"


def test_only_the_loader_is_asked_about_its_load() -> None:
    class Loader(NullSchedulerHalf):
        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            return 4, True

        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
            assert num_external_tokens == 4

        def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
            return (1,)

        def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[str, int]:
            return {"DISK": num_external_tokens}

        def take_prefilled_tokens(self, request_id: str) -> PrefilledTokens | None:
            return PrefilledTokens((7,))

        def get_load_failure(self, request_id: str) -> str | None:
            return "gone"

    half = MultiSchedulerHalf([("null", NullSchedulerHalf()), ("loader", Loader())], block_tokens=4)
    request: Any = request_of("r")
    assert half.get_loaded_kv_cache_group_ids(request) == (0,)
    assert half.get_external_cache_hit_sources(request, 4) == {"external_unspecified": 4}
    half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, TABLE, 4)
    assert half.get_loaded_kv_cache_group_ids(request) == (1,)
    assert half.get_external_cache_hit_sources(request, 4) == {"DISK": 4}
    assert half.take_prefilled_tokens("r") == PrefilledTokens((7,))
    assert half.take_prefilled_tokens("another") is None
    assert half.get_load_failure("r") == "gone"
    assert half.get_load_failure("another") is None


def test_the_null_block_is_never_reported_as_bad() -> None:
    """Id 0 is the null block where there are several block tables; with one table it is a block."""
    for tables, invalid in (([[0, 11, 12], [0, 0, 22]], {11, 12, 22}), ([[0, 11, 12]], {0, 11, 12})):
        world = MultiWorld()
        world.schedulers["a"].answers["r"] = (12, False)
        world.half.get_num_new_matched_tokens(request_of("r"), 0)
        world.half.update_state_after_alloc(request_of("r"), FakeBlocks(*tables), 12)
        world.workers[0]["a"].raises = {"start_load_kv"}
        assert world.step().invalid == invalid


# --- Delayed frees - -----------------------------------------------------------------------------------


def test_params_are_merged_and_contradicting_ones_dropped_and_taken_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = MultiWorld()
    merged = finish(world, "m", a=(False, {"ticket": 1, "same": 0}), b=(False, {"folder": "f", "same": 0}))
    assert merged == (False, {"ticket": 1, "folder": "f", "same": 0})
    answer = finish(world, "r", a=(True, {"ticket": 1}), b=(True, {"ticket": 2, "more": 3}))
    assert answer == (True, {"ticket": 1})
    assert "ticket" in caplog.text
    assert world.schedulers["b"].taken_back == [{"ticket": 2, "more": 3}]
    assert world.schedulers["a"].taken_back == []
    world.schedulers["a"].adds = ({"r"}, set())
    world.schedulers["b"].adds = ({"r"}, set())
    assert world.step().sent == {"r"}, "its blocks must still be awaited"
    for other in range(STEP_ERRORS_MAX + 1):
        finish(world, f"r{other}", a=(False, {"ticket": 1}), b=(False, {"ticket": 2}))
        world.step()
    num_steps = {name: half.num_steps for name, half in world.schedulers.items()}
    assert num_steps["a"] == num_steps["b"], "a contradiction must not retire a child"


@pytest.mark.parametrize(
    ("num_tokens", "of_host", "of_stores", "expected", "loader"),
    [
        (17, 12, 16, 16, "stores"),
        (17, 16, 16, 16, "host"),
        (17, 16, None, 16, "host"),  # All blocks are there, so nothing waits for a lookup.
        (16, 12, 16, 12, "host"),  # The last token is computed in any case.
        (17, 12, None, None, ""),
        (17, 0, 4, 4, "stores"),
    ],
)
def test_the_child_with_the_most_blocks_loads_if_that_is_preferred(
    num_tokens: int, of_host: int, of_stores: int | None, expected: int | None, loader: str
) -> None:
    children = {"host": ScriptedScheduler("host"), "stores": ScriptedScheduler("stores")}
    for name, answer in (("host", of_host), ("stores", of_stores)):
        children[name].answers["r"] = (answer, bool(answer))
    half = MultiSchedulerHalf(list(children.items()), block_tokens=4, prefers_longest=True)
    request = request_of("r", num_tokens)
    assert half.get_num_new_matched_tokens(request, 0) == (expected, bool(expected))
    if expected:
        half.update_state_after_alloc(request, TABLE, expected)
        assert [name for name in children if children[name].allocated == [("r", expected)]] == [loader]


# --- A child that raises ---------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [RuntimeError("no"), (18, True), (-1, False), (None, False)], ids=str)
def test_a_child_that_fails_for_a_request_is_not_asked_again(bad: Any) -> None:
    """One that is undecided defers the request, and is asked again."""
    world = MultiWorld()
    world.schedulers["a"].answers["r"] = bad
    world.schedulers["b"].answers["r"] = (8, True)
    is_undecided = bad == (None, False)
    expected = bad if is_undecided else (8, True)
    assert world.half.get_num_new_matched_tokens(request_of("r"), 0) == expected
    world.schedulers["a"].answers["r"] = (12, True)
    assert world.half.get_num_new_matched_tokens(request_of("r"), 0) == (12 if is_undecided else 8, True)


def test_a_user_error_is_raised_after_all_children_were_called() -> None:
    world = MultiWorld()
    world.schedulers["a"].answers["r"] = BadTransferParams("is expired")
    with pytest.raises(BadTransferParams, match="is expired"):
        world.half.get_num_new_matched_tokens(request_of("r"), 0)
    world.schedulers["a"].at_alloc["s"] = BadTransferParams("is expired")
    with pytest.raises(BadTransferParams, match="is expired"):
        world.half.update_state_after_alloc(request_of("s"), TABLE, 0)
    assert world.schedulers["b"].allocated == [("s", 0)]


def test_only_the_loaders_error_reaches_the_host() -> None:
    world = MultiWorld()
    world.schedulers["a"].at_alloc["r"] = RuntimeError("half-way")
    load(world, "s", "a")
    with pytest.raises(RuntimeError, match="half-way"):
        load(world, "r", "a")
    assert world.schedulers["b"].allocated == [("s", 0), ("r", 0)]
    world.schedulers["a"].answers["r"] = (0, False)
    load(world, "r", "b")  # An error of a does not affect b's load.
    report(world, "a", received={"s"})
    report(world, "b", received={"r"})
    assert world.step().received == {"r", "s"}


@pytest.mark.parametrize("method", HEARD)
def test_an_error_of_a_worker_half_does_not_affect_its_siblings(method: str) -> None:
    world = MultiWorld()
    load(world, "of-a", "a")
    load(world, "sync-of-a", "a", is_async=False)
    load(world, "of-b", "b")
    load(world, "sync-of-b", "b", is_async=False)
    world.workers[1]["a"].raises = {method}
    report(world, "b", received={"of-b"})
    step = world.step()
    for workers in world.workers:
        assert workers["b"].calls == HEARD
    assert step.received == {"of-b"}
    assert step.failed == set()
    is_load = method in HEARD[:4]
    assert step.abandoned == ({"of-a"} if is_load else set())
    loads_unsure = is_load or method == "get_block_ids_with_load_errors"
    assert step.invalid == ({11, 12} if loads_unsure else set()), "only a's synchronous load fails"
    report(world, "a", received={"of-a"})
    assert world.step().received == {"of-a"}, "its blocks are free again"


def test_without_its_bad_blocks_a_childs_loads_of_the_step_fail() -> None:
    world = MultiWorld()
    load(world, "of-a", "a")
    load(world, "of-b", "b")
    report(world, "a", received={"of-a"})
    report(world, "b", received={"of-b"})
    world.workers[0]["a"].raises = {"get_block_ids_with_load_errors"}
    world.workers[0]["b"].invalid = {13}
    step = world.step()
    assert (step.received, step.failed, step.invalid) == ({"of-a", "of-b"}, {"of-a"}, {13})


def retire_a(world: MultiWorld) -> set[str]:
    world.schedulers["a"].raises["update_connector_output"] = ConnectorDead("its thread")
    return world.step().abandoned


def test_a_dead_child_loses_only_its_own_loads() -> None:
    world = MultiWorld()
    load(world, "of-a", "a")
    load(world, "of-b", "b")
    finish(world, "lent", a=(True, None), b=(True, None))
    world.step()
    assert retire_a(world) == {"of-a"}
    num_steps = world.schedulers["a"].num_steps
    load(world, "later", "b")
    report(world, "b", received={"of-b", "later"}, sent={"lent"})
    step = world.step()
    assert step.received == {"of-b", "later"}
    assert step.sent == set(), "blocks that a lent may still be read"
    assert world.schedulers["a"].num_steps == num_steps
    world.schedulers["a"].answers["new"] = (8, True)
    assert world.half.get_num_new_matched_tokens(request_of("new"), 0) == (0, False)


@pytest.mark.parametrize("where", ["scheduler", "worker"])
def test_bad_steps_in_a_row_retire_a_child(where: str) -> None:
    world = MultiWorld()
    load(world, "r", "a")
    abandoned: list[set[str]] = []
    for step in range(2 * STEP_ERRORS_MAX):
        if step == STEP_ERRORS_MAX - 1:
            abandoned.append(world.step().abandoned)  # A step without errors.
        if where == "scheduler":
            world.schedulers["a"].raises["update_connector_output"] = KeyError("no")
        else:
            world.workers[1]["a"].raises = {"build_connector_worker_meta"}
        abandoned.append(world.step().abandoned)
    first = abandoned.index({"r"})
    assert first == 2 * STEP_ERRORS_MAX - 1
    assert world.workers[0]["b"].calls == HEARD * len(abandoned)


def test_without_children_the_connector_is_dead() -> None:
    world = MultiWorld()
    retire_a(world)
    world.schedulers["b"].raises["update_connector_output"] = ConnectorDead("its thread")
    world.step()
    with pytest.raises(ConnectorDead):
        world.step()


def test_invalid_request_ids_are_dropped() -> None:
    world = MultiWorld()
    finish(world, "r", b=(True, None))
    world.schedulers["a"].adds = ({7, None}, set())  # type: ignore[arg-type]
    world.schedulers["b"].adds = ({"r"}, set())
    assert world.step().sent == {"r"}


# --- Numbers, events, the start and the end --------------------------------------------------------


def test_errors_and_retirement_are_in_the_statistics() -> None:
    world = MultiWorld()
    world.schedulers["b"].answers["r"] = RuntimeError("no")
    world.half.get_num_new_matched_tokens(request_of("r"), 0)
    retire_a(world)
    stats = world.half.get_kv_connector_stats()
    assert stats is not None
    own = {"errors": {"a": 1, "b": 1}, "retired": {"a": True}}
    assert stats.to_dict() == {OWN: own}
    later = world.half.get_kv_connector_stats()
    assert later is not None
    assert later.to_dict() == {OWN: {"retired": {"a": True}}}


def test_events_reach_the_child_that_made_them() -> None:
    removed = BlockRemoved(block_hashes=[7])

    class Worker(NullWorkerHalf):
        def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
            events = QuorumKVEvents()
            events.add_events([removed])
            return events

    class Scheduler(NullSchedulerHalf):
        seen: KVConnectorKVEvents | None = None

        def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
            self.seen = connector_output.kv_cache_events

        def take_events(self) -> Any:
            assert self.seen is not None
            return self.seen.aggregate().get_all_events()

    half = MultiSchedulerHalf(
        [("null", NullSchedulerHalf()), ("events", Scheduler())], block_tokens=4, num_ranks=2
    )
    ranks = [MultiWorkerHalf([("null", NullWorkerHalf()), ("events", Worker())], rank=i) for i in range(2)]
    scheduler_output: Any = None
    metadata = half.build_connector_meta(scheduler_output)
    reports = []
    for rank in ranks:
        rank.bind_connector_metadata(metadata)
        assert rank.get_kv_connector_kv_cache_events() is None
        reports.append(rank.build_connector_worker_meta())
        rank.clear_connector_metadata()
    assert reports[0] is not None
    assert reports[1] is not None
    half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=reports[0].aggregate(reports[1])))
    assert half.take_events() == [removed]


def test_each_childs_reports_are_counted_separately() -> None:
    class OneRank(ScriptedScheduler):
        def get_finished_count(self) -> int | None:
            return 1

    world = MultiWorld(kinds={"a": ScriptedScheduler, "b": OneRank})
    load(world, "of-a", "a")
    load(world, "of-b", "b")
    finish(world, "lent", a=(True, None), b=(True, None))
    report(world, "a", ranks=(1,), received={"of-a"}, sent={"lent"})
    report(world, "b", ranks=(1,), received={"of-b"}, failed={"of-b"}, sent={"lent"})
    step = world.step()
    assert (step.received, step.failed, step.sent) == ({"of-b"}, {"of-b"}, set())
    report(world, "a", ranks=(0,), received={"of-a"}, sent={"lent"})
    step = world.step()
    assert (step.received, step.failed, step.sent) == ({"of-a"}, set(), {"lent"})


def test_a_rank_changes_the_count_of_its_own_child_only() -> None:
    world = MultiWorld()
    load(world, "of-a", "a")
    load(world, "of-b", "b")
    load(world, "later-of-b", "b")
    finish(world, "lent", b=(True, None))
    report(world, "a", ranks=(0,), received={"of-a"})
    report(world, "b", ranks=(0,), received={"of-b"}, failed={"of-b"}, sent={"lent"})
    assert world.step() == Step()
    world.workers[1]["b"].expected = 1
    # Ids with one report are emitted at once, without reports of another step.
    assert world.step() == Step(received={"of-b"}, failed={"of-b"}, sent={"lent"})
    assert [o.expected_finished_count for o in world.schedulers["b"].outputs] == [0, 1]
    assert [o.expected_finished_count for o in world.schedulers["a"].outputs] == [0, 0]
    report(world, "b", ranks=(1,), received={"later-of-b"})
    assert world.step() == Step(received={"later-of-b"})
    report(world, "a", ranks=(1,), received={"of-a"})
    assert world.step() == Step(received={"of-a"})


def test_a_reused_request_id_waits_for_all_ranks() -> None:
    world = MultiWorld()
    load(world, "r", "a")
    report(world, "a", ranks=(0,), received={"r"}, failed={"r"})
    assert world.step() == Step()
    world.schedulers["a"].adds = (set(), {"r"})
    assert world.step().received == {"r"}, "the scheduler half reported it"
    world.step()
    load(world, "r", "a")
    report(world, "a", ranks=(1,), received={"r"})
    assert world.step() == Step()
    report(world, "a", ranks=(0,), received={"r"})
    assert world.step() == Step(received={"r"})


def test_only_one_child_may_provide_memory() -> None:
    class Pool(NullWorkerHalf):
        def get_mem_pool_context(self) -> Any:
            return pytest.MonkeyPatch.context()

    with pytest.raises(ConfigError, match="one and two both"):
        MultiWorkerHalf([("one", Pool()), ("two", Pool())]).get_mem_pool_context()
    assert MultiWorkerHalf([("one", Pool()), ("two", NullWorkerHalf())]).get_mem_pool_context() is not None


class Eager(NullSchedulerHalf):
    """Gives its rank orders between steps, if it may."""

    rank: Any = None

    def bind_only_rank(self, rank: Any) -> None:
        self.rank = rank


class Fencing(NullWorkerHalf):
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        return


def test_no_rank_is_bound_if_a_sibling_fences() -> None:
    def bound(*workers: Any) -> list[bool]:
        eager = [Eager() for _ in workers]
        names = [str(index) for index in range(len(workers))]
        multi = MultiSchedulerHalf(list(zip(names, eager, strict=True)), block_tokens=4)
        multi.bind_only_rank(MultiWorkerHalf(list(zip(names, workers, strict=True)), rank=0))
        return [half.rank is worker for half, worker in zip(eager, workers, strict=True)]

    assert bound(NullWorkerHalf(), NullWorkerHalf()) == [True, True]
    assert bound(NullWorkerHalf(), Fencing()) == [False, True]  # A child's own fence does not matter.
    assert bound(Fencing(), Fencing()) == [False, False]


class Curious(NullWorkerHalf):
    def __init__(self, *layers: int) -> None:
        self.layers = layers
        self.saved: list[str] = []

    @property
    def hidden_states_wanted(self) -> tuple[int, ...]:
        return self.layers

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.saved.append(layer_name)


def test_hidden_states_go_only_to_children_that_want_them() -> None:
    none, both, last = Curious(), Curious(0, 2), Curious(2)
    schedulers = [(name, NullSchedulerHalf()) for name in "abc"]
    multi = MultiSchedulerHalf(schedulers, block_tokens=4)
    rank = MultiWorkerHalf([("a", none), ("b", both), ("c", last)])
    assert rank.hidden_states_wanted == (0, 2)
    rank.bind_connector_metadata(multi.build_connector_meta(SchedulerOutput()))
    for name in ("hidden_states.0", "model.layers.0", "hidden_states.2"):
        rank.save_kv_layer(name, None, None)  # type: ignore[arg-type]
    assert none.saved == ["model.layers.0"]
    assert both.saved == ["hidden_states.0", "model.layers.0", "hidden_states.2"]
    assert last.saved == ["model.layers.0", "hidden_states.2"]


def test_shutdown_reaches_every_child_and_then_raises() -> None:
    ended: list[str] = []

    class Scheduler(NullSchedulerHalf):
        def __init__(self, name: str) -> None:
            self.name = name

        def shutdown(self) -> None:
            ended.append(self.name)
            raise RuntimeError(self.name)

    half = MultiSchedulerHalf([(n, Scheduler(n)) for n in "ab"], block_tokens=4)
    with pytest.raises(RuntimeError, match="a"):
        half.shutdown()
    assert ended == ["a", "b"]


def test_statistics_are_kept_apart_and_rebuilt_by_name() -> None:
    from baton.connectors.multi import BatonMultiConnector
    from baton.connectors.pull.stats import PullStats

    def stats(num_loans: int) -> MultiStats:
        pull = PullStats()
        pull.data["num_loans"] = num_loans
        whole = MultiStats()
        whole.add("BatonPullConnector", pull)
        whole.count("Mine", num_errors=1, is_retired=False)
        return whole

    data = stats(2).aggregate(stats(3)).to_dict()
    assert data["BatonPullConnector"]["num_loans"] == 5
    assert data[OWN] == {"errors": {"Mine": 2}}
    rebuilt = BatonMultiConnector.build_kv_connector_stats({**data, "NoSuch": {}})
    assert rebuilt is not None
    assert rebuilt.to_dict() == data
    figures = rebuilt.reduce()
    assert (figures["BatonPullConnector loans"], figures["Mine errors"]) == (5, 2)
