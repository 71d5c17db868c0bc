"""Content format of a chat template: a list of parts or one text. Detected as in vLLM.

A template that loops over the content of a message gets parts, even if the client sent a text. Every other
template gets one text: the parts joined with newlines.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes

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


def takes_parts(template: nodes.Template) -> bool:
    """Whether the template loops over a message's content. Scopes are ignored: a name has one meaning."""
    messages = _aliases(template, "messages")
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


def _aliases(template: nodes.Template, name: str) -> set[str]:
    """The name, and the variables that are set to it or to a part of it."""
    found, fresh = {name}, [name]
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
