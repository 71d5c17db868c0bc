"""Numbers and booleans as pydantic's lax mode reads them: vLLM's server takes 3.0, "3" and true for integers.

A value that this mode refuses, such as 3.5 for an integer, stays as it is, so that a strict decoder names it.
So do "nan" and "inf", which JSON has no numbers for.
"""

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

_INTEGER = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*(?:\.0+)?")
_BOOLEANS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}
# Fields of OpenAI's API with one number or boolean that a router reads.
SCALARS: Mapping[str, type] = {
    **dict.fromkeys(("stream", "echo", "return_token_ids", "use_beam_search"), bool),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of"), int),
    **dict.fromkeys(("priority", "seed", "top_logprobs", "prompt_logprobs"), int),
    **dict.fromkeys(("temperature", "presence_penalty", "frequency_penalty", "length_penalty"), float),
    "include_stop_str_in_output": bool,
}


def as_lax(value: Any, kind: type) -> Any:
    """Return the value of a JSON document as `kind`, if it is int, float or bool; otherwise unchanged."""
    try:
        match value:
            case str() if kind is bool:
                return _BOOLEANS.get(value.lower(), value)
            case str() if kind is int:
                text = value.strip()
                return int(text.partition(".")[0]) if _INTEGER.fullmatch(text) else value
            case str() if kind is float:
                return number if isfinite(number := float(value)) and value.strip().isascii() else value
            case bool() if kind is int or kind is float:
                return kind(value)
            case int() | float() if kind is bool and value in (0, 1):
                return bool(value)
            case float() if kind is int and value.is_integer():
                return int(value)
    except ValueError:  # No number, or one of thousands of digits.
        pass
    return value
