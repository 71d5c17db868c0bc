"""Calls of tools in a constrained answer: reads them out of its text as it comes.

    tool_choice "required"   [{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]
    a tool's name            {"a": 1}

The constraint (`baton.server.protocol.structured`) fixes every character outside of names and arguments. An
answer that its limit cuts off ends within a call; the client gets what there is of it.
"""

import json
import re
import secrets

from baton.server.protocol.chat import CallDelta, FunctionDelta
from baton.server.protocol.structured import CALL_ARGUMENTS, CALL_NAME

_HEAD = re.compile(
    rf'[^{{]*{re.escape(CALL_NAME)}(?P<name>"(?:[^"\\]|\\.)*"){re.escape(CALL_ARGUMENTS)}', re.DOTALL
)
_MARK = re.compile(r'[{}\[\]"\\]')


class CallReader:
    """Turns pieces of one answer's text into deltas of its calls."""

    def __init__(self, name: str | None = None) -> None:
        """`name`: the answer is the arguments of one call of this tool. None: it is a list of calls."""
        self._name = name
        self._num_calls = 0
        self._held = ""  # Text before the arguments of the next call.
        self._is_in_arguments = False
        self._depth, self._is_in_string, self._is_escaped = 0, False, False

    def feed(self, text: str) -> list[CallDelta]:
        """Return what the text adds: one delta for each call that it reaches."""
        new: dict[int, tuple[str | None, str]] = {}  # A name for each call that begins, and arguments.
        while text:
            if self._is_in_arguments:
                end = self._end_of_arguments(text)
                name, arguments = new.get(self._num_calls - 1, (None, ""))
                new[self._num_calls - 1] = name, arguments + text[:end]
                self._is_in_arguments = end == len(text)
                text = text[end:]
                continue
            self._held += text
            name, text = self._name, self._held
            if name is None:
                if (head := _HEAD.match(self._held)) is None:
                    break
                name, text = json.loads(head["name"]), self._held[head.end() :]
            self._held, self._is_in_arguments = "", True
            new[self._num_calls] = name, ""
            self._num_calls += 1
        return [_delta(index, name, arguments) for index, (name, arguments) in new.items()]

    def _end_of_arguments(self, text: str) -> int:
        """Return where the arguments end in the text: at the brace that closes the call."""
        if self._name is not None:
            return len(text)
        position = 0
        if self._is_escaped:
            position, self._is_escaped = 1, False
        while (mark := _MARK.search(text, position)) is not None:
            position = mark.end()
            match mark[0], self._is_in_string:
                case '"', _:
                    self._is_in_string = not self._is_in_string
                case "\\", True:
                    self._is_escaped = position == len(text)
                    position += 1
                case "{" | "[", False:
                    self._depth += 1
                case "}" | "]", False if self._depth:
                    self._depth -= 1
                case "}", False:
                    return position - 1
        return len(text)


def _delta(index: int, name: str | None, arguments: str) -> CallDelta:
    """`name`: None for a call that has begun before."""
    if name is None:
        return CallDelta(index=index, function=FunctionDelta(arguments=arguments))
    function = FunctionDelta(name=name, arguments=arguments)
    return CallDelta(index=index, id=f"call_{secrets.token_hex(12)}", type="function", function=function)
