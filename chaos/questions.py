"""The questions of the load: prompts of many lengths, some with shared prefixes, by both APIs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from baton.engine.checkpoints.random_model import write_checkpoint

MODEL_NAME = "tiny"
MAX_MODEL_LEN = 1024
# Enough that a question's blocks have left every prefix cache before it is asked again.
NUM_QUESTIONS = 160
NUM_SHARED_PREFIXES = 4
SHARED_PREFIX_TOKENS = 320
# The vocabulary's single bytes come first; these ids are plain tokens in every vocabulary.
TOKEN_IDS = range(300, 1000)
LENGTHS = ((8, 40), (120, 300), (400, 800))  # Tokens of a prompt: within a block, some, and many blocks.
ANSWER_TOKENS = (8, 12, 40)  # The longest ones are those that a fault meets in mid-stream.
WORDS = ("cache", "block", "engine", "prefill", "decode", "router", "token", "lease", "ticket", "layer")

Api = Literal["completions", "chat"]


def write_model(folder: Path) -> Path:
    """A checkpoint as small as they come, whose heads two ranks can share."""
    return write_checkpoint(
        folder, family="qwen3", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, seed=0
    )


@dataclass(frozen=True, slots=True)
class Question:
    """One request. `body` is what both forms (streamed and whole) have in common."""

    index: int
    api: Api
    is_streamed: bool
    body: dict[str, Any]

    @property
    def path(self) -> str:
        return "/v1/completions" if self.api == "completions" else "/v1/chat/completions"


def make_questions(
    count: int = NUM_QUESTIONS, *, model: str = MODEL_NAME, seed: int = 0
) -> Sequence[Question]:
    """The same arguments make the same questions. A third of them are chats, half are streamed."""
    dice = random.Random(seed)
    prefixes = [_tokens(dice, SHARED_PREFIX_TOKENS) for _ in range(NUM_SHARED_PREFIXES)]
    return [_question(dice, index, prefixes, model) for index in range(count)]


def _question(dice: random.Random, index: int, prefixes: Sequence[list[int]], model: str) -> Question:
    body: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "max_tokens": dice.choice(ANSWER_TOKENS),
    }
    has_logprobs = dice.random() < 0.5
    is_streamed = dice.random() < 0.5
    if index % 3 == 2:
        text = " ".join(dice.choice(WORDS) for _ in range(dice.randrange(5, 120)))
        body["messages"] = [
            {"role": "system", "content": "You explain one word. " * 12},
            {"role": "user", "content": f"{index}: {text}"},
        ]
        body |= {"logprobs": True} if has_logprobs else {}
        return Question(index, "chat", is_streamed, body)
    body |= {"logprobs": 1} if has_logprobs else {}
    if index % 3 == 1:
        body["prompt"] = [*dice.choice(prefixes), *_tokens(dice, dice.randrange(4, 100))]
    else:
        body["prompt"] = _tokens(dice, dice.randrange(*dice.choice(LENGTHS)))
    return Question(index, "completions", is_streamed, body)


def _tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.choice(TOKEN_IDS) for _ in range(count)]
