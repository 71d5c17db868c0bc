"""The questions of the load: prompts of many lengths, some with shared prefixes, for both APIs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from baton.checkpoints.random_model import write_checkpoint

MODEL_NAME = "tiny"
MAX_MODEL_LEN = 1024
# Enough that a question's blocks are evicted from every prefix cache before it is asked again.
NUM_QUESTIONS = 160
NUM_SHARED_PREFIXES = 4
SHARED_PREFIX_TOKENS = 320
# The vocabulary's single bytes come first; these ids are ordinary tokens in every vocabulary.
TOKEN_IDS = range(300, 1000)
# Prompt lengths in tokens: within a block, several blocks, and many blocks.
LENGTHS = ((8, 40), (120, 300), (400, 800))
ANSWER_TOKENS = (8, 12, 40)  # The longest answers are long enough for a fault to interrupt their stream.
WORDS = ("cache", "block", "engine", "prefill", "decode", "router", "token", "lease", "ticket", "layer")

Api = Literal["completions", "chat"]


def write_model(folder: Path, *, seed: int = 0) -> Path:
    """Write a very small checkpoint whose heads can be split over two ranks. Each seed has other weights."""
    return write_checkpoint(
        folder, family="qwen3", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, seed=seed
    )


@dataclass(frozen=True, slots=True)
class Question:
    """One request. `body` is what its streamed and whole forms have in common."""

    index: int
    api: Api
    is_streamed: bool
    body: dict[str, Any]

    @property
    def path(self) -> str:
        return "/v1/completions" if self.api == "completions" else "/v1/chat/completions"

    def can_be_continued(self, kind: str) -> bool:
        """Whether the router continues its stream when an engine of this kind fails.

        vLLM's logprobs would be computed in another batch as those of a prompt.
        """
        return self.is_streamed and (kind == "baton" or "logprobs" not in self.body)


def make_questions(
    count: int = NUM_QUESTIONS, *, model: str = MODEL_NAME, seed: int = 0
) -> Sequence[Question]:
    """Return questions: a third are chats, half are streamed. Equal arguments give equal questions."""
    rng = random.Random(seed)
    prefixes = [_tokens(rng, SHARED_PREFIX_TOKENS) for _ in range(NUM_SHARED_PREFIXES)]
    return [_question(rng, index, prefixes, model) for index in range(count)]


def _question(rng: random.Random, index: int, prefixes: Sequence[list[int]], model: str) -> Question:
    body: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "max_tokens": rng.choice(ANSWER_TOKENS),
    }
    has_logprobs = rng.random() < 0.5
    is_streamed = rng.random() < 0.5
    if index % 3 == 2:
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(5, 120)))
        body["messages"] = [
            {"role": "system", "content": "You explain one word. " * 12},
            {"role": "user", "content": f"{index}: {text}"},
        ]
        body |= {"logprobs": True} if has_logprobs else {}
        return Question(index, "chat", is_streamed, body)
    body |= {"logprobs": 1} if has_logprobs else {}
    if index % 3 == 1:
        body["prompt"] = [*rng.choice(prefixes), *_tokens(rng, rng.randrange(4, 100))]
    else:
        body["prompt"] = _tokens(rng, rng.randrange(*rng.choice(LENGTHS)))
    return Question(index, "completions", is_streamed, body)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.choice(TOKEN_IDS) for _ in range(count)]
