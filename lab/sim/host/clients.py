"""Clients: conversations whose prompts grow by their answers and share their beginnings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.testing.host.model import EOS_IDS, VOCAB, Model
from lab.sim.checkers import answers
from lab.sim.host.cluster import TOKENS_MAX
from lab.sim.kernel.world import World

ANSWER_MAX = 5


@dataclass(slots=True, eq=False)
class Ask:
    """One request of one client, and its answer so far."""

    name: str
    prompt: list[int]
    salt: str | None
    max_tokens: int
    model: Model
    on_end: Callable[[Ask], None]
    priority: int = 0
    answer: list[int] = field(default_factory=list)
    outcome: str | None = None  # "answered", "error", "gone".
    causes: set[str] = field(default_factory=set)  # What may excuse an error.
    num_transferred: int = 0
    session: str = ""  # Equal for the turns of one conversation.
    way: tuple[str, str] | None = None  # P and D; None: the router's choice.
    is_probe: bool = False  # True: the KV of this request has to be handed over.
    may_be_empty: bool = False  # True: the request asks a producer for a state, and not for an answer.
    weights: set[int] = field(default_factory=set)  # Weights that an engine had while it served this.
    is_mixed: bool = False  # An engine took other weights when it had tokens of this, and went on.

    @property
    def is_whole(self) -> bool:
        return len(self.answer) == self.max_tokens or self.answer[-1:] in [[token] for token in EOS_IDS]

    def hear(self, token_ids: list[int]) -> None:
        self.answer += token_ids
        answers.check_tokens(self)

    def end(self, outcome: str, message: str = "") -> None:
        assert self.outcome is None, "one outcome"
        if outcome == "answered":
            answers.check_end(self)
        elif outcome == "error":
            answers.check_error(self, message)
        self.outcome = outcome
        self.on_end(self)


class Clients:
    """Makes prompts and hands them to `ask`, the router."""

    def __init__(self, world: World, model: Model, ask: Callable[[Ask], None]) -> None:
        self._world = world
        self._model = model
        self._ask = ask
        self.asks: list[Ask] = []
        self._num_sessions = 0
        rng = world.rng
        self._systems = [self._words(rng.choice([3, 8, 12])) for _ in range(2)]

    def converse(self, num_turns: int) -> None:
        rng = self._world.rng
        self._num_sessions += 1
        session = f"s{self._num_sessions}"
        prompt = [*rng.choice(self._systems), *self._words(rng.choice([1, 4, 16]))]
        self._turn(prompt, rng.choice([None, None, None, "salt"]), session, num_turns)

    def probe(self, way: tuple[str, str] | None, weights: int) -> Ask:
        """A new prompt: all of its KV has to be computed or handed over. Its answer has a token for D."""
        prompt = [3, *self._words(self._world.rng.randint(8, 20))]
        while len(self._model.answer(prompt, None, ANSWER_MAX, weights)) < 2:
            prompt = [3, *self._words(self._world.rng.randint(8, 20))]
        return self._send(prompt, None, lambda ask: None, way=way, is_probe=True, tokens_min=2)

    def make(
        self, prompt: list[int], salt: str | None, on_end: Callable[[Ask], None], tokens_min: int = 1
    ) -> Ask:
        rng = self._world.rng
        max_tokens = rng.randint(tokens_min, ANSWER_MAX)
        ask = Ask(
            f"r{len(self.asks)}",
            prompt,
            salt,
            max_tokens,
            self._model,
            on_end,
            rng.randrange(3),
        )
        self.asks.append(ask)
        return ask

    def other_prompt(self, prompt: list[int]) -> list[int]:
        """Another prompt that looks like this one."""
        rng = self._world.rng
        match rng.randrange(3):
            case 0:
                at = rng.randrange(len(prompt))
                return [*prompt[:at], *self._words(1), *prompt[at + 1 :]]
            case 1 if len(prompt) + 2 + ANSWER_MAX <= TOKENS_MAX:
                return [*prompt, *self._words(2)]  # The ticket covers its beginning.
            case _:
                return self._words(len(prompt))

    def _turn(self, prompt: list[int], salt: str | None, session: str, num_turns: int) -> None:
        def go_on(ask: Ask) -> None:
            rng = self._world.rng
            if num_turns <= 1 or ask.outcome == "gone":
                return
            if ask.outcome == "error":
                following = ask.prompt  # Once more.
            else:
                following = [*ask.prompt, *ask.answer, *self._words(rng.choice([1, 4]))]
            if len(following) + ANSWER_MAX <= TOKENS_MAX:
                pause_s = rng.uniform(0.0, rng.choice([0.5, 0.5, 8.0]))
                self._world.after(pause_s, lambda: self._turn(following, salt, session, num_turns - 1))

        self._send(prompt, salt, go_on, session)

    def _send(
        self,
        prompt: list[int],
        salt: str | None,
        on_end: Callable[[Ask], None],
        session: str = "",
        way: tuple[str, str] | None = None,
        is_probe: bool = False,
        tokens_min: int = 1,
    ) -> Ask:
        ask = self.make(prompt, salt, on_end, tokens_min)
        ask.session, ask.way, ask.is_probe = session, way, is_probe
        self._ask(ask)
        return ask

    def _words(self, count: int) -> list[int]:
        rng = self._world.rng
        return [rng.randrange(len(EOS_IDS), VOCAB) for _ in range(count)]
