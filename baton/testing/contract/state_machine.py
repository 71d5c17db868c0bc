"""Hypothesis state machine of the kit: draws requests, steps, aborts and faults, and applies them to a world.

One example is one world from start to rest. Prompts share prefixes, pools are small enough to preempt, and a
request may end in any of its states.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.errors import ConfigError
from baton.testing.contract.case import BLOCK, Shape, Windows
from baton.testing.contract.site import ToySite
from baton.testing.contract.story import ContractBroken, Inconclusive, Story, why
from baton.testing.contract.stuck import Stuck
from baton.testing.contract.world import World

PROMPT_MAX = 22  # Tokens: five and a half blocks.
_CROWD = ((0, None), (1, None), (0, 1), (1, 1))  # (trunk, changed position)
# Repeated to the length wanted; prompts of one trunk share prefixes.
_TRUNKS = ((3, 1, 4, 1, 5, 9, 2, 6), (2, 7, 1, 8, 2, 8, 1, 8))


def prompt_of(trunk: int, length: int, changed: int | None) -> list[int]:
    """Return `length` tokens of a trunk, with the token at position `changed` replaced (-1: the last)."""
    tokens = [_TRUNKS[trunk][i % 8] + i // 8 for i in range(length)]
    if changed is not None and changed < length:
        tokens[changed] += 10
    return tokens


def crowd_of(shape: Shape) -> list[list[int]]:
    """Return prompts of whole blocks without a common prefix that together take every block."""
    each = shape.num_blocks // len(_CROWD) * BLOCK
    return [prompt_of(trunk, each, changed) for trunk, changed in _CROWD]


# Lengths at and near block boundaries, and prompts that differ in one early or late token only.
_lengths = st.one_of(st.sampled_from([21, 13, 12, 9, 4]), st.integers(1, PROMPT_MAX))
prompts = st.builds(prompt_of, st.integers(0, 1), _lengths, st.sampled_from([None, None, 1, 5, -1]))
answers = st.integers(1, 8)  # Tokens.
salts = st.sampled_from([None, None, None, "salt"])


def shapes_of(site: ToySite) -> st.SearchStrategy[Shape]:
    return st.builds(
        Shape,
        tp=st.sampled_from(site.case.tensor_parallel_sizes),
        num_blocks=st.sampled_from([24, 12, 8]),
        budget=st.sampled_from([64, 8]),
        caching=st.sampled_from([True, False]),
        policy=st.sampled_from(["recompute", "fail"]),
        in_flight=st.sampled_from(site.steps_in_flight),
        windows=st.sampled_from(site.windows),
    )


class SearchIsOver(BaseException):
    """Ends Hypothesis's run at once, as Ctrl-C does. An Exception would count as one more failing example."""


class Search:
    """State of a run: counts, the best story so far, and whether shrinking continues (bounded by tries)."""

    def __init__(self, tries_max: int, on_example: Callable[[int], None] | None = None) -> None:
        """`tries_max`: examples after the first breach. `on_example` gets the number of examples."""
        self._on_example = on_example
        self.num_examples = 0
        self.checked: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.best: ContractBroken | None = None  # The shortest story of a broken rule.
        self._num_lines = 0
        self._tries_left = tries_max

    @property
    def is_over(self) -> bool:
        return self.best is not None and self._tries_left <= 0

    def end(self) -> None:
        """Stop after this example: each further try would take as long."""
        self._tries_left = 0

    def take(self, story: Story) -> None:
        """Record an example that has ended."""
        self.num_examples += 1
        if self._on_example is not None:
            self._on_example(self.num_examples)
        self.seen.update(story.seen)
        if self.best is not None:
            self._tries_left -= 1
        else:
            self.checked.update(story.checked)
        if story.breach is None:
            return
        num_lines = story.num_lines
        if self.best is None or num_lines < self._num_lines:
            self.best = ContractBroken(story.breach.rule, story.breach.detail, story.text())
            self._num_lines = num_lines


@contextmanager
def _reporting_breaches(story: Story, search: Search) -> Iterator[None]:
    """Raise ContractBroken if a rule was broken, whatever error the host raised afterwards."""
    try:
        yield
    except Stuck as error:
        story.check("never-returned", False, str(error))
        search.end()
    except Inconclusive:
        return
    except Exception:  # If a rule is broken, the error is its consequence. Otherwise it is raised again.
        if story.breach is None and not story.is_inconclusive:
            raise
    if not story.is_inconclusive:
        story.raise_if_broken()


