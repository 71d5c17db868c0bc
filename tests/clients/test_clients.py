"""One test for each client: it works with Baton as with vLLM, and the pair's answer is one engine's."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = (
    "True"  # No network: litellm fetches a table when it is imported.
)
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"

import agents
import anthropic
import instructor
import litellm
import openai
import pytest
from conftest import MAX_MODEL_LEN, NAME, Place, Places
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

KEY = "none"
ASK: Any = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "What is it? " * 12}]
TEXT = " ".join(message["content"] for message in ASK)


class Thing(BaseModel):
    """A thing."""

    number: int = Field(ge=0, le=999)
    side: Literal["left", "right"]
    word: str = Field(max_length=8)


THING_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a thing.",
        "parameters": {**Thing.model_json_schema(), "additionalProperties": False},
    },
}


def same(places: Places, ask: Callable[[Place], Any]) -> Any:
    """The answer, which is the same from both."""
    single, pair = (ask(place) for place in places)
    assert pair == single
    return pair


def client_of(place: Place) -> openai.OpenAI:
    return openai.OpenAI(base_url=place.v1, api_key=KEY, max_retries=0)


# --- openai ----------------------------------------------------------------------------------------


def test_openai_chats(places: Places) -> None:
    def ask(place: Place) -> tuple[Any, ...]:
        with client_of(place) as client:
            answer = client.chat.completions.create(
                model=NAME, messages=ASK, max_tokens=20, temperature=0, logprobs=True, top_logprobs=2
            )
            [choice] = answer.choices
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert answer.usage is not None
            tokens = [token.token for token in choice.logprobs.content]
            return choice.message.content, choice.finish_reason, tokens, answer.usage.completion_tokens

    text, *_ = same(places, ask)
    assert text


def test_openai_streams(places: Places) -> None:
    def ask(place: Place) -> tuple[Any, ...]:
        with client_of(place) as client:
            chunks = list(
                client.chat.completions.create(
                    model=NAME,
                    messages=ASK,
                    max_tokens=20,
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
            text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
            assert chunks[-1].usage is not None
            return text, chunks[-1].usage.total_tokens

    assert same(places, ask)[0]


def test_openai_completes_and_lists_models(places: Places) -> None:
    def ask(place: Place) -> tuple[Any, ...]:
        with client_of(place) as client:
            answer = client.completions.create(model=NAME, prompt=TEXT, max_tokens=12, seed=4, n=2)
            return [choice.text for choice in answer.choices], [one.id for one in client.models.list()]

    assert same(places, ask)[1] == [NAME]


def test_openai_parses_a_schema(places: Places, model: Path) -> None:
    # A random model would go on with spaces, which JSON allows anywhere.
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    blank = {str(token_id): -100 for token, token_id in vocabulary.items() if not token.strip("ĠĊĉč")}

    def ask(place: Place) -> Thing | None:
        with client_of(place) as client:
            answer = client.chat.completions.parse(
                model=NAME, messages=ASK, temperature=0, response_format=Thing, logit_bias=blank
            )
            return answer.choices[0].message.parsed

    assert isinstance(same(places, ask), Thing)


def test_openai_streams_a_required_call(places: Places) -> None:
    def ask(place: Place) -> tuple[Any, ...]:
        with (
            client_of(place) as client,
            client.chat.completions.stream(
                model=NAME,
                messages=ASK,
                temperature=0,
                tools=[THING_TOOL],
                tool_choice="required",
                max_tokens=200,
            ) as stream,
        ):
            [choice] = stream.get_final_completion().choices
            assert choice.message.tool_calls is not None
            calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
            return choice.finish_reason, calls

    _, calls = same(places, ask)
    assert {name for name, _ in calls} == {"look"}
    Thing.model_validate_json(calls[0][1])


# --- Others ----------------------------------------------------------------------------------------


def test_litellm(places: Places) -> None:
    def ask(place: Place) -> tuple[Any, ...]:
        common: Any = {"model": f"hosted_vllm/{NAME}", "api_base": place.v1, "api_key": KEY, "messages": ASK}
        answer = litellm.completion(**common, max_tokens=12, temperature=0)
        stream = litellm.completion(**common, max_tokens=12, temperature=0, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert streamed == answer.choices[0].message.content
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(
                **{**common, "messages": [{"role": "user", "content": "x y " * MAX_MODEL_LEN}]}
            )
        return streamed, answer.usage.total_tokens

    assert same(places, ask)[0]


@tool
def look(number: Annotated[int, Field(ge=0, le=99)]) -> str:
    """Looks at the thing with this number."""
    return str(number)


def test_langchain(places: Places) -> None:
    def ask(place: Place) -> tuple[Any, ...]:
        chat = ChatOpenAI(
            model=NAME, base_url=place.v1, api_key=KEY, temperature=0, max_tokens=100, max_retries=0
        )
        text = chat.invoke("What is it?").content
        assert "".join(str(chunk.content) for chunk in chat.stream("What is it?")) == text
        called = chat.bind_tools([look], tool_choice="any", parallel_tool_calls=False).invoke("Look at 5.")
        # Strict: a random model would go on with properties of its own.
        structured = chat.with_structured_output(Thing, method="function_calling", strict=True)
        thing = structured.invoke("Which thing is it?")
        return text, [(call["name"], call["args"]) for call in called.tool_calls], thing

    _, calls, thing = same(places, ask)
    assert [name for name, _ in calls] == ["look"]
    assert isinstance(thing, Thing)


def test_instructor(places: Places) -> None:
    def ask(place: Place) -> Any:
        with client_of(place) as client:
            found = instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions.create(
                model=NAME, messages=ASK, response_model=Thing, temperature=0, max_retries=0
            )
            assert isinstance(found, Thing)
            return found.model_dump()

    assert same(places, ask)


def test_pydantic_ai(places: Places) -> None:
    def ask(place: Place) -> Thing:
        model = OpenAIChatModel(NAME, provider=OpenAIProvider(base_url=place.v1, api_key=KEY))
        return (
            Agent(model, output_type=Thing, model_settings={"temperature": 0}).run_sync("Which thing?").output
        )

    assert isinstance(same(places, ask), Thing)


def test_openai_agents(places: Places) -> None:
    seen: list[int] = []

    def look_at(number: Annotated[int, Field(ge=0, le=99)]) -> str:
        """Looks at the thing with this number."""
        seen.append(number)
        return "It is there."

    def ask(place: Place) -> Any:
        seen.clear()
        client = openai.AsyncOpenAI(base_url=place.v1, api_key=KEY, max_retries=0)
        agent = agents.Agent(
            name="looker",
            model=agents.OpenAIChatCompletionsModel(NAME, client),
            tools=[agents.function_tool(look_at)],
            model_settings=agents.ModelSettings(temperature=0, tool_choice="required", max_tokens=60),
        )
        result = agents.Runner.run_sync(agent, "Look at 5.", max_turns=4)
        return result.final_output, list(seen)

    _, numbers = same(places, ask)
    assert numbers, "the tool was called"


def test_anthropic_is_told_that_the_path_is_missing(places: Places) -> None:
    """Baton's embedded engine has no /v1/messages; vLLM's engines serve it, also to a router (tests/vllm)."""
    for place in places:
        with (
            anthropic.Anthropic(base_url=place.url, api_key=KEY, max_retries=0) as client,
            pytest.raises(anthropic.NotFoundError),
        ):
            client.messages.create(model=NAME, max_tokens=5, messages=[{"role": "user", "content": "Hi"}])


LM_EVAL_TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}]
""",
    "texts": """
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 16}
metric_list: [{metric: exact_match}]
""",
}


