"""One session: runs the chosen parts, each with its share of the time. A part that fails does not end the
others.

    a  decode engines asked directly, compared with a single engine    cost of a loaded connector
    b  second legs, compared with the same prompt cached               cost of a handoff for the decode engine
    c  pairs with their proxies, compared with a single engine         latency for a client
    d  single engines of both kinds, each on one core                  the embedded engine itself
    raw, faults, trace                                                 see those modules
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from baton.cli.processes import Fleet, Stopped
from baton.core.errors import BatonError
from lab.bench.compare import faults, raw, second_leg
from lab.bench.compare import tie_analysis as ties
from lab.bench.compare.environment import vocab_size
from lab.bench.compare.journal import Journal
from lab.bench.compare.load import LoadClient, LoadError
from lab.bench.compare.prompts import FreshPrompts, shared_share, slice_of_trace
from lab.bench.compare.rounds import AlternatingLoads, Setting, Target
from lab.bench.compare.running import CannotRun, RunningSystem, SessionSetup, fits, resumed, running
from lab.bench.compare.systems import MAX_MODEL_LEN, SINGLES, SYSTEMS, Role
from lab.bench.handoff.asking import AskingError

TRACE_PATH = Path(__file__).with_name("traces") / "mooncake_conversation.jsonl"
TRACE_ANSWER_TOKENS_MAX = 64
TRACE_ANSWER_SHARE = 0.1  # Share of the length of the trace's answers, which have hundreds of tokens.
LEG_ROUNDS_MIN = 3
LEG_TIMEOUT_S = 90.0  # Limit without a byte from the server; a peer that hangs is recorded and skipped.
STARTING_SHARE = 0.4  # Share of a session for starting its twenty engines.
SHARES = {"a": 0.12, "b": 0.08, "c": 0.30, "d": 0.10, "raw": 0.06, "faults": 0.14, "trace": 0.20}


KILLED: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Size:
    """Amount measured in a round, and the limit of rounds."""

    rounds_max: int
    direct: tuple[Setting, ...]
    handed: tuple[Setting, ...]
    singles: tuple[Setting, ...]
    leg_lengths: tuple[int, ...]
    trace_requests: int
    trace_duration_s: float
    fault_requests: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Parts and systems to measure. Budgets limit the rounds; starting systems takes extra time."""

    parts: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    size: Size
    minutes: float
    trace_path: Path
    trace_group: tuple[str, ...]
    fault_systems: tuple[str, ...]
    one_pair_at_a_time: bool

    def budget_s(self, part: str) -> float:
        """Return the part's share of the time that is left after starting systems."""
        total = sum(SHARES[name] for name in self.parts)
        return self.minutes * 60 * (1 - STARTING_SHARE) * SHARES[part] / total


FULL = Size(
    rounds_max=5,
    direct=(Setting(2, 64, 24), Setting(2, 512, 16)),
    handed=(Setting(3, 64, 12), Setting(2, 512, 12), Setting(1, 2000, 8), Setting(8, 256, 24, 8)),
    singles=(Setting(2, 128, 48), Setting(8, 128, 48, 8), Setting(16, 128, 48, 16)),
    leg_lengths=second_leg.LENGTHS,
    trace_requests=16,
    trace_duration_s=56.0,
    fault_requests=12,
)
QUICK = Size(
    rounds_max=2,
    direct=(Setting(2, 64, 16),),
    handed=(Setting(2, 64, 8), Setting(1, 512, 8)),
    singles=(Setting(1, 128, 32), Setting(8, 128, 32, 8)),
    leg_lengths=second_leg.LENGTHS[:3],
    trace_requests=8,
    trace_duration_s=25.0,
    fault_requests=6,
)