def _start(site: ToySite, shape: Shape, story: Story) -> World:
    try:
        return World(site, shape, story)
    except ContractBroken:
        raise
    except Exception as error:  # A constructor or register_kv_caches raised it, for example.
        if _needs_cuda(error):
            raise ConfigError(
                f"needs CUDA, and torch finds no CUDA device on this machine ({why(error)})",
                field="connector",
            ) from error
        story.check("raised", False, f"starting raised {why(error)}")
        raise


def _needs_cuda(error: Exception) -> bool:
    """Return whether torch or a driver library failed for lack of a device; no exception class tells this."""
    text = f"{error} {error.__cause__}".lower()
    return not torch.cuda.is_available() and any(word in text for word in ("cuda", "nvidia", "nvml"))


def tour(site: ToySite, search: Search) -> None:
    """Run one world per window layout in which every operation happens once, where worlds are expensive."""
    for windows in site.windows:
        if search.best is None:
            _tour(site, search, windows)


def _tour(site: ToySite, search: Search, windows: Windows) -> None:
    story = Story()
    long, other, short = prompt_of(0, 21, None), prompt_of(1, 21, None), prompt_of(0, 9, 5)
    try:
        tp, in_flight = site.case.tensor_parallel_sizes[-1], site.steps_in_flight[-1]
        shape = Shape(tp=tp, num_blocks=12, budget=16, in_flight=in_flight, windows=windows)
        world = _start(site, shape, story)
        try:
            world.dummy_run()
            world.ask_to_store(long, None)
            world.ask_to_store(other, "salt")
            world.ask_all([long, other, short, prompt_of(0, 21, -1)], 6)  # More than the pool has blocks for.
            for num_steps in range(4):
                world.ask_and_abort(long, 4, num_steps)
            world.settle()
            world.forget_local_caches()
            world.break_store()
            world.ask_all([long, short], 3)
            world.step()
            world.abort(0)
            world.settle()
            world.reset_caches()
            world.ask_all([long, short], 3)
            world.step()
            world.change_weights(is_named=True)
            world.settle()
            if site.case.pairing != "none":
                world.replay(0, long, 2)
                world.replay(0, short, 2)
            world.ask(short, 3, None)
            world.lose_ticket(0)
        except BaseException:
            world.shutdown()
            raise
        world.finish()
    except Exception:  # If a rule is broken, the story reports it.
        if story.breach is None:
            raise
    search.take(story)


