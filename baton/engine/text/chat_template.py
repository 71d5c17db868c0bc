"""Chat template of a model folder, rendered as `transformers` does, without importing transformers.

The template is code of the folder. It runs in Jinja's immutable sandbox, with the same settings, filters and
globals as in transformers. The sandbox bounds neither time nor memory, so a server compiles and renders in a
worker process (`check_job`, `render_job`).
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.core.errors import UserError
from baton.engine.text.content_format import takes_parts, with_content


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
        """Raises UserError if the template refuses the conversation, or its text exceeds `max_chars`."""
        template = self._template
        context = {
            **self.special_tokens,
            "messages": with_content(messages, as_parts=self._takes_parts),
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
        if max_chars is not None and num_chars > max_chars:
            raise UserError(f"has more than {max_chars} characters in the model's template", field="messages")
        return "".join(pieces)


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