class Session:
    """Runs the parts of a plan with one client and one fleet of processes."""

    def __init__(
        self,
        plan: Plan,
        setup: SessionSetup,
        journal: Journal,
        client: LoadClient,
        fleet: Fleet,
        say: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._setup = setup
        self._journal = journal
        self._fleet = fleet
        self._say = say
        self._end_s = time.monotonic() + 60 * plan.minutes
        self._loads = AlternatingLoads(client, journal, FreshPrompts(int(time.time()) << 8), say, self._end_s)
        self._leg_prompts = second_leg.Prompts(random.Random(time.time_ns()), vocab_size(setup.model))

    def run(self) -> None:
        plan = self._plan
        if "raw" in plan.parts:
            self._attempt("raw", "raw transports", self._raw)
        if "d" in plan.parts:
            for names in SINGLES:
                self._attempt("d", " | ".join(names), partial(self._singles, names))
        if {"a", "b", "c"} & set(plan.parts):
            for group in plan.groups:
                self._in_affordable_groups("a, b, c", group, self._group)
        if "faults" in plan.parts:
            for name in plan.fault_systems:
                self._attempt("faults", name, partial(self._faults, name))
        if "trace" in plan.parts:
            self._in_affordable_groups("trace", plan.trace_group, self._trace)

    # --- Parts -------------------------------------------------------------------------------------------

    def _group(self, names: tuple[str, ...]) -> None:
        num_groups = len(self._plan.groups)
        with self._running(names) as systems:
            single, pairs = systems[0], systems[1:]
            self._note_start(systems)
            fronts = [Target(one.system.name, one, one.url) for one in systems]
            direct = [Target(one.system.name, one, one.engine_url("decode")) for one in pairs]
            direct = [Target(single.system.name, single, single.url), *direct]
            fronts = [*fronts[:1], *self._warm(fronts[1:])]
            direct = [one for one in direct if one.system in {front.system for front in fronts}]
            self._loads.warm_up(fronts[:1])
            if "a" in self._plan.parts and single.system.kind == "vllm":
                self._rounds("a", direct, self._plan.size.direct, num_groups)
            if "b" in self._plan.parts:
                self._second_legs([front.system for front in fronts[1:]], num_groups)
            if "c" in self._plan.parts:
                self._rounds("c", fronts, self._plan.size.handed, num_groups)
            for one in systems:
                self._journal.samples(
                    "start",
                    "alive",
                    one.system.name,
                    "memory_gib",
                    self._journal.next_round(),
                    [one.memory_gib()],
                )

    def _warm(self, targets: list[Target]) -> list[Target]:
        """Warm up the targets; return those that answer."""
        good = []
        for target in targets:
            try:
                self._loads.warm_up([target])
            except LoadError as error:
                self._skip("c", target.name, str(error))
            else:
                good.append(target)
        return good

    def _rounds(
        self, part: str, targets: list[Target], settings: tuple[Setting, ...], num_groups: int
    ) -> None:
        budget_s = self._plan.budget_s(part) / num_groups
        self._loads.rounds(part, targets, settings, rounds_max=self._plan.size.rounds_max, budget_s=budget_s)

    def _second_legs(self, pairs: list[RunningSystem], num_groups: int) -> None:
        """Measure second legs of pulls; a push has no leg that can be timed alone."""
        end_s = time.monotonic() + self._plan.budget_s("b") / num_groups
        pulls = [one for one in pairs if one.system.connector and not one.system.connector.is_push]
        with httpx.Client(timeout=LEG_TIMEOUT_S, trust_env=False) as client:
            for index in range(2 * self._plan.size.rounds_max):
                now_s = time.monotonic()
                if (index >= LEG_ROUNDS_MIN and now_s > end_s) or (index and now_s > self._end_s):
                    return
                number = self._journal.next_round()
                for one in list(pulls):
                    try:
                        second_leg.measure(
                            one,
                            client,
                            self._journal,
                            self._leg_prompts,
                            number,
                            self._plan.size.leg_lengths,
                            self._setup.kv_bytes_per_token,
                        )
                    except AskingError as error:
                        pulls.remove(one)
                        self._skip("b", one.system.name, str(error))

    def _singles(self, names: tuple[str, str]) -> None:
        with self._running(names, confined=True) as systems:
            targets = [Target(one.system.name, one, one.url) for one in systems]
            self._loads.warm_up(targets)
            self._loads.rounds(
                "d",
                targets,
                self._plan.size.singles,
                rounds_max=self._plan.size.rounds_max,
                budget_s=self._plan.budget_s("d") / len(SINGLES),
            )
            if all(one.system.dtype == "float32" for one in systems):
                for setting in self._plan.size.singles:
                    self._compare_answers(setting, systems)

    def _compare_answers(self, setting: Setting, systems: list[RunningSystem]) -> None:
        """Compare answers of two single engines, and check differences for ties. Raises AskingError."""
        prompts = [self._leg_prompts.of(setting.prompt_tokens) for _ in range(setting.num_prompts)]
        answers = []
        for system in systems:
            with resumed(system):
                answers.append(
                    ties.ask_at_once(
                        system.url,
                        prompts,
                        max_tokens=setting.answer_tokens,
                        concurrency=setting.concurrency,
                        timeout_s=LEG_TIMEOUT_S,
                    )
                )
        theirs, ours = answers
        compared = ties.compare(ours, theirs, ties.exact_model(self._setup.model))
        ties.write(self._journal, setting.name, compared)
        self._say(
            f"  d: {setting.name:24} answers: {compared.num_equal} equal, {compared.num_tied} ties, "
            f"{len(compared.differences) - compared.num_tied} different"
        )

    def _raw(self) -> None:
        raw.measure(
            self._journal,
            self._setup.peers,
            rounds_max=self._plan.size.rounds_max,
            budget_s=self._plan.budget_s("raw"),
            say=self._say,
        )

    def _faults(self, name: str) -> None:
        with self._running((name,)) as (system,):
            system.resume()
            for role in KILLED:
                number = self._journal.next_round()
                damage = faults.measure(system, role, self._leg_prompts, self._plan.size.fault_requests)
                faults.write(self._journal, name, role, number, damage)
                self._say(
                    f"  faults: {name}, kill -9 of {role}: {damage.count('answered')} answered, "
                    f"{damage.num_wrong} of them wrong, "
                    f"{damage.count('error')} errors, {damage.count('hung')} hung"
                )

    def _trace(self, names: tuple[str, ...]) -> None:
        size = self._plan.size
        with self._plan.trace_path.open(encoding="utf-8") as lines:
            prompts = slice_of_trace(
                lines,
                num_requests=size.trace_requests,
                tokens_max=MAX_MODEL_LEN - TRACE_ANSWER_TOKENS_MAX - 1,
                answer_tokens_max=TRACE_ANSWER_TOKENS_MAX,
                answer_share=TRACE_ANSWER_SHARE,
                duration_s=size.trace_duration_s,
            )
        setting = f"{len(prompts)} requests, {shared_share(prompts):.0%} of their tokens seen before"
        with self._running(names) as systems:
            targets = [Target(one.system.name, one, one.url) for one in systems]
            self._loads.warm_up(targets)
            self._loads.replays(
                "trace",
                setting,
                targets,
                prompts,
                rounds_max=size.rounds_max,
                budget_s=self._plan.budget_s("trace"),
            )

    # --- Groups and errors -------------------------------------------------------------------------------

    def _in_affordable_groups(
        self, part: str, names: tuple[str, ...], measure: Callable[[tuple[str, ...]], None]
    ) -> None:
        """Measure the group, or without memory for all, its first system with each of the others."""
        systems = [SYSTEMS[name] for name in names]
        groups = [names]
        if len(names) > 2 and (self._plan.one_pair_at_a_time or not fits(systems)):
            groups = [(names[0], name) for name in names[1:]]
        for group in groups:
            self._attempt(part, " | ".join(group), partial(measure, group))

    @contextmanager
    def _running(self, names: tuple[str, ...], *, confined: bool = False) -> Iterator[list[RunningSystem]]:
        """Run the systems that can run here; the first one must."""
        systems = []
        for name in names:
            system = SYSTEMS[name].confined() if confined else SYSTEMS[name]
            try:
                self._setup.check(system)
            except CannotRun as error:
                if name == names[0]:
                    raise
                self._skip("systems", name, str(error))
            else:
                systems.append(system)
        self._say(f"starting {', '.join(system.name for system in systems)}")
        with running(systems, self._setup, self._fleet) as started:
            yield started

    def _note_start(self, systems: list[RunningSystem]) -> None:
        number = self._journal.next_round()
        for one in systems:
            self._journal.samples(
                "start", "to ready", one.system.name, "start_s", number, one.ready_after_s.values()
            )

    def _attempt(self, part: str, what: str, measure: Callable[[], None]) -> None:
        """Run a part; if it fails, record the reason and continue with the next one."""
        if time.monotonic() > self._end_s:
            self._skip(part, what, "the session's time was up")
            return
        try:
            measure()
        except Stopped:
            raise
        except (BatonError, OSError) as error:
            self._skip(part, what, str(error))

    def _skip(self, part: str, what: str, reason: str) -> None:
        self._journal.skipped(part, what, reason)
        self._say(f"skipped: {what}: {reason}")