def test_lm_eval(places: Places, model: Path, tmp_path: Path) -> None:
    """Log-likelihoods of prompts, and generated texts, of local tasks: no data comes over the network."""
    questions = [
        {"question": f"{number} and {number} make", "choices": [f" {2 * number}", f" {number}"], "answer": 0}
        for number in range(24)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, questions)))
    for name, task in LM_EVAL_TASKS.items():
        head = f"task: {name}\ndataset_path: json\ntest_split: test\ndoc_to_text: '{{{{question}}}}'"
        data = f"dataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}"
        (tmp_path / f"{name}.yaml").write_text(f"{head}\n{data}{task}")

    def ask(place: Place) -> Any:
        arguments = {
            "model": NAME,
            "base_url": f"{place.v1}/completions",
            "tokenizer": str(model),
            "num_concurrent": 4,
            "max_length": MAX_MODEL_LEN,
        }
        out = tmp_path / place.url.rsplit(":", 1)[1]
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
        command += ["--tasks", ",".join(LM_EVAL_TASKS), "--include_path", str(tmp_path), "--log_samples"]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "hf"),
        }
        command += ["--output_path", str(out)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        [results] = out.rglob("results_*.json")
        found = json.loads(results.read_text())["results"]
        scores = found["choices"]["acc,none"], found["texts"]["exact_match,none"]
        responses = {}
        for name in LM_EVAL_TASKS:
            [samples] = out.rglob(f"samples_{name}_*.jsonl")
            for answer in map(json.loads, samples.read_text().splitlines()):
                responses[name, answer["doc_id"]] = answer["filtered_resps"]
        return scores, responses

    _, responses = same(places, ask)
    assert len(responses) == len(LM_EVAL_TASKS) * len(questions)


JAVA = """
import java.net.URI;
import java.net.http.*;
public class Ask {
    public static void main(String[] args) throws Exception {
        var body = "{'prompt': 'What is it?', 'max_tokens': 12, 'temperature': 0, 'stream': true}";
        var request = HttpRequest.newBuilder(URI.create(args[0] + "/completions"))
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body.replace("'", "\\""))).build();
        var client = HttpClient.newHttpClient();  // HTTP/2 by an upgrade, where the server has it.
        for (int i = 0; i < 2; i++) {  // The second request uses the connection again.
            var answer = client.send(request, HttpResponse.BodyHandlers.ofLines());
            System.out.println(answer.statusCode());
            answer.body().filter(line -> line.startsWith("data: ")).forEach(System.out::println);
        }
    }
}
"""


def has_java_compiler() -> bool:
    try:
        listed = subprocess.run(
            ["java", "--list-modules"], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError:
        return False
    return "jdk.compiler" in listed.stdout


@pytest.mark.skipif(not has_java_compiler(), reason="there is no JDK")
def test_java(places: Places, tmp_path: Path) -> None:
    (tmp_path / "Ask.java").write_text(JAVA)

    def ask(place: Place) -> list[str]:
        command = ["java", str(tmp_path / "Ask.java"), place.v1]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        lines = done.stdout.splitlines()
        texts = []
        for line in lines:
            if line.startswith("data: {"):
                texts += [choice["text"] for choice in json.loads(line.removeprefix("data: "))["choices"]]
        assert lines.count("200") == lines.count("data: [DONE]") == 2
        return texts

    assert same(places, ask)
