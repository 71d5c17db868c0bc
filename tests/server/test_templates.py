"""Chats with tools and reasoning, in templates like those of real models, compared with transformers."""

import json
from typing import Any

import msgspec
import pytest

from baton.engine.text.chat_template import ChatTemplate
from baton.http.json_body import decode_as
from baton.server.protocol.chat import ChatRequest, plain_messages, plain_tools

# Calls as JSON in tags, results grouped into one turn, thoughts of the last turn only; as Hermes and Qwen do.
TAGGED = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif -%}
# Tools <tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role in ('user', 'system') and not (loop.first and message.role == 'system') %}<|im_start|>
{{- message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content is string %}<think>{{ message.reasoning_content.strip() }}</think>{% endif %}
{%- if message.content %}{{ message.content }}{% endif %}
{%- if message.tool_calls %}{% for tool_call in message.tool_calls %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
<tool_call>{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}</tool_call>
{%- endfor %}{% endif %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>{{ message.content }}</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"""

# One call a message, arguments item by item, results under their call's id; as Llama and Mistral do.
ITEMISED = """{{ bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'tool' %}[RESULT {{ message['tool_call_id'] }}]{{ message['content'] | trim }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0] %}[CALL {{ call.id }}]{{ call.function.name }}(
{%- for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %})
{%- else %}[{{ message['role'] }}]{{ message['content'] | trim }}{% endif %}{% endfor %}
{%- for tool in tools or [] %}[TOOL]{{ tool.function | tojson(indent=2) }}{% endfor %}
{%- for document in documents or [] %}[DOC {{ document.title }}]{{ document.text }}{% endfor %}
{%- if reasoning_effort is defined %}[EFFORT {{ reasoning_effort }}]{% endif %}"""

# Loops over the parts of a message; as Gemma and templates of models with media do.
OF_PARTS = """{% for message in messages %}<{{ message['role'] }}>
{%- if message['content'] is string %}{{ message['content'] | trim }}
{%- else %}{% for item in message['content'] %}{{ item['text'] | trim }}{% endfor %}{% endif %}
</{{ message['role'] }}>{% endfor %}"""

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ARGUMENTS = {"city": "Zürich & 'Genf'", "days": [1, 2]}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call-1", "function": {"arguments": arguments, "name": "weather"}, "type": "function"}


def history(arguments: Any) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "And tomorrow?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": " Ask. ",
            "tool_calls": [call(arguments)],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call-1", "content": "wind"},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "Thanks"},
    ]


def rendered(source: str, body: dict[str, Any]) -> str:
    """Render as the server does."""
    request = decode_as(msgspec.json.encode(body), ChatRequest)
    return ChatTemplate(source, {"bos_token": "<s>"}).render(
        plain_messages(request.messages),
        add_generation_prompt=request.add_generation_prompt,
        tools=plain_tools(request.tools),
        variables=request.template_variables,
    )


def by_transformers(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    variables.setdefault("add_generation_prompt", True)
    [text], _ = utils.render_jinja_template(
        conversations=[messages], chat_template=source, bos_token="<s>", **variables
    )
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("source", [TAGGED, ITEMISED], ids=["tagged", "itemised"])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
def test_a_history_with_tool_calls_is_rendered_as_transformers_renders_it(source: str, tools: Any) -> None:
    body = {"messages": history(json.dumps(ARGUMENTS)), "tools": tools}
    text = rendered(source, body)
    assert text == by_transformers(source, history(ARGUMENTS), tools=tools)
    assert "Zürich" in text
    assert ("The weather <now>" in text) == bool(tools)


def test_reasoning_reaches_the_template_under_either_name() -> None:
    old = rendered(TAGGED, {"messages": history("{}")})
    new = history("{}")
    new[2]["reasoning"] = new[2].pop("reasoning_content")
    assert "<think>Ask.</think>" in old
    assert rendered(TAGGED, {"messages": new}) == old


def test_documents_and_effort_reach_the_template() -> None:
    documents = [{"title": "a", "text": "b"}]
    messages = [{"role": "user", "content": "c"}]
    body = {"messages": messages, "documents": documents, "reasoning_effort": "low"}
    text = rendered(ITEMISED, body)
    assert text == by_transformers(ITEMISED, messages, documents=documents, reasoning_effort="low")
    assert text.endswith("[DOC a]b[EFFORT low]")
    assert rendered(TAGGED, {"messages": messages, "reasoning_effort": "none"}).endswith("<think></think>")


@pytest.mark.parametrize("arguments", [None, "", "not json", "[1]", "[" * 100_000])
def test_arguments_that_are_no_object_become_an_empty_one(arguments: Any) -> None:
    text = rendered(ITEMISED, {"messages": [{"role": "assistant", "tool_calls": [call(arguments)]}]})
    assert text == "<s>[CALL call-1]weather()"


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("source", "takes_parts"),
    [
        (TAGGED, False),
        (ITEMISED, False),
        (OF_PARTS, True),
        (
            "{% set ms = messages[1:] %}{% for m in ms %}{% for c in m.content %}{% endfor %}{% endfor %}",
            True,
        ),
        ("{% for content in content %}{% endfor %}", True),
        (
            "{% macro show(x) %}{% for c in x %}{{ c }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro show(x) %}{% for c in x %}{{ c }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(x=m.role) }}{{ m.content }}{% endfor %}",
            False,
        ),
        ("{% for m in messages %}{% for c in m.content | reverse %}{{ c }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}", False),
    ],
)
def test_a_template_that_loops_over_content_takes_parts(source: str, takes_parts: bool) -> None:
    assert ChatTemplate(source, {})._takes_parts == takes_parts


def test_parts_are_joined_by_a_newline_unless_the_template_takes_them() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": parts("a ", " b")},
        {"role": "user", "content": "c"},
    ]
    body = {"messages": messages}
    assert rendered(ITEMISED, body) == "<s>[user]a \n b[user]c"
    assert rendered(OF_PARTS, body) == "<user>ab</user><user>c</user>" == by_transformers(OF_PARTS, messages)
    result = {"messages": [{"role": "tool", "content": parts("a", "b")}]}
    assert rendered(OF_PARTS, result) == "<tool>a\nb</tool>", "results of tools are text, as in vLLM"
