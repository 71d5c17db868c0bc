"""vLLM's own load client as a long-running process: one line of JSON in, a load, one line of JSON out.

It is run by path with the Python of vLLM's environment and imports nothing of Baton, so that load, clock and
figures are those of `vllm bench serve`. It keeps running because importing vLLM takes longer than most loads.

    in   {"arguments": ["--base-url", ..., "--max-concurrency", "8", ...]}
    out  {"result": {what `vllm bench serve --save-detailed` would write}}  or  {"error": "..."}

vLLM's own output goes to standard error. PYTHONHASHSEED must be set, because vLLM draws a trace's prompts
from Python's hash and all systems must get the same ones.
"""

import argparse
import importlib
import json
import os
import sys
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    serve: Any = importlib.import_module("vllm.benchmarks.serve")
    print(json.dumps({"result": {}}), file=answers)  # Ready.
    for line in sys.stdin:
        parser = argparse.ArgumentParser()
        serve.add_cli_args(parser)
        try:
            given = parser.parse_args(json.loads(line)["arguments"])
            answer = {"result": serve.main(given)}
        except (
            Exception,
            SystemExit,
        ) as error:  # One load failed; the session continues and reports it.
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
