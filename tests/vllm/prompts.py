"""Prompts in token ids, and the answers of a single vLLM engine to them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.vllm.engines import Prompt, Server, completion

NUM_TOKENS = 64  # Tokens per answer; a test with fewer tokens compares the beginning.
_LENGTHS = (8, 9, 15, 16, 17, 31, 64, 127, 128, 129, 200, 255, 257, 300, 384, 500, 513, 640, 777, 1000, 1500)
_LONG = (2000, 3000, 3900)
_VOCAB = (3, 2000)  # The range of token ids, after the special tokens.


def prompts() -> list[Prompt]:
    """Return 30 prompts of 8 to 3,900 tokens; some share a beginning, one occurs twice."""
    rng = random.Random(20261120)
    fresh = [tuple(rng.randrange(*_VOCAB) for _ in range(length)) for length in (*_LENGTHS, *_LONG)]
    by_length = {len(prompt): prompt for prompt in fresh}
    more = tuple(rng.randrange(*_VOCAB) for _ in range(400))
    same_beginning = [
        by_length[300] + more[:30],
        by_length[513][:256] + more,
        by_length[1500][:1111] + more[:5],
    ]
    shorter = [by_length[777][:512], by_length[640][:129]]
    return [*fresh, *same_beginning, *shorter, by_length[257]]


CHAT = [{"role": "user", "content": "Tell me what a key-value cache is good for, in a few words."}]


@dataclass(frozen=True)
class Single:
    """The answers of a single engine, by prompt."""

    answers: dict[Prompt, list[int]]
    texts: dict[Prompt, str]
    usage: dict[Prompt, Any]
    chat: str  # The answer to CHAT of NUM_TOKENS tokens, streamed.

    def tokens(self, prompt: Sequence[int], num_tokens: int = 12) -> list[int]:
        return self.answers[tuple(prompt)][:num_tokens]


def ask_single(engine: Server) -> Single:
    answers, texts, usage = {}, {}, {}
    for prompt in dict.fromkeys(prompts()):
        got = engine.stream(completion(prompt, max_tokens=NUM_TOKENS, stream_options={"include_usage": True}))
        assert got.is_done, got
        answers[prompt], texts[prompt], usage[prompt] = got.token_ids, got.text, got.usage
        assert len(got.token_ids) == NUM_TOKENS
    return Single(answers, texts, usage, engine.stream(chat_body(), "/v1/chat/completions").text)


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": CHAT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **fields}
