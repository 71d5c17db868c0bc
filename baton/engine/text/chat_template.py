"""Chat template of a model folder, rendered as `transformers` does, without importing transformers.

The template is code of the folder. It runs in Jinja's immutable sandbox, with the same settings, filters and
globals as in transformers. The sandbox bounds neither time nor memory, so a server compiles and renders in a
worker process (`check_job`, `render_job`).
"""

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.core.errors import UserError


class ChatTemplate:
    """One template. It is compiled at its first use, because compiling evaluates its constant expressions."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(self.source)
        except MemoryError:
            raise
        except Exception as error:  # Jinja compiles to Python, which may raise SyntaxError, for example.
            raise UserError(f"is not a valid template: {error}", field="chat_template") from error

    @cached_property
    def _takes_parts(self) -> bool:
        return takes_parts(self._template.environment.parse(self.source))

    @property
    def _knows_developer(self) -> bool:
        """Whether the template has messages of the role `developer`, by vLLM's rule."""
        return "'developer'" in self.source or '"developer"' in self.source

    def check(self) -> None:
        """Raises UserError if the template does not compile."""
        assert self._template is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        max_chars: int | None = None,
    ) -> str:
        """Return the prompt; of one that has more than `max_chars`, so many characters and one more.

        Raises UserError if the template refuses the conversation.
        """
        template = self._template
        plain = with_content(messages, as_parts=self._takes_parts)
        context = {
            **self.special_tokens,
            "messages": plain if self._knows_developer else without_developer(plain),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(variables or {}),
        }
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in template.generate(context):
                pieces.append(piece)
                num_chars += len(piece)
                if max_chars is not None and num_chars > max_chars:
                    break
        except MemoryError:
            raise
        except RecursionError as error:
            raise UserError("the model's chat template recurses too deeply", field="messages") from error
        except Exception as error:
            # The template may fail in any way on the client's values.
            raise UserError(f"the model's chat template refuses it: {error}", field="messages") from error
        return "".join(pieces)[: None if max_chars is None else max_chars + 1]


@lru_cache(maxsize=4)
def _cached(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def check_job(source: str, special_tokens: Mapping[str, str]) -> None:
    """`ChatTemplate.check` for a worker process. Also renders the simplest conversation."""
    template = _cached(source, tuple(special_tokens.items()))
    template.check()
    with suppress(UserError):  # A template may require a system message, for example.
        template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)


def render_job(
    source: str,
    special_tokens: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None,
    max_chars: int,
) -> str:
    """`ChatTemplate.render` for a worker process."""
    return _cached(source, tuple(special_tokens.items())).render(
        messages,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        variables=variables,
        max_chars=max_chars,
    )


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's tokens for training; ignored here."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads it from the class.

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """The `tojson` filter without Jinja's escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


SEPARATOR = "\n"


def with_content(messages: Sequence[Mapping[str, Any]], *, as_parts: bool) -> list[dict[str, Any]]:
    """The messages in the template's format. Tool results are always text."""
    return [
        {**message, "content": _content(message, as_parts=as_parts and message["role"] != "tool")}
        for message in messages
    ]


def _content(message: Mapping[str, Any], *, as_parts: bool) -> Any:
    content = message.get("content")
    if as_parts:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    return content if isinstance(content, str) else SEPARATOR.join(part["text"] for part in content or ())


def without_developer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for a template that does not know the role `developer`, as in vLLM.

    Such a message becomes one of the system. Templates want one system message, and want it first: if any
    message of a developer is there, the texts of all system messages are joined.
    """
    if all(message.get("role") != "developer" for message in messages):
        return messages
    plain = [_of_system(message) if message.get("role") == "developer" else message for message in messages]
    if all(message.get("role") != "system" for message in plain[1:]):
        return plain
    texts = [_content(message, as_parts=False) for message in plain if message.get("role") == "system"]
    merged = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [merged, *(message for message in plain if message.get("role") != "system")]


def _of_system(message: dict[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in message.items() if key != "tools"}, "role": "system"}


def takes_parts(template: nodes.Template) -> bool:
    """Whether the template loops over a message's content. Scopes are ignored: a name has one meaning."""
    messages = _aliases_of_messages(template)
    one_message = {
        loop.target.name
        for loop in template.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in messages)
    }
    of_macros: dict[int, set[str]] = {}  # Per loop: parameters of its macro that get a message's content.
    for macro in template.find_all(nodes.Macro):
        parameters = {
            name
            for call in template.find_all(nodes.Call)
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name
            for name, value in _arguments(macro, call)
            if _reads_content(value, one_message)
        }
        for loop in macro.find_all(nodes.For):
            of_macros[id(loop)] = parameters
    return any(
        _reads_content(loop.iter, one_message)
        or (isinstance(loop.iter, nodes.Name) and loop.iter.name in of_macros.get(id(loop), {"content"}))
        for loop in template.find_all(nodes.For)
    )


def _aliases_of_messages(template: nodes.Template) -> set[str]:
    """The name `messages`, and the variables that are set to it or to a part of it."""
    found, fresh = {"messages"}, ["messages"]
    while fresh:
        known = fresh.pop()
        for assignment in template.find_all(nodes.Assign):
            target = assignment.target
            if isinstance(target, nodes.Name) and target.name not in found and _reads(assignment.node, known):
                found.add(target.name)
                fresh.append(target.name)
    return found


def _arguments(macro: nodes.Macro, call: nodes.Call) -> Iterator[tuple[str, nodes.Expr]]:
    yield from ((parameter.name, value) for parameter, value in zip(macro.args, call.args, strict=False))
    yield from ((keyword.key, keyword.value) for keyword in call.kwargs)


def _reads_content(node: nodes.Node, one_message: set[str]) -> bool:
    return any(_reads(node, name, "content") for name in one_message)


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether the node reads `name`, or its `key`, possibly filtered, tested or sliced."""
    match node:
        case nodes.Filter() | nodes.Test():
            return _reads(node.node, name, key)
        case nodes.Getitem(arg=nodes.Slice()):
            return _reads(node.node, name, key)
        case nodes.Getitem(arg=nodes.Const(value=value)) if key is not None:
            return bool(value == key) and _reads(node.node, name)
        case nodes.Getattr(attr=attr) if key is not None:
            return attr == key and _reads(node.node, name)
        case nodes.Name(name=own, ctx="load"):
            return key is None and own == name
        case _:
            return False
