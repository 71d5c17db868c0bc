"""A request id may contain any characters: its handoff is the same as any other."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.connectors.pull.intent import transfer_of_request
from baton.core.transfer_params import MAX_TRANSFER_ID_CHARS
from tests.connectors.pull_world import World

TOKENS = list(range(9))
# Including surrogates: a Python host can have them, and msgpack cannot encode them.
names = st.text(st.characters(), min_size=1, max_size=40)


@settings(max_examples=25)
@given(p_name=names, d_name=names, other_name=names)
@example(p_name="\ud800", d_name="\udfff", other_name="a")
@example(p_name="a\x00b", d_name="\n\r", other_name="\u202e")
@example(p_name="x" * 10_000, d_name="request:a-0-12345678", other_name="../..")
def test_a_handoff_with_any_request_id(p_name: str, d_name: str, other_name: str) -> None:
    world = World()
    try:
        p, d = world.engine("p"), world.engine("d")
        params: Any = p.finish_prefill(p_name, TOKENS)
        assert params is not None, "the blocks must be lent for any id"
        request = d.fetch(d_name, TOKENS, params)
        bystander = d.fetch(other_name, TOKENS, p.prefill("plain", TOKENS)) if other_name != d_name else None
        world.settle()
        assert d.read_out(request).valid_tokens == len(TOKENS)
        if bystander is not None:
            assert d.read_out(bystander).valid_tokens == len(TOKENS)
        world.settle()
        world.assert_whole()
    finally:
        world.close()


@given(name=st.text(st.characters(), max_size=400), ending=st.from_regex(r"-[0-9a-f]{8}", fullmatch=True))
@pytest.mark.parametrize("prefix", ["", "cmpl-"])
def test_a_transfer_id_can_be_encoded_and_is_equal_for_both_legs(prefix: str, name: str, ending: str) -> None:
    transfer_id = transfer_of_request(prefix + name + ending)
    assert 0 < len(transfer_id) <= MAX_TRANSFER_ID_CHARS
    assert transfer_id.encode()
    assert transfer_of_request(prefix + name + ending[:-8] + "01234567") == transfer_id
