"""Baton's own connectors keep the contract, on the kit's ranks and on the engine's executors."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.connectors.registry import BUILT_IN
from baton.core.config import EngineConfig
from baton.engine.executor.ray_actors import RankActors
from baton.protocol.grouped_prompt import GroupedPrompt
from baton.testing.contract import ConnectorCase, check_connector
from baton.testing.contract.case import BESIDE, HEAD_DIM, INLINE, LATENT, STATE, Shape, engine_config
from baton.testing.contract.engine_site import EngineSite, ExecutorName
from baton.testing.contract.ours import in_engines, our_cases
from baton.testing.contract.site import ToySite
from tests.testing.enough import check_enough

PREFIX_STORE = "examples.prefix_store.prefix_store:PrefixStoreConnector"
KINDS = {"latents and index keys": LATENT, "scales inline": INLINE, "scales beside": BESIDE}


class OnlyWith(ToySite):
    """Models with such a layer, of those that the connector supports."""

    def __init__(self, kind: int, case: ConnectorCase) -> None:
        super().__init__(case)
        self.windows = tuple(windows for windows in self.windows if kind in windows)


def test_no_connector_is_left_out(tmp_path: Path) -> None:
    assert set(our_cases(tmp_path)) == set(BUILT_IN)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_it_keeps_the_contract(name: str, tmp_path: Path) -> None:
    check_enough(our_cases(tmp_path)[name], {"steps": 20, "sleeps": 0}, examples=6, tries=20)


# The tiered connector's children are among the others.
@pytest.mark.parametrize("caches", KINDS)
@pytest.mark.parametrize("name", sorted({*BUILT_IN} - {"BatonTieredConnector"}))
def test_it_keeps_the_contract_with_other_caches(name: str, caches: str, tmp_path: Path) -> None:
    """Caches of unlike widths in one layer, of which every rank has all, and bytes with their scales."""
    verdict = check_enough(
        our_cases(tmp_path)[name],
        {"steps": 20},
        examples=3,
        tries=5,
        make_site=lambda case: OnlyWith(KINDS[caches], case),
    )
    assert verdict.checked["wrong-bytes"] > 20
    assert verdict.seen[f"engines with {caches}"] == verdict.num_examples


@pytest.mark.parametrize("kind", [INLINE, BESIDE], ids=["inline", "beside"])
@pytest.mark.parametrize("name", ["BatonPullConnector", "BatonSharedStorageConnector"])
def test_scales_that_are_not_moved_are_noticed(name: str, kind: int, tmp_path: Path) -> None:
    class Hiding(OnlyWith):
        """The connector sees no scales."""

        def make_worker_half(self, config: EngineConfig, rank: int) -> Any:
            half = super().make_worker_half(config, rank)
            register = half.register_kv_caches

            def register_numbers(caches: dict[str, torch.Tensor]) -> None:
                numbers = {name: caches[name] for name in caches if "indexer" not in name}
                register({name: cache[..., : 2 * HEAD_DIM] for name, cache in numbers.items()})

            half.register_kv_caches = register_numbers
            return half

    case = replace(our_cases(tmp_path)[name], break_store=None)  # A broken store would break another rule.
    verdict = check_connector(case, examples=30, tries=5, make_site=lambda case: Hiding(kind, case))
    assert verdict.broken_rule == "wrong-bytes", verdict.broken


@pytest.mark.parametrize("name", ["BatonPullConnector", "BatonPushConnector"])
def test_states_that_are_not_read_are_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupedPrompt, "states", lambda prompt: ())
    case = our_cases(tmp_path)[name]
    verdict = check_connector(case, examples=100, tries=5, make_site=lambda case: OnlyWith(STATE, case))
    assert verdict.broken_rule == "wrong-bytes", verdict.broken


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize(
    ("name", "executor", "tp"),
    [
        ("BatonOffloadConnector", "inprocess", 1),
        ("BatonSharedStorageConnector", "inprocess", 1),
        ("BatonPullConnector", "inprocess", 1),
        pytest.param("BatonOffloadConnector", "multiprocess", 2, marks=pytest.mark.processes),
    ],
)
def test_it_keeps_the_contract_in_engines(name: str, executor: ExecutorName, tp: int, tmp_path: Path) -> None:
    transports = ("memory",) if executor == "inprocess" else ("local", "tcp")
    case = in_engines(our_cases(tmp_path, transports=transports)[name], tp=tp)
    verdict = check_connector(
        case,
        examples=0,
        tries=0,
        make_site=lambda case: EngineSite(case, executor),
    )
    verdict.raise_if_broken()
    assert verdict.checked["wrong-token"] > 20
    assert verdict.seen["loads in the background"] > 2
    assert verdict.seen["aborts while loading"] + verdict.seen["other aborts"] > 1


class KeptActors(RankActors):
    """Actors of several sites, which each close them."""

    def close(self) -> None:
        pass


class RaySite(EngineSite):
    def __init__(self, case: ConnectorCase, actors: KeptActors) -> None:
        super().__init__(case, "ray")
        assert self._actors is not None
        self._actors.close()
        self._actors = actors


@pytest.fixture(scope="module")
def kept_actors() -> Iterator[KeptActors]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    actors = KeptActors(engine_config(in_engines(ConnectorCase(path=PREFIX_STORE), tp=2), Shape()))
    yield actors
    RankActors.close(actors)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("path", "broken_rule", "examples"),
    [
        (PREFIX_STORE, None, 3),
        ("tests.testing.leaking:LeavesFilesAnywhere", "files-left", 6),
    ],
)
def test_leaks_of_a_connector_are_told_apart_from_those_of_ray(
    path: str,
    broken_rule: str | None,
    examples: int,
    tmp_path: Path,
    kept_actors: KeptActors,
) -> None:
    case = in_engines(ConnectorCase(path=path, extra_config={"path": str(tmp_path)}), tp=2)
    verdict = check_connector(
        case, examples=examples, tries=0, steps=2, make_site=lambda case: RaySite(case, kept_actors)
    )
    assert verdict.broken_rule == broken_rule, verdict.broken
    by_ranks = 2 * verdict.num_examples
    assert broken_rule or verdict.checked["files-left"] == by_ranks + 1, "and once over all examples"


@pytest.mark.processes
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize(
    ("path", "broken_rule", "expected_text"),
    [
        (PREFIX_STORE, None, ""),
        (
            "tests.testing.leaking:LeavesFilesInRanks",
            "files-left",
            "process of the rank, these files are still open",
        ),
        ("tests.testing.leaking:LeavesThreadsInRanks", "threads-left", "these threads still run: saver"),
        ("tests.testing.leaking:RaisesAtTheEndOfRanks", "shutdown-raised", "RuntimeError: is not open"),
        (
            "tests.testing.leaking:DiesAtTheEndOfRanks",
            "shutdown-raised",
            "rank 0 of engine ended before its half's shutdown had returned",
        ),
    ],
)
def test_leaks_in_the_process_of_a_rank_are_found(
    path: str, broken_rule: str | None, expected_text: str, tmp_path: Path
) -> None:
    case = in_engines(ConnectorCase(path=path, extra_config={"path": str(tmp_path)}), tp=1)
    verdict = check_connector(
        case, examples=0, tries=0, make_site=lambda case: EngineSite(case, "multiprocess")
    )
    assert verdict.broken_rule == broken_rule, verdict.broken
    assert expected_text in str(verdict.broken or "")
    assert broken_rule or verdict.checked["files-left"] == 1
