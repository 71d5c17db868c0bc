"""Slots of host memory lent to other engines: what arrives, what stays pinned, and when it is free again."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.connectors.multi import MultiSchedulerHalf
from baton.connectors.pull import EngineIdentity, PullSchedulerHalf
from baton.connectors.storage.memory.identity import LenderIdentity, OffloadIdentity
from baton.connectors.storage.memory.lending import SlotLender
from baton.core.config import EngineConfig, ModelConfig
from baton.core.errors import BadTransferParams, ConfigError
from baton.core.hashing import BlockHash
from baton.core.ids import Epoch
from baton.engine.core.engine_core import EngineCore
from baton.engine.llm import Completion
from baton.stores.host.slots import Entry, SlotIndex
from baton.stores.policies.eviction import make_policy
from tests.connectors import engine_world, offload_world, storage_world
from tests.connectors.engine_world import ONE_TOKEN, PATIENT, ModelOf, core_in, hands_over, multi, prompt_of
from tests.connectors.offload_world import PATIENCE_S
from tests.connectors.pull_world import BLOCK, Engine, FakeRequest, Station, World

NUM_SLOTS = 8
STORED: Any = {"baton_lend_stored": True}


class Host(Engine):
    """An engine of which there are only the slots: its cache has a block for each of them."""

    def make_half(self, config: EngineConfig, url: str, epoch: Epoch) -> PullSchedulerHalf:
        self.index: SlotIndex[BlockHash] = SlotIndex(NUM_SLOTS, make_policy("lru", NUM_SLOTS))

        def make(identity: EngineIdentity) -> PullSchedulerHalf:
            return PullSchedulerHalf(
                identity,
                epoch=epoch,
                clock=lambda: self.world.now,
                control=lambda agent, lock: Station(self.world, url, agent),
            )

        identity = LenderIdentity.of_engine(config)
        self.lender = SlotLender(identity, self.index, make)
        return self.lender.half

    def store(self, tokens: list[int]) -> None:
        """Stores as many of the prompt's chunks as find a slot."""
        keys = keys_of(tokens)
        for number, key in enumerate(keys):
            if key in self.index:
                continue
            reserved = self.index.reserve(key, set(keys))
            if reserved is None:
                return
            first, end = number * BLOCK, (number + 1) * BLOCK
            self.ranks.write(([reserved.entry.slot] * (number + 1),), first, self.kv_of(tokens[:end])[first:])
            self.index.end_store(reserved.entry, ok=True)

    def lend(self, request_id: str, tokens: list[int]) -> tuple[int, dict[str, Any]] | None:
        def rows_of(entry: Entry[BlockHash]) -> list[int]:
            return [entry.slot]

        return self.lender.lend(FakeRequest(request_id, tokens), keys_of(tokens), rows_of, BLOCK)  # type: ignore[arg-type]

    def assert_whole(self) -> None:
        super().assert_whole()
        assert not self.lender._lent
        assert not any(entry.num_pins for entry in self.index._entries.values())
        self.index.assert_consistent()


def keys_of(tokens: list[int]) -> list[BlockHash]:
    return [BlockHash(repr(tokens[:end]).encode()) for end in range(BLOCK, len(tokens) + 1, BLOCK)]


def tokens_of(number: int, num_tokens: int) -> list[int]:
    return [number, *((7 * i + number) % 97 for i in range(num_tokens - 1))]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def host_in(world: World, share_max: float = 0.5) -> Host:
    world.engine_kind = Host
    host = world.engine("a", role="kv_producer", num_blocks=NUM_SLOTS)
    world.engine_kind = Engine
    assert isinstance(host, Host)
    host.lender.num_slots_max = int(share_max * NUM_SLOTS)
    return host


@pytest.mark.parametrize("num_tokens", [3 * BLOCK, 3 * BLOCK + 1, 4 * BLOCK - 1])
def test_the_whole_chunks_of_a_prompt_arrive_and_their_slots_are_released(
    world: World, num_tokens: int
) -> None:
    a, d = host_in(world), world.engine("d")
    tokens = tokens_of(1, num_tokens)
    a.store(tokens)
    lent = a.lend("r", tokens)
    assert lent is not None
    assert lent[0] == 3 * BLOCK
    request = d.fetch("r", tokens, lent[1])
    world.settle()
    outcome = d.read_out(request)
    assert outcome.valid_tokens == 3 * BLOCK
    assert d.holds(tokens, outcome.block_ids, blocks=range(3))
    world.assert_settles_whole()


def test_what_is_not_stored_is_not_lent(world: World) -> None:
    a = host_in(world)
    a.store(tokens_of(1, 2 * BLOCK))
    assert a.lend("r", tokens_of(2, 2 * BLOCK)) is None
    assert a.lend("s", tokens_of(1, BLOCK - 1)) is None
    world.assert_settles_whole()


def test_a_loan_of_another_prompt_is_refused(world: World) -> None:
    a, d = host_in(world), world.engine("d", policy="fail")
    a.store(tokens_of(1, 2 * BLOCK))
    lent = a.lend("r", tokens_of(1, 2 * BLOCK))
    assert lent is not None
    with pytest.raises(BadTransferParams, match="another prompt"):
        d.submit("r", tokens_of(2, 2 * BLOCK), lent[1])
    world.pass_time(31)
    world.assert_settles_whole()


