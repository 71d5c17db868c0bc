"""An agent's session through two vLLM engines and the router, beside one vLLM engine.

    python -m lab.bench.agent_session         two minutes and 8 GB, in an environment with vLLM (.venv-vllm)

The session has TURNS turns, of `/v1/messages` and of `/v1/responses`: the agent calls a tool, gets its
result, and asks again, so each prompt begins with the one before it. The calls are recorded, so both systems
get the same prompts. Each turn is asked of both, in turns; the answers have to be equal.

    handed over    share of the prompt's tokens that D got from P; D's own cache has most of the others
    first token    from the request to the first text, in milliseconds
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from baton.bench.machine import machine_line
from baton.cli.processes import Fleet, free_ports
from lab.bench.compare.environment import VLLM_PYTHON
from lab.bench.compare.load import MODEL_NAME
from lab.bench.compare.systems import (
    SYSTEMS,
    Ports,
    Role,
    System,
    engine_command,
    engine_environment,
    front_command,
)
from lab.bench.handoff.system import model_folder

TURNS = 20
ANSWER_TOKENS = 16
START_S, ANSWER_S = 600.0, 120.0
PAIR, SINGLE = SYSTEMS["vllm baton pull local"], SYSTEMS["vllm"]
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}
{{ message.role }}: {{ message.content }}{{ message.tool_calls | tojson if message.tool_calls }}
{% endfor %}assistant:"""
RULES = "You help with a repository. Read a file before you change it, and say what you did. " * 12
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
RESULT = "".join(f"line {number} = values[{number * 7 % 13}]\n" for number in range(8))
FIRST_TEXT = {"/v1/messages": "content_block_delta", "/v1/responses": "response.output_text.delta"}


@dataclass(frozen=True)
class Turn:
    text: str
    first_s: float


def body_of(path: str, turn: int, system: str) -> dict[str, Any]:
    """The request of a turn, with all that came before it."""
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "temperature": 0,
        "stream": True,
        "cache_salt": f"{system}{path.replace('/', '-')}",
    }
    ask = {"role": "user", "content": "Which file has the values?"}
    tool = {"name": "open", "description": "Opens a file."}
    history: list[dict[str, Any]] = [ask]
    for number in range(turn):
        call, file, text = f"call-{number}", {"path": f"file_{number}.py"}, f"# {number}\n{RESULT}"
        if path == "/v1/messages":
            use = {"type": "tool_use", "id": call, "name": "open", "input": file}
            result = {"type": "tool_result", "tool_use_id": call, "content": text}
            history += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        else:
            use = {"type": "function_call", "call_id": call, "name": "open", "arguments": json.dumps(file)}
            history += [use, {"type": "function_call_output", "call_id": call, "output": text}]
    if path == "/v1/messages":
        tools = [{**tool, "input_schema": SCHEMA}]
        return {**body, "system": RULES, "messages": history, "tools": tools, "max_tokens": ANSWER_TOKENS}
    tools = [{**tool, "type": "function", "parameters": SCHEMA}]
    return {
        **body,
        "instructions": RULES,
        "input": history,
        "tools": tools,
        "max_output_tokens": ANSWER_TOKENS,
    }


def ask(http: httpx.Client, url: str, path: str, body: dict[str, Any]) -> Turn:
    text, first_s, started_s = "", 0.0, time.perf_counter()
    with http.stream("POST", url + path, json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{url}{path}: {answer.status_code} {answer.read().decode()}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["type"] == FIRST_TEXT[path]:
                first_s = first_s or time.perf_counter() - started_s
                delta = event["delta"]
                text += delta if isinstance(delta, str) else delta.get("text", "")
    return Turn(text, first_s)


def prompt_tokens(http: httpx.Client, url: str) -> tuple[float, float]:
    """Tokens of all prompts of an engine, and those that a connector has loaded."""
    found = {"": 0.0, "external_kv_transfer": 0.0}
    for family in text_string_to_metric_families(http.get(f"{url}/metrics").text):
        for sample in family.samples:
            if sample.name == "vllm:prompt_tokens_total":
                found[""] += sample.value
            elif sample.name == "vllm:prompt_tokens_by_source_total":
                found[sample.labels["source"]] = found.get(sample.labels["source"], 0.0) + sample.value
    return found[""], found["external_kv_transfer"]


@contextmanager
def running(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Start both systems. Returns the URLs of the router, of D and of the single engine."""
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    tools = ["--chat-template", str(template), "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    (router,), model = free_ports(1), model_folder()
    with Fleet(folder) as fleet:
        urls, starting = {}, {}
        engines: tuple[tuple[System, Role], ...] = (
            (PAIR, "prefill"),
            (PAIR, "decode"),
            (SINGLE, "single"),
        )
        for system, role in engines:
            ports = urls[role] = Ports(*free_ports(2))
            options: dict[str, Any] = {"model": model, "vllm_python": VLLM_PYTHON, "num_blocks": 0}
            command = [*engine_command(system, role, ports, **options), *tools]
            child = fleet.start(role, command, env=environment(system, role, ports))
            starting[child] = f"{ports.url}/health"
        fleet.wait_ready(starting, timeout_s=START_S)
        front = front_command(PAIR, router, urls["prefill"], urls["decode"], model=model, proxies=None)
        url = f"http://127.0.0.1:{router}"
        fleet.wait_ready({fleet.start("router", front): f"{url}/health"}, timeout_s=START_S)
        yield url, urls["decode"].url, urls["single"].url


def environment(system: System, role: Role, ports: Ports) -> dict[str, str]:
    return {**engine_environment(system, role, ports), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def main(_: Sequence[str] = ()) -> int:
    if not VLLM_PYTHON.is_file():
        print(f"{VLLM_PYTHON} is missing: run scripts/setup-vllm", file=sys.stderr)
        return 2
    unequal = 0
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-agent-") as folder,
        running(Path(folder)) as (router, decode, single),
        httpx.Client(timeout=ANSWER_S, trust_env=False) as http,
    ):
        for path in FIRST_TEXT:
            table = Table(title=f"{path}: {TURNS} turns", title_justify="left")
            for heading in (
                "turn",
                "prompt tokens",
                "handed over",
                "first token: pair",
                "one engine",
                "ratio",
            ):
                table.add_column(heading, justify="right")
            ratios = []
            for turn in range(TURNS):
                before = prompt_tokens(http, decode)
                found = {}
                order = (("pair", router), ("one", single))
                for name, url in order if turn % 2 else reversed(order):
                    found[name] = ask(http, url, path, body_of(path, turn, name))
                after = prompt_tokens(http, decode)
                unequal += found["pair"].text != found["one"].text
                num, loaded = after[0] - before[0], after[1] - before[1]
                ratios.append(found["pair"].first_s / found["one"].first_s)
                times = (f"{found[name].first_s * 1e3:.0f}" for name in ("pair", "one"))
                table.add_row(str(turn + 1), f"{num:.0f}", f"{loaded / num:.0%}", *times, f"{ratios[-1]:.2f}")
            Console().print(table)
            print(f"median ratio of the turns after the first: {statistics.median(ratios[1:]):.2f}")
    print(f"{unequal} of {TURNS * len(FIRST_TEXT)} answers differ")
    return 1 if unequal else 0


if __name__ == "__main__":
    print(machine_line())
    sys.exit(main(sys.argv[1:]))
