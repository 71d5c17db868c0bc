"""The cost check of JSON bodies: accepts what is cheap, refuses what is not, and never misreads strings."""

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.core.errors import UserError
from baton.http import json_body
from baton.http.json_body import MAX_DEPTH, MAX_ITEMS, MAX_NUMBERS, check_cost, compact

TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[" * (MAX_DEPTH + 1), "nested too deeply"),
        (b'{"a":' * 990 + b"1" + b"}" * 990, "nested too deeply"),
        (b"[" + b",".join([b"{}"] * (MAX_ITEMS + 1)) + b"]", "strings, arrays and objects"),
        (b"[" + b",".join([b'""'] * (MAX_ITEMS + 1)) + b"]", "strings, arrays and objects"),
        (b"[" + b"1," * (MAX_NUMBERS + 1) + b"1]", "numbers"),
    ],
)
def test_costly_json_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_cost(raw)


def test_text_full_of_brackets_and_quotes_is_cheap() -> None:
    check_cost(json.dumps({"prompt": '[{"\\' * MAX_ITEMS}).encode())


def depth_of(tree: Any) -> int:
    match tree:
        case dict():
            return 1 + max(map(depth_of, tree.values()), default=0)
        case list():
            return 1 + max(map(depth_of, tree), default=0)
    return 0


@given(tree=TREES, limit=st.integers(1, 5))
def test_the_depth_is_that_of_the_values(tree: Any, limit: int) -> None:
    raw = json.dumps(tree).encode()
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(json_body, "MAX_DEPTH", limit)
    with monkeypatch.context():
        if depth_of(tree) > limit:
            with pytest.raises(UserError, match="nested"):
                check_cost(raw)
        else:
            check_cost(raw)
    monkeypatch.undo()


@given(tree=TREES)
def test_compact_json_has_the_same_value(tree: Any) -> None:
    assert msgspec.json.decode(compact(json.dumps(tree, indent=2).encode())) == tree


@given(raw=st.binary(max_size=60))
@example(raw=b"1" * 4000)
@example(raw=b'"\\ud800"')
def test_any_bytes_are_json_or_the_users_fault(raw: bytes) -> None:
    with suppress(UserError):
        msgspec.json.decode(compact(raw))
