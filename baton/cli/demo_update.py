"""`baton demo --update-weights`: a rolling update of the weights of a running pair, and its rollback.

    stage                                P    D    prompts
    before                               one  one  handed over; answers of version one
    P gets two                           two  one  computed by D; answers of version one
    D gets two, while prompts are asked  two       each answer is wholly of one or of two
    after                                two  two  handed over; answers of version two
    P and D get one back                 one  one  handed over; answers of version one

A single engine of each version gives the expected answers.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from rich import box
from rich.table import Table

from baton.cli.asking import AskingError, ask
from baton.cli.demo_check import REQUEST_TIMEOUT_S, decode_counters
from baton.cli.demo_prompts import DemoPrompt, make_prompts, num_new_blocks
from baton.cli.processes import free_ports
from baton.cli.system import EngineArguments, EnginePlan, HandoffArguments, SystemPlan, plan_system

VERSIONS = ("one", "two")
NUM_PROMPTS = 6  # Prompts in each stage.
ROUTER_S = 60.0  # The router asks engines for their weights every few seconds.
LOOK_EVERY_S = 0.2
UPDATE_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    versions: tuple[str, ...]  # The weights whose answers are right.
    num_prompts: int
    num_equal: int  # Prompts answered as one of the versions answers.
    num_moved: int  # Prompts that were handed over.
    may_move: range  # Allowed values of `num_moved`.

    @property
    def is_good(self) -> bool:
        return self.num_equal == self.num_prompts > 0 and self.num_moved in self.may_move


def plan_update(arguments: EngineArguments, folders: Sequence[Path], handoff: HandoffArguments) -> SystemPlan:
    """Plan a pair of the first version, and a single engine of each. The folders have one parent."""
    one, two = folders
    root = ("--weights-root", str(one.parent.resolve()))
    plan = plan_system(
        replace(arguments, model=one, extra=(*arguments.extra, *root)),
        num_prefill=1,
        num_decode=1,
        num_single=1,
        handoff=handoff,
    )
    (port,) = free_ports(1)
    of_two = EnginePlan("single-1", port, replace(arguments, model=two), None)
    return replace(plan, single=(*plan.single, of_two))


class UpdateRun:
    """Runs the stages against started processes. Raises AskingError."""

    def __init__(
        self, plan: SystemPlan, folders: Sequence[Path], *, num_prompts: int, max_tokens: int, seed: int
    ) -> None:
        self._plan = plan
        self._folders = dict(zip(VERSIONS, folders, strict=True))
        self._num_prompts = min(num_prompts, NUM_PROMPTS)
        self._max_tokens = max_tokens
        self._seed = seed
        self._client = httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False)

    def run(self, *, vocab_size: int, longest: int) -> list[Stage]:
        (prefill,), (decode,) = self._plan.prefill, self._plan.decode
        draws = iter(range(self._seed, self._seed + 1000))

        def prompts() -> list[DemoPrompt]:
            return make_prompts(self._num_prompts, seed=next(draws), vocab_size=vocab_size, longest=longest)

        with self._client:
            stages = [self._stage("before: P one, D one", prompts(), "one", moves=True)]
            self._update(prefill, "two")
            self._wait_router(pairs_them=False)
            stages.append(self._stage("P two, D one", prompts(), "one", moves=False))
            with ThreadPoolExecutor(1) as other_thread:
                updating = other_thread.submit(self._update, decode, "two")
                during = [*prompts(), *prompts()]
                stages.append(self._stage("D gets two meanwhile", during, *VERSIONS, moves=None))
                updating.result()
            self._wait_router(pairs_them=True)
            stages.append(self._stage("after: P two, D two", prompts(), "two", moves=True))
            for engine, pairs_them in ((prefill, False), (decode, True)):
                self._update(engine, "one")
                self._wait_router(pairs_them=pairs_them)
            stages.append(self._stage("back: P one, D one", prompts(), "one", moves=True))
        return stages

    def _stage(self, name: str, prompts: Sequence[DemoPrompt], *versions: str, moves: bool | None) -> Stage:
        num_equal = num_moved = num_new = 0
        for index, prompt in enumerate(prompts):
            before = decode_counters(self._client, self._plan)
            got = self._ask(self._plan.router_url, prompt)
            num_moved += decode_counters(self._client, self._plan).moved_bytes > before.moved_bytes
            num_equal += any(got == self._expected(version, prompt) for version in versions)
            block_size = self._plan.decode[0].arguments.block_size
            assert block_size is not None
            num_new += num_new_blocks(prompts, index, block_size=block_size) > 0
        may_move = range(num_new if moves else 0, 1 if moves is False else len(prompts) + 1)
        return Stage(name, versions, len(prompts), num_equal, num_moved, may_move)

    def _expected(self, version: str, prompt: DemoPrompt) -> tuple[int, ...]:
        return self._ask(self._plan.single[VERSIONS.index(version)].url, prompt)

    def _ask(self, url: str, prompt: DemoPrompt) -> tuple[int, ...]:
        return ask(self._client, url, prompt.token_ids, max_tokens=self._max_tokens).token_ids

    def _update(self, engine: EnginePlan, version: str) -> None:
        answer = httpx.post(
            f"{engine.url}/update_weights",
            json={"folder": self._folders[version].name, "version": version, "mode": "wait"},
            timeout=UPDATE_TIMEOUT_S,
            trust_env=False,
        )
        if answer.status_code != 200 or answer.json()["weight_version"] != version:
            raise AskingError(f"{engine.name} did not take version {version}: {answer.text}")

    def _wait_router(self, *, pairs_them: bool) -> None:
        """Wait until the router has learned whether P and D have equal weights."""
        deadline_s = time.monotonic() + ROUTER_S
        while True:
            fleet = self._client.get(f"{self._plan.router_url}/fleet").raise_for_status().json()
            if [pair["usable"] for pair in fleet["pairs"]] == [pairs_them]:
                return
            if time.monotonic() > deadline_s:
                raise AskingError(f"the router did not learn of the update within {ROUTER_S:.0f} s")
            time.sleep(LOOK_EVERY_S)


def make_update_table(stages: Sequence[Stage]) -> Table:
    table = Table(
        title="The weights of P and D change while they run",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in ("stage", "answers of", "equal", "handed over", "good"):
        table.add_column(heading, no_wrap=True)
    for stage in stages:
        table.add_row(
            stage.name,
            " or ".join(stage.versions),
            f"{stage.num_equal} of {stage.num_prompts}",
            str(stage.num_moved),
            "[green]yes[/]" if stage.is_good else "[red]NO[/]",
        )
    return table
