"""The examples work as documented, in engines started as users start them."""

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.cli.processes import Fleet, free_ports
from baton.connectors.registry import connector_class
from baton.core.config import CacheConfig, EngineConfig, KVTransferConfig
from baton.engine.api import SamplingParams
from baton.engine.llm import LLM
from baton.testing import cut_files
from baton.testing.contract.case import ConnectorCase
from baton.testing.contract.check import check_connector
from examples.kv_event_subscriber import Subscriber
from tests.system.engines import Engines, make_prompt, tokens_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "prefix_store"
TRANSFER = {
    "kv_connector": "PrefixStoreConnector",
    "kv_connector_module_path": "prefix_store",
    "kv_role": "kv_both",
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))


def test_the_example_is_short_enough_to_copy() -> None:
    source = (EXAMPLE / "prefix_store.py").read_text()
    assert len(source.splitlines()) <= 100
    assert max(len(line) for line in source.splitlines()) <= 110


def test_the_guide_quotes_the_example_with_background_loads() -> None:
    guide = (EXAMPLE.parents[1] / "docs" / "connectors.md").read_text()
    source = (EXAMPLE / "background_store.py").read_text()
    assert source.partition("\nclass ")[2] in guide


@pytest.mark.parametrize(
    "path", ["prefix_store:PrefixStoreConnector", "background_store:BackgroundStoreConnector"]
)
def test_the_examples_pass_the_conformance_kit(path: str, tmp_path: Path) -> None:
    broken = partial(cut_files, tmp_path)
    case = ConnectorCase(path=path, extra_config={"path": str(tmp_path)}, break_store=broken)
    check_connector(case, examples=4, seed=0).raise_if_broken()


def test_the_example_is_found_by_its_module_path() -> None:
    assert connector_class(KVTransferConfig(**TRANSFER)).__name__ == "PrefixStoreConnector"  # type: ignore[arg-type]


@pytest.mark.slow
def test_tokens_equal_a_single_engines_also_with_damaged_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", hidden=64, layers=2, heads=4, kv_heads=2, vocab=512)
    model = load_model_config(tmp_path / "model", max_model_len=256)

    def start(**fields: Any) -> LLM:
        config = EngineConfig(
            model_config=model, cache_config=CacheConfig(num_gpu_blocks=48, block_size=4), **fields
        )
        return LLM(config, "baton.assemble:connector_factory")

    store = tmp_path / "store"
    store.mkdir()
    transfer = KVTransferConfig(**TRANSFER, kv_connector_extra_config={"path": str(store)})  # type: ignore[arg-type]
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompts = [[(step * i) % 500 + 5 for i in range(40 + step)] for step in (3, 7, 11)]
    with start() as alone, start(kv_transfer_config=transfer) as a, start(kv_transfer_config=transfer) as b:
        expected = [completion.token_ids for completion in alone.generate(prompts, greedy)]
        for engine, num_hits in ((a, 0), (b, 3)):
            completions = engine.generate(prompts, greedy)
            assert [completion.token_ids for completion in completions] == expected
            assert sum(completion.num_transferred_tokens > 0 for completion in completions) == num_hits
            while engine.core.has_requests:
                engine.core.step()
        for path in store.iterdir():
            path.write_bytes(b"half a f")
        a.core.scheduler.reset_prefix_cache()
        assert [completion.token_ids for completion in a.generate(prompts, greedy)] == expected


@pytest.fixture
def engines(tmp_path: Path, forked_programs: None) -> Iterator[Engines]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLE), *sys.path])}
    with Fleet(tmp_path, env=environment) as fleet:
        engines = Engines(fleet)
        yield engines
        engines.close()


@pytest.mark.slow
@pytest.mark.processes
def test_both_examples_with_served_engines(engines: Engines, tmp_path: Path) -> None:
    model, store = tmp_path / "model", tmp_path / "store"
    store.mkdir()
    write_checkpoint(model, hidden=64, layers=2, heads=4, kv_heads=2, vocab=512)
    transfer = {**TRANSFER, "kv_connector_extra_config": {"path": str(store)}}
    events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    publishes = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay}
    options = {"b": ["--kv-events-config", json.dumps(publishes)]}
    a, b = engines.start(("a", model, transfer), ("b", model, transfer), options=options)
    prompt = make_prompt(1, 100)
    first = tokens_of(a.complete(prompt))
    deadline = len(prompt)
    while not list(store.glob("*.0")) and deadline:
        a.complete(make_prompt(deadline, 3))
        deadline -= 1
    second = b.complete(prompt)
    assert tokens_of(second) == first
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 96

    subscriber = Subscriber(events, replay)  # The subscriber missed all events so far and asks for a replay.
    while not subscriber.receive(50):
        b.complete(prompt, max_tokens=20)
        prompt = [*prompt, 7]
    assert len(subscriber.view.blocks) >= 96 // 16
    subscriber.close()