def make_machine(site: ToySite, search: Search) -> type[RuleBasedStateMachine]:
    """Return the state machine class for `site`. `search` records its examples and ends the run."""
    has_store = site.case.break_store is not None
    is_pair = site.case.pairing != "none"

    class ConnectorMachine(RuleBasedStateMachine):
        world: World | None = None

        @initialize(shape=shapes_of(site))
        def start(self, shape: Shape) -> None:
            self.story = Story()
            self.has_failed = True  # True until the step has ended without an error.
            if search.is_over:
                raise SearchIsOver
            if site.case.new_example is not None:
                site.case.new_example()
            try:
                with _reporting_breaches(self.story, search):
                    self.world = _start(site, shape, self.story)
            except ContractBroken:
                search.take(self.story)
                raise
            self.dummy_run()

        def dummy_run(self) -> None:
            self.then(lambda world: world.dummy_run())

        def then(self, act: Callable[[World], Any]) -> None:
            assert self.world is not None, "an example starts with its engines"
            if self.story.is_inconclusive:
                return
            self.has_failed = True
            with _reporting_breaches(self.story, search):
                act(self.world)
            self.has_failed = self.story.is_inconclusive

        @rule(prompt=prompts, max_tokens=answers, salt=salts)
        def ask(self, prompt: Sequence[int], max_tokens: int, salt: str | None) -> None:
            self.then(lambda world: world.ask(prompt, max_tokens, salt))

        @rule(several=st.lists(prompts, min_size=2, max_size=5), max_tokens=answers)
        def ask_several(self, several: list[list[int]], max_tokens: int) -> None:
            """Ask at once: the prompts share blocks, and a small pool does not hold all of them."""
            self.then(lambda world: world.ask_all(several, max_tokens))

        @rule(max_tokens=answers)
        def fill_the_pool(self, max_tokens: int) -> None:
            """Fill the pool with prompts of whole blocks, so that the next token preempts."""
            self.then(lambda world: world.ask_all(crowd_of(world.shape), max_tokens))

        @rule(index=st.integers(0, 7), max_tokens=answers)
        def ask_again(self, index: int, max_tokens: int) -> None:
            self.then(lambda world: world.ask_again(index, max_tokens))

        @rule(prompt=prompts, salt=salts)
        def ask_to_store(self, prompt: Sequence[int], salt: str | None) -> None:
            """Run to the end, so that the connector holds KV that the engine does not."""
            self.then(lambda world: world.ask_to_store(prompt, salt))

        @rule(count=st.integers(1, 4))
        def step(self, count: int) -> None:
            self.then(lambda world: [world.step() for _ in range(count)])

        @rule(prompt=prompts, max_tokens=answers, num_steps=st.integers(0, 3))
        def ask_and_abort(self, prompt: Sequence[int], max_tokens: int, num_steps: int) -> None:
            self.then(lambda world: world.ask_and_abort(prompt, max_tokens, num_steps))

        @rule(index=st.integers(0, 7))
        def abort(self, index: int) -> None:
            self.then(lambda world: world.abort(index))

        @rule()
        def settle(self) -> None:
            self.then(lambda world: world.settle())

        @rule()
        def forget_local_cache(self) -> None:
            self.then(lambda world: world.forget_local_caches())

        @rule()
        def reset_cache(self) -> None:
            self.then(lambda world: world.reset_caches())

        @rule(is_named=st.booleans())
        def change_weights(self, is_named: bool) -> None:
            self.then(lambda world: world.change_weights(is_named=is_named))

        @precondition(lambda self: has_store)
        @rule()
        def break_store(self) -> None:
            self.then(lambda world: world.break_store())

        @precondition(lambda self: has_store)
        @rule(prompt=prompts, num_stored=st.integers(5, 13), max_tokens=answers)
        def compute_after_a_failure(self, prompt: list[int], num_stored: int, max_tokens: int) -> None:
            self.then(lambda world: world.compute_after_a_failure(prompt, num_stored, max_tokens))

        # A connector may pass the error of a failed write on to the host, and its example ends there. So this
        # rule is only for connectors whose store cannot be broken.
        @precondition(lambda self: not site.is_expensive and not has_store)
        @rule(prompt=prompts, rank=st.integers(0, 1), max_tokens=answers)
        def fail_a_load(self, prompt: list[int], rank: int, max_tokens: int) -> None:
            self.then(lambda world: world.fail_a_load(prompt, rank, max_tokens))

        @precondition(lambda self: is_pair)
        @rule(prompt=prompts, max_tokens=answers)
        def ask_plain(self, prompt: Sequence[int], max_tokens: int) -> None:
            self.then(lambda world: world.ask_plain(prompt, max_tokens))

        @precondition(lambda self: is_pair)
        @rule(index=st.integers(0, 7), prompt=prompts, max_tokens=answers)
        def replay(self, index: int, prompt: Sequence[int], max_tokens: int) -> None:
            self.then(lambda world: world.replay(index, prompt, max_tokens))

        @precondition(lambda self: is_pair)
        @rule(index=st.integers(0, 7))
        def lose_ticket(self, index: int) -> None:
            self.then(lambda world: world.lose_ticket(index))

        @invariant()
        def nothing_is_broken(self) -> None:
            if self.world is not None and not self.story.is_inconclusive:
                self.story.raise_if_broken()

        def teardown(self) -> None:
            world, self.world = self.world, None
            if world is None:
                return
            try:
                with _reporting_breaches(self.story, search):
                    if self.has_failed:
                        world.shutdown()
                    else:
                        world.finish()
            finally:
                search.take(self.story)

    class SleepingMachine(ConnectorMachine):
        @rule(index=st.integers(0, 1))
        def sleep(self, index: int) -> None:
            self.then(lambda world: world.sleep(index))

    return SleepingMachine if site.case.plays_sleep else ConnectorMachine
