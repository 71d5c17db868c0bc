"""Loads sent by vLLM's own client, and their results."""

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.core.errors import BatonError
from lab.bench.compare.prompts import CHUNK_TOKENS, Prompt, write_trace

START_TIMEOUT_S = 180.0  # Importing vLLM on a busy machine.
STOP_GRACE_S = 5.0
MODEL_NAME = "bench"  # Served model name of every engine here.

_PROGRAM = Path(__file__).with_name("client_process.py")


class LoadError(BatonError):
    """The client failed, or did not end in time."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of `vllm bench serve`, per request in the order of the prompts; failed ones have an error."""

    duration_s: float
    ttft_s: tuple[float, ...]
    itl_s: tuple[tuple[float, ...], ...]  # The gaps after the first token.
    answer_tokens: tuple[int, ...]
    latency_s: tuple[float, ...]
    texts: tuple[str, ...]
    errors: tuple[str, ...]

    @property
    def num_failed(self) -> int:
        return sum(bool(error) for error in self.errors)

    @property
    def good(self) -> list[int]:
        return [index for index, error in enumerate(self.errors) if not error]

    @property
    def tokens_per_s(self) -> float:
        return sum(self.answer_tokens) / self.duration_s

    @property
    def tpot_s(self) -> tuple[float, ...]:
        """Time per token after the first, for good requests with more than one."""
        return tuple(
            (self.latency_s[i] - self.ttft_s[i]) / (self.answer_tokens[i] - 1)
            for i in self.good
            if self.answer_tokens[i] > 1
        )


class LoadClient:
    """vLLM's client as a child process for the whole session; restarted if it had to be killed."""

    def __init__(self, python: Path, tokenizer: Path, log_path: Path, env: Mapping[str, str]) -> None:
        self._python = python
        self._tokenizer = tokenizer
        self._log_path = log_path
        self._env = {**env, "PYTHONHASHSEED": "0"}
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="baton-compare-")

    def __enter__(self) -> "LoadClient":
        return self

    def __exit__(self, *unused: object) -> None:
        self.stop()
        self._folder.cleanup()

    def run(
        self, url: str, prompts: Sequence[Prompt], *, concurrency: int | None, timeout_s: float
    ) -> LoadResult:
        """Send the prompts. `concurrency` None: each prompt at its own time. Raises LoadError."""
        trace = Path(self._folder.name, "trace.jsonl")
        write_trace(prompts, trace)
        arguments = [
            *("--base-url", url, "--backend", "openai", "--endpoint", "/v1/completions"),
            *("--model", MODEL_NAME, "--tokenizer", str(self._tokenizer), "--temperature", "0"),
            *("--dataset-name", "timed_trace", "--dataset-path", str(trace)),
            *("--timed-trace-chunk-hash-size", str(CHUNK_TOKENS), "--num-prompts", str(len(prompts))),
            *("--save-detailed", "--disable-tqdm", "--ready-check-timeout-sec", "0"),
        ]
        if concurrency is not None:
            arguments += ["--no-self-timed", "--max-concurrency", str(concurrency)]
        result = self._ask(arguments, timeout_s)
        if len(result["ttfts"]) != len(prompts):
            raise LoadError(f"vLLM's client sent {len(result['ttfts'])} of {len(prompts)} prompts")
        return LoadResult(
            duration_s=result["duration"],
            ttft_s=tuple(result["ttfts"]),
            itl_s=tuple(tuple(gaps) for gaps in result["itls"]),
            answer_tokens=tuple(result["output_lens"]),
            latency_s=tuple(result["latencies"]),
            texts=tuple(result["generated_texts"]),
            errors=tuple(
                error or ("" if answer == prompt.answer_tokens else f"{answer} tokens")
                for error, answer, prompt in zip(
                    result["errors"], result["output_lens"], prompts, strict=True
                )
            ),
        )

    def stop(self) -> None:
        """End the client. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with process:  # Closes the pipes, which asks it to end.
            assert process.stdin is not None
            try:
                process.stdin.close()
                process.wait(STOP_GRACE_S)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                process.kill()

    def _ask(self, arguments: list[str], timeout_s: float) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"arguments": arguments}) + "\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            self.stop()
            raise LoadError(f"vLLM's client has ended; see {self._log_path}") from error
        return self._answer(process, timeout_s)

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None:
            with self._log_path.open("a") as log:
                self._process = subprocess.Popen(
                    [str(self._python), str(_PROGRAM)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self._env,
                    text=True,
                )
            self._answer(self._process, START_TIMEOUT_S)
        return self._process

    def _answer(self, process: "subprocess.Popen[str]", timeout_s: float) -> dict[str, Any]:
        """Read an answer. The client writes whole lines, one per question."""
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            process.kill()
            self.stop()
            raise LoadError(f"vLLM's client did not answer within {timeout_s:.0f} s")
        line = process.stdout.readline()
        if not line:
            self.stop()
            raise LoadError(f"vLLM's client ended; see {self._log_path}")
        answer = json.loads(line)
        if "error" in answer:
            raise LoadError(f"vLLM's client failed: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result


def client_environment() -> dict[str, str]:
    """Return our environment without Baton's variables, and with vLLM's telemetry off."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {
        **kept,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