def test_at_most_a_share_of_the_slots_is_lent_and_a_shared_slot_counts_once(world: World) -> None:
    a = host_in(world)
    first, second = tokens_of(1, 6 * BLOCK), tokens_of(2, 2 * BLOCK)
    a.store(first)
    a.store(second)
    for name in ("r", "s"):
        lent = a.lend(name, first)
        assert lent is not None
        assert lent[0] == NUM_SLOTS // 2 * BLOCK
    assert a.lend("t", second) is None
    world.pass_time(31)  # No engine has claimed them.
    assert a.lend("u", second) is not None
    world.pass_time(31)
    world.assert_settles_whole()


def test_a_loan_that_is_taken_back_or_expired_frees_the_slots_and_a_late_consumer_computes(
    world: World,
) -> None:
    for ends_by_time in (False, True):
        a, d = host_in(world), world.engine("d")
        tokens = tokens_of(1, 3 * BLOCK)
        a.store(tokens)
        lent = a.lend("r", tokens)
        assert lent is not None
        if ends_by_time:
            world.pass_time(31)
        else:
            a.half.take_back(lent[1])
        a.assert_whole()
        a.store(tokens_of(2, NUM_SLOTS * BLOCK))  # Another prompt takes the slots.
        request = d.fetch("r", tokens, lent[1])
        world.settle()
        assert d.read_out(request).valid_tokens == 0
        world.assert_settles_whole()
        a.kill()


def test_nothing_is_lent_while_the_engine_drains(world: World) -> None:
    a = host_in(world)
    a.store(tokens_of(1, 2 * BLOCK))
    a.half.drain(1.0)
    assert a.lend("r", tokens_of(1, 2 * BLOCK)) is None
    world.assert_settles_whole()


STEPS = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 5), st.integers(1, 4)),
    st.tuples(st.just("lend"), st.integers(0, 5), st.integers(1, 4)),
    st.tuples(st.just("fetch"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("pass"), st.sampled_from([1, 20]), st.just(0)),
    st.tuples(st.just("forget"), st.integers(0, 5), st.just(0)),
)


