"""Agreement: greedy answers of the embedded engine held against the same model in float64.

    python -m benchmarks.agreement                     each dtype of the model

100 random prompts of 10 to 199 tokens, answers of 32 tokens, a small random model of 4 layers. The exact
model computes only the scores of each engine's own answers: a token agrees if the exact model scores it
highest after the same tokens. An answer is compared up to its first token that does not.

    first     answers whose first token agrees
    whole     answers of which all tokens agree
    tokens    equal tokens before the first difference, mean
    shortfall the exact logprob that the first different token lacks, largest; 0 without one
"""

import random
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from baton.bench.machine import machine_line
from baton.core.config import CacheConfig, EngineConfig
from baton.engine.api import SamplingParams
from baton.engine.checkpoints.checkpoint import load_model_config
from baton.engine.checkpoints.random_model import write_checkpoint
from baton.engine.llm import LLM
from benchmarks.compare.tie_analysis import Exact, exact_model
from benchmarks.engine_steps import DTYPES

NUM_PROMPTS, ANSWER_TOKENS, VOCAB = 100, 32, 768
SAMPLING = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)


def prompts() -> list[list[int]]:
    drawn = random.Random(0)
    return [[drawn.randrange(4, VOCAB) for _ in range(drawn.randrange(10, 200))] for _ in range(NUM_PROMPTS)]


def answers_of(folder: Path, dtype: str) -> list[list[int]]:
    config = EngineConfig(
        model_config=load_model_config(str(folder), dtype=dtype),
        cache_config=CacheConfig(num_gpu_blocks=2048),
    )
    with LLM(config) as llm:
        return [completion.token_ids for completion in llm.generate(prompts(), SAMPLING)]


def agreement(answers: list[list[int]], exact: Exact) -> tuple[int, int, float, float]:
    """Columns of the table."""
    lengths, shortfalls = [], [0.0]
    for prompt, answer in zip(prompts(), answers, strict=True):
        logprobs = exact(prompt, answer)
        lacking = logprobs.amax(-1) - logprobs.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        different = lacking.nonzero().flatten().tolist()
        lengths.append(different[0] if different else ANSWER_TOKENS)
        if different:
            shortfalls.append(float(lacking[different[0]]))
    num_first, num_whole = sum(n > 0 for n in lengths), sum(n == ANSWER_TOKENS for n in lengths)
    return num_first, num_whole, statistics.mean(lengths), max(shortfalls)


def main() -> int:
    table = Table(title=f"{NUM_PROMPTS} greedy answers of {ANSWER_TOKENS} tokens, compared with float64")
    for heading in ("dtype", "first", "whole", "tokens", "shortfall"):
        table.add_column(heading, justify="left" if heading == "dtype" else "right")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="baton-agreement-") as folder:
        # Heads of 32 numbers are the smallest that `layers.c` computes.
        shape = {"hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 32}
        shape |= {"vocab": VOCAB, "max_position": 512}
        write_checkpoint(Path(folder), family="qwen3", **shape)  # type: ignore[arg-type]
        exact = exact_model(Path(folder))
        for dtype in DTYPES:
            first, whole, tokens, shortfall = agreement(answers_of(Path(folder), dtype), exact)
            table.add_row(dtype, str(first), str(whole), f"{tokens:.1f}", f"{shortfall:.3f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    print(machine_line())
    sys.exit(main())
