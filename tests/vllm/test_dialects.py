"""/v1/messages and /v1/responses through `baton route` and two vLLM engines: the answers are one engine's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import MODEL, TRANSFERS, Server, Site, VllmPlan
from tests.vllm.plain import D, P

# The tiny model's own template has no tools.
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}
{{ message.role }}: {{ message.content }}{{ message.tool_calls | tojson if message.tool_calls }}
{% endfor %}assistant:"""
RULES = "You help with a repository. Read files before you change them, and say what you did. " * 6
SCHEMA = {
    "type": "object",
    "properties": {"path": {"enum": ["a.py", "b.py"]}, "mode": {"const": "read"}},
    "required": ["path", "mode"],
    "additionalProperties": False,
}
TURNS = {
    "/v1/messages": [
        {"role": "user", "content": "What is in a.py?"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "open", "input": {"path": "a.py"}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "x = 1\n" * 80}],
        },
    ],
    "/v1/responses": [
        {"role": "user", "content": "What is in a.py?"},
        {"type": "function_call", "call_id": "t1", "name": "open", "arguments": '{"path": "a.py"}'},
        {"type": "function_call_output", "call_id": "t1", "output": "x = 1\n" * 80},
    ],
}
ENDS = {  # vLLM 0.33 calls a response incomplete if its limit ends it.
    "/v1/messages": ("message_stop",),
    "/v1/responses": ("response.completed", "response.incomplete"),
}
# Values that are new in each answer, and tokens that one engine has no cache for.
NEW = {"id", "item_id", "call_id", "created_at", "request_id", "kv_transfer_params", "signature"}
NEW |= {"cached_tokens", "cached_tokens_per_turn", "cache_write_tokens"}


@pytest.fixture(scope="module")
def cast(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    template: Path = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    options = ("--chat-template", str(template), "--enable-auto-tool-choice", "--tool-call-parser", "xlam")
    # A random model fills a call with white space until the limit.
    compact = {"backend": "xgrammar", "disable_any_whitespace": True}
    options += ("--structured-outputs-config", json.dumps(compact))
    plans = [
        VllmPlan("p-of-dialects", P.transfer, options),
        VllmPlan("d-of-dialects", D.transfer, options),
        VllmPlan("one-of-dialects", None, options),
    ]
    found = site.cast("dialects", *plans)
    yield {name.partition("-")[0]: server for name, server in found.items()}
    site.dismiss()


@pytest.fixture(scope="module", params=["pull", "push"])
def router(request: pytest.FixtureRequest, site: Site, cast: dict[str, Server]) -> Iterator[Server]:
    with site.router(cast["p"], cast["d"], request.param) as router:
        yield router


def body_of(path: str, what: str) -> dict[str, Any]:
    """`what`: text; a call, which the request demands; or the turn after a call."""
    is_messages = path == "/v1/messages"
    turns = TURNS[path] if what == "turn" else TURNS[path][:1]
    body: dict[str, Any] = {"model": MODEL, "temperature": 0}
    tool: dict[str, Any] = {"name": "open", "description": "Opens a file.", "strict": True}
    rules = f"{what}. {RULES}"
    if is_messages:
        body |= {"max_tokens": 120, "system": rules, "messages": turns}
        tools = [{**tool, "input_schema": SCHEMA}]
        choice: Any = {"type": "any"}
    else:
        body |= {"max_output_tokens": 120, "instructions": rules, "input": turns, "store": False}
        tools = [{**tool, "type": "function", "parameters": SCHEMA}]
        choice = "required"
    if what != "text":
        body["tools"] = tools
    return {**body, "tool_choice": choice} if what == "call" else body


def without_new(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_new(part) for name, part in value.items() if name not in NEW}
    return [without_new(part) for part in value] if isinstance(value, list) else value


def events_of(server: Server, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Events without their numbers. Texts that follow each other are one: a busy vLLM sends several tokens
    at once.
    """
    answer = server.client.post(f"{server.url}{path}", json={**body, "stream": True})
    assert answer.status_code == 200, f"{answer.text}\n{server.child.log_tail()}"
    found: list[tuple[str, Any]] = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, _, text = event.removeprefix("event: ").partition("\ndata: ")
        data = without_new(json.loads(text))
        data.pop("sequence_number", None)
        if found and name.endswith("delta") and found[-1][0] == name != "message_delta":
            found[-1] = (name, joined(found[-1][1], data))
        else:
            found.append((name, data))
    return found


def joined(first: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    if isinstance(first["delta"], str):
        return {**more, "delta": first["delta"] + more["delta"]}
    texts = {
        name: first["delta"][name] + more["delta"][name]
        for name in ("text", "partial_json")
        if name in more["delta"]
    }
    return {**more, "delta": {**more["delta"], **texts}}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("what", ["text", "call", "turn"])
@pytest.mark.parametrize("path", list(TURNS))
def test_an_answer_is_one_engines(
    cast: dict[str, Server], router: Server, path: str, what: str, is_stream: bool
) -> None:
    one, d = cast["one"], cast["d"]
    body = {**body_of(path, what), "cache_salt": f"{router.name} {path[4:]} {what} {is_stream}"}
    before = d.metric(TRANSFERS)
    num_remote = router.metric("baton:router_prefills_total", where="remote")
    if is_stream:
        found = events_of(router, path, body)
        assert found == events_of(one, path, body)
        assert found[-1][0] in ENDS[path]
    else:
        answers = [server.client.post(f"{server.url}{path}", json=body) for server in (router, one)]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        assert without_new(answers[0].json()) == without_new(answers[1].json())
        found = [("", answers[0].json())]
    called = {"/v1/messages": "tool_use", "/v1/responses": "function_call"}[path]
    assert what != "call" or f"'type': '{called}'" in str(found), found
    assert router.metric("baton:router_prefills_total", where="remote") == num_remote + 1
    d.wait_metric(TRANSFERS, lambda count: count == before + 1)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/messages", {"max_tokens": 0}),
        ("/v1/messages", {"messages": "no list"}),
        ("/v1/messages", {"tools": [{"input_schema": SCHEMA}]}),
        ("/v1/responses", {"input": 5}),
        ("/v1/responses", {"temperature": -1}),
    ],
)
def test_a_refusal_is_one_engines(
    cast: dict[str, Server], router: Server, path: str, more: dict[str, Any]
) -> None:
    body = {**body_of(path, "text"), **more}
    answers = [server.client.post(f"{server.url}{path}", json=body) for server in (router, cast["one"])]
    assert answers[0].status_code == answers[1].status_code
    assert answers[0].json() == answers[1].json()


def test_what_one_engine_has_to_get_is_answered_by_one(cast: dict[str, Server], router: Server) -> None:
    named = {**body_of("/v1/messages", "call"), "tool_choice": {"type": "tool", "name": "open"}}
    kept = {**body_of("/v1/responses", "text"), "store": True}
    before = cast["d"].metric(TRANSFERS)
    for path, body in (("/v1/messages", named), ("/v1/responses", kept)):
        answers = [server.client.post(f"{server.url}{path}", json=body) for server in (router, cast["one"])]
        assert without_new(answers[0].json()) == without_new(answers[1].json())
    assert cast["d"].metric(TRANSFERS) == before