@settings(max_examples=25)
@given(steps=st.lists(STEPS, min_size=5, max_size=25))
def test_a_lent_slot_keeps_its_content_and_is_free_after_the_loan(steps: list[Any]) -> None:
    world = World()
    a, d = host_in(world, share_max=1.0), world.engine("d", num_blocks=64)
    words = a.ranks.memories[0].words
    open_params: list[tuple[list[int], dict[str, Any]]] = []
    contents: dict[Any, list[tuple[int, bytes]]] = {}
    for number, (what, first, second) in enumerate(steps):
        if what == "store":
            a.store(tokens_of(first, second * BLOCK))
        elif what == "lend":
            tokens = tokens_of(first, second * BLOCK)
            if (lent := a.lend(f"r{number}", tokens)) is not None:
                open_params.append((tokens, lent[1]))
        elif what == "fetch" and open_params:
            tokens, params = open_params.pop(first % len(open_params))
            request = d.fetch(f"d{number}", tokens, params)
            if second:
                world.settle()
                outcome = d.read_out(request)
                assert d.holds(tokens, outcome.block_ids, blocks=range(outcome.valid_tokens // BLOCK))
        elif what == "pass":
            world.pass_time(first)
        elif what == "forget":
            for key in keys_of(tokens_of(first, 4 * BLOCK)):
                if a.index.is_ready(key):
                    a.index.forget(a.index._entries[key])
        for loan_id, entries in a.lender._lent.items():
            held = contents.setdefault(loan_id, [(e.slot, words[e.slot].tobytes()) for e in entries])
            assert all(words[slot].tobytes() == content for slot, content in held)
    world.pass_time(181)
    a.assert_whole()
    world.close()


@pytest.mark.parametrize(
    ("lend", "why"),
    [
        ({"nothing": 1}, "lend: .*nothing: is not known"),
        ({"share_max": 0}, "share_max"),
        ({"host": "0.0.0.0"}, "advertise_host"),
    ],
)
def test_wrong_settings_of_lending_are_refused_by_name(model: ModelConfig, lend: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        OffloadIdentity.of_engine(offload_world.config_of(model, extra={"lend": lend}))


def test_a_model_with_windows_does_not_lend(model_of: ModelOf) -> None:
    config = offload_world.config_of(model_of("gemma3"), extra={"lend": {}})
    with pytest.raises(ConfigError, match="without windows"):
        OffloadIdentity.of_engine(config)


# --- In engines ---------------------------------------------------------------------------------------


def lending(slots: int, model: ModelConfig, *, is_multi: bool, **lend: Any) -> dict[str, Any]:
    """Fields of the KVTransferConfig of an engine that lends its host memory. `is_multi`: it also fetches."""
    block_bytes = model.num_hidden_layers * model.num_kv_heads * BLOCK * model.token_bytes
    extra = {"cpu_gib": (slots + 0.5) * block_bytes / 2**30, "lend": {"timers": PATIENT, **lend}}
    offload = {"kv_connector": "BatonOffloadConnector", "kv_connector_extra_config": extra}
    pull = hands_over("", timers=PATIENT)
    assert pull is not None
    del pull["engine_id"]
    return multi(pull, offload) if is_multi else offload


class LendingEngine(offload_world.Engine):
    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self._woken = threading.Event()
        core.bind_wake(self._woken.set)

    @property
    def half(self) -> Any:
        half: Any = self.core._half
        if isinstance(half.scheduler_half, MultiSchedulerHalf):
            half = half.scheduler_half._children[1].half
        return half.scheduler_half

    def lend(self, prompt: list[int], **fields: Any) -> Completion:
        """Answered at once, however long the engine's steps take."""
        lent = self.add(f"r{len(self.completions)}", prompt, params=STORED, **fields)
        assert (lent.token_ids, lent.finish_reason, lent.error) == ([], "length", None)
        self.run()
        return lent

    def wait_released(self) -> None:
        """Steps when the connector wakes the engine, until no slot is lent."""
        while True:
            self._woken.clear()
            self.run()
            if not self.half._lender._lent:
                return
            assert self._woken.wait(PATIENCE_S), "a slot is still lent, or the engine was not woken"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize(("transport", "tp_size"), [("local", 1), ("tcp", 2)])
def test_an_engine_answers_with_the_tokens_of_one_that_computes_from_anothers_host_memory(
    model: ModelConfig, transport: str, tp_size: int
) -> None:
    prompt = prompt_of(50)
    with ExitStack() as stack:

        def start(name: str, tp_size: int = 1, *, is_multi: bool) -> LendingEngine:
            lends = lending(40, model, is_multi=is_multi, transports=[transport])
            transfer = {"engine_id": name, **lends}
            config = engine_world.config_of(model, transfer, tp_size=tp_size)
            return LendingEngine(core_in(stack, config))

        is_multi = tp_size == 1
        a, b = start("a", tp_size, is_multi=is_multi), start("b", is_multi=True)
        expected = a.tokens(prompt)
        a.forget()
        assert a.lend(prompt[1:]).kv_transfer_params is None
        assert a.lend(prompt, cache_salt="other").kv_transfer_params is None
        lent = a.lend([*prompt, 7]).kv_transfer_params
        assert lent is not None
        assert lent["remote_num_tokens"] == lent["baton_cached_tokens"] == 48  # Whole blocks.
        a.tokens(prompt_of(150, step=11))  # The prompt takes all slots that are not lent.
        answer = b.ask(prompt, params=lent)
        assert (answer.token_ids, answer.num_transferred_tokens) == (expected, 48)
        a.wait_released()
        a.assert_whole()
        if is_multi:  # And back: B has stored what it has fetched.
            b.forget()
            a.half.reset_cache()
            a.forget()
            back = a.ask(prompt, params=b.lend(prompt).kv_transfer_params)
            assert (back.token_ids, back.num_transferred_tokens) == (expected, 48)
            b.wait_released()
            b.assert_whole()
        assert a.counts["lent_tokens"] == (0 if is_multi else 48)  # A Multi's child counts them.


THROUGH_CACHE: Any = {"baton_lend_stored": True, "do_remote_decode": True}


@pytest.mark.slow
def test_what_an_engine_has_in_files_or_in_its_cache_is_lent_from_its_cache(
    model: ModelConfig, tmp_path: Path
) -> None:
    prompt = prompt_of(43)
    pull = hands_over("", timers=PATIENT)
    assert pull is not None
    del pull["engine_id"]
    storage = {
        "kv_connector": "BatonSharedStorageConnector",
        "kv_connector_extra_config": storage_world.settings_in(tmp_path),
    }
    with engine_world.engines(model) as start:
        a = start({**multi(pull, storage), "engine_id": "a"})
        b, c = (start({"engine_id": name, **pull}) for name in "bc")
        (nothing,) = a.generate([prompt], ONE_TOKEN, kv_transfer_params=[THROUGH_CACHE])
        assert (nothing.token_ids, nothing.kv_transfer_params) == ([], None)
        expected = storage_world.fill(a, tmp_path, prompt, 5)
        for d, is_cached in ((b, True), (c, False)):
            if not is_cached:
                engine_world.forget(a)
            (lent,) = a.generate([prompt], ONE_TOKEN, kv_transfer_params=[THROUGH_CACHE])
            assert (lent.token_ids, lent.finish_reason, lent.num_cached_tokens) == ([], "length", 40)
            assert lent.num_transferred_tokens == (0 if is_cached else 40)
            assert lent.kv_transfer_params is not None
            assert lent.kv_transfer_params["remote_num_tokens"] == 40
            (answer,) = d.generate(
                [prompt], storage_world.GREEDY, kv_transfer_params=[lent.kv_transfer_params]
            )
            assert (answer.token_ids, answer.num_transferred_tokens) == (expected, 40)
            a.settle(PATIENCE_S)
            d.settle(PATIENCE_S)
            a.core.scheduler.kv_cache.block_pool.assert_empty()
