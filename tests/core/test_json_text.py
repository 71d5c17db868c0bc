"""Decoding of untrusted JSON: the depth has a limit of ours, which is the same for each Python."""

import msgspec
import pytest

from baton.core.json_text import MAX_DEPTH, NotJson, decode_json


@pytest.mark.parametrize("kind", [object, dict[str, msgspec.Raw]])
def test_a_text_that_is_nested_too_deep_is_refused(kind: type[object]) -> None:
    within, beyond = (b'{"a":' * depth + b"1" + b"}" * depth for depth in (MAX_DEPTH, MAX_DEPTH + 1))
    assert decode_json(within, kind)
    with pytest.raises(NotJson, match="at most 100 levels"):
        decode_json(beyond, kind)


def test_what_stands_side_by_side_or_in_a_string_is_not_nested() -> None:
    text = b'["[[[{{{' + b"[" * MAX_DEPTH + b'"' + b",[]" * MAX_DEPTH + b"]"
    assert len(decode_json(text)) == MAX_DEPTH + 1
