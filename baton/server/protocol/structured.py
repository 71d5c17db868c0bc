"""Request fields that constrain an answer, and what each of them asks for.

response_format       OpenAI's: any JSON object, or JSON of a schema
structured_outputs    vLLM's: a JSON schema, a regex, a choice of texts, or an EBNF grammar
tool_choice           `required`: calls of the tools; a tool's name: the arguments of a call of it
"""

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from baton.core.errors import UserError

ANY_OBJECT = {"type": "object"}
# The spaces that models are trained to write; if any were allowed, some would go on with them to their limit.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# The text of a call is CALL_NAME "its name" CALL_ARGUMENTS {its arguments} CALL_END.
CALL_NAME, CALL_ARGUMENTS, CALL_END = '{"name": ', ', "parameters": ', "}"
CALLS_BEGIN, CALLS_NEXT, CALLS_END = "[", ", ", "]"

Kind = Literal["schema", "compact_schema", "regex", "choice", "ebnf"]


class Constraint(NamedTuple):
    """What an answer must be. `field`: the request's field that asks for it."""

    field: str
    kind: Kind
    text: str  # JSON of a schema or of a choice's list; else the pattern or the grammar itself.


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None  # None: any JSON.
    strict: bool | None = None  # The answer always obeys.


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def constraint(self) -> Constraint | None:
        """Raises UserError."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return Constraint("response_format", "schema", json.dumps(ANY_OBJECT))
            case "json_schema":
                if self.json_schema is None:
                    raise UserError("is needed by the type json_schema", field="response_format.json_schema")
                text = json.dumps(self.json_schema.schema or {})
                return Constraint("response_format.json_schema.schema", "schema", text)


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of the first five fields is given.

    An option that this server does not have is refused, because it would change the answer.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: Literal[False] = False
    whitespace_pattern: None = None
    structural_tag: None = None

    def constraint(self) -> Constraint:
        """Raises UserError."""
        given = {
            name: value
            for name in ("json", "regex", "choice", "grammar", "json_object")
            if (value := getattr(self, name)) is not None
        }
        if len(given) != 1:
            raise UserError(
                "must have exactly one of json, regex, choice, grammar, json_object",
                field="structured_outputs",
            )
        [(name, value)] = given.items()
        field = f"structured_outputs.{name}"
        if name == "regex":
            return Constraint(field, "regex", value)
        if name == "grammar":
            return Constraint(field, "ebnf", value)
        if name == "choice":
            if not value:
                raise UserError("must have at least one text", field=field)
            return Constraint(field, "choice", json.dumps(value))
        schema = ANY_OBJECT if name == "json_object" else value
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return Constraint(field, "compact_schema" if self.disable_any_whitespace else "schema", text)


def constraint_of(*fields: ResponseFormat | StructuredOutputs | None) -> Constraint | None:
    """What the fields of one request ask for together. Raises UserError for more than one."""
    found = [one for field in fields if field is not None and (one := field.constraint()) is not None]
    if len(found) > 1:
        raise UserError(f"cannot be combined with {found[1].field}", field=found[0].field)
    return found[0] if found else None


def constraint_of_call(schema: dict[str, Any] | None) -> Constraint:
    """The arguments of one call, of this schema."""
    return Constraint("tools", "schema", json.dumps({**(schema or ANY_OBJECT), "x-guidance": _SPACES}))


def constraint_of_calls(
    tools: Sequence[tuple[str, dict[str, Any] | None]], *, is_parallel: bool
) -> Constraint:
    """One call of these tools, or several if `is_parallel`. A tool: its name, the schema of its arguments."""
    quoted = json.dumps
    rules = []
    for index, (name, schema) in enumerate(tools):
        head = quoted(f"{CALL_NAME}{quoted(name)}{CALL_ARGUMENTS}")
        rules.append(f"call_{index}: {head} %json {constraint_of_call(schema).text} {quoted(CALL_END)}")
    more = f" ({quoted(CALLS_NEXT)} call)*" if is_parallel else ""
    start = f"start: {quoted(CALLS_BEGIN)} call{more} {quoted(CALLS_END)}"
    call = "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))
    return Constraint("tools", "ebnf", "\n".join((start, call, *rules)))
