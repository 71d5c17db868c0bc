"""vLLM's own load client, kept running: one line of JSON in, a load, one line of JSON out.

Run by the Python of vLLM's environment, by path (this file imports nothing of Baton), so that nobody can say
that we measured ourselves: the load, the clock and the figures are those of `vllm bench serve`. It stays,
because importing vLLM takes longer than most loads.

    in   {"arguments": ["--base-url", ..., "--max-concurrency", "8", ...]}
    out  {"result": {what `vllm bench serve --save-detailed` would write}}  or  {"error": "..."}

Everything that vLLM prints goes to standard error. PYTHONHASHSEED has to be set: vLLM draws a trace's prompts
from Python's hash, and all systems must get the same ones.
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
        ) as error:  # The border: one load fails, the session goes on and says so.
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
