"""The legs' bodies as functions of JSON, whatever the JSON."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import PeerError, UserError
from baton.core.json_text import decode_json
from baton.router.request.answers import MAX_KEPT, LegAnswer, Prefilled, PrefillOutcome, read_prefill
from baton.router.values.dialects import CHAT, COMPLETIONS, DIALECTS, Dialect
from baton.router.values.legs import (
    PARAMS,
    PREFIX_CHARS,
    decode_body,
    new_transfer_id,
    parse_body,
    prefill_body,
    shape_of,
    take_kept,
    with_kept,
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
keys = st.sampled_from(
    [
        "prompt",
        "messages",
        "stream",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "echo",
        "logprobs",
    ]
)
bodies = st.dictionaries(keys | st.text(max_size=5), values, max_size=4).filter(
    lambda body: PARAMS not in body
)


def as_json(body: dict[str, Any]) -> Any:
    return decode_json(msgspec.json.encode(body))


@given(body=bodies)
def test_decode_gets_what_the_client_sent_and_the_ticket(body: dict[str, Any]) -> None:
    sent = parse_body(msgspec.json.encode(body))
    ticket = {"do_remote_prefill": True}
    assert as_json(decode_body(sent, ticket)) == {**as_json(body), PARAMS: ticket}
    assert as_json(decode_body(sent, None)) == as_json(body)


@given(body=bodies)
def test_prefill_always_computes_one_token_for_one_sample(body: dict[str, Any]) -> None:
    leg = prefill_body(body, "id", COMPLETIONS)
    assert leg["stream"] is False
    assert leg["n"] == leg["max_tokens"] == 1
    assert leg.get("max_completion_tokens", 1) == 1
    assert leg[PARAMS] == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "id"}
    assert not {"min_tokens", "echo", "logprobs", "stream_options"} & leg.keys()
    assert leg.get("prompt") == body.get("prompt")


def test_what_tiers_keep_is_taken_out_and_put_into_each_leg() -> None:
    body = {"prompt": "p", PARAMS: {"baton_retention": {"ttl_s": 60}}}
    sent = parse_body(msgspec.json.encode(body))
    kept = take_kept(sent, session=None, tenant="search")
    assert kept == {"baton_retention": {"ttl_s": 60}, "baton_tenant": "search"}
    assert PARAMS not in sent
    assert with_kept(sent, kept)[PARAMS] == kept, "also where nothing is handed over"
    assert with_kept(prefill_body(sent, "id", COMPLETIONS), kept)[PARAMS] == {
        **prefill_body(sent, "id", COMPLETIONS)[PARAMS],
        **kept,
    }
    assert with_kept(sent, take_kept(sent, session=None, tenant="")) == sent
    ends = {"prompt": "p", "session_id": "s", PARAMS: {"baton_retention": {"ends_session": True}}}
    assert take_kept(parse_body(msgspec.json.encode(ends)), session=None, tenant="") == ends[PARAMS]


@given(body=bodies, dialect=st.sampled_from(list(DIALECTS.values())))
def test_any_object_has_a_shape(body: dict[str, Any], dialect: Dialect) -> None:
    shape = shape_of(body, dialect)
    assert shape.num_prompt_tokens >= 0
    assert len(shape.prefix_key) == 16


@given(raw=st.binary(max_size=40))
def test_no_bytes_get_past_the_door_but_as_an_object_or_a_named_refusal(raw: bytes) -> None:
    try:
        body = parse_body(raw)
    except UserError as error:
        refusal = error
    else:
        assert isinstance(body, dict)
        return
    assert refusal.field is not None


def test_transfer_ids_have_128_bits_and_never_repeat() -> None:
    ids = {new_transfer_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(one) for one in ids} == {32}


def read(answer: bytes, *, may_be_complete: bool = False) -> PrefillOutcome:
    return read_prefill(LegAnswer(200, {}, answer), may_be_complete=may_be_complete, is_kept=True)


@pytest.mark.parametrize(
    "answer",
    [b"", b"[1]", b"null", b'{"kv_transfer_params": [1]}', b"\xff", b'{"a":' * 5000 + b"1" + b"}" * 5000],
)
@pytest.mark.parametrize("may_be_complete", [False, True])
def test_a_malformed_prefill_answer_is_the_engines_fault(answer: bytes, may_be_complete: bool) -> None:
    with pytest.raises(PeerError):
        read(answer, may_be_complete=may_be_complete)


@pytest.mark.parametrize("answer", [b"{}", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": {}}'])
def test_an_answer_without_params_lends_nothing(answer: bytes) -> None:
    outcome = read(answer)
    assert isinstance(outcome, Prefilled)
    assert (outcome.ticket, outcome.where) == (None, "local")


def test_of_a_long_prefill_answer_only_the_ticket_is_decoded() -> None:
    ticket = b'{"kv_transfer_params": {"baton_ticket": "signed"}, "choices": ['
    long = read(ticket + b"0," * MAX_KEPT + b"0]}")
    assert isinstance(long, Prefilled)
    assert (long.ticket, long.answer) == ({"baton_ticket": "signed"}, None)
    short = read(ticket + b"]}")
    assert isinstance(short, Prefilled)
    assert short.answer is not None


def test_token_ids_are_counted_and_text_is_guessed() -> None:
    assert shape_of({"prompt": [1, 2, 3]}, COMPLETIONS).num_prompt_tokens == 3
    assert shape_of({"prompt": [[1, 2, 3]]}, COMPLETIONS).num_prompt_tokens == 3
    assert shape_of({"prompt": "x" * 400}, COMPLETIONS).num_prompt_tokens == 100
    parts = [{"type": "text", "text": "x" * 200}, {"type": "image_url", "image_url": {}}]
    messages = [{"role": "", "content": "x" * 200}, {"role": "", "content": parts}]
    assert shape_of({"messages": messages}, CHAT).num_prompt_tokens == 100


def test_prompts_that_begin_alike_share_a_key_and_salts_part_them() -> None:
    start = "x" * PREFIX_CHARS
    assert (
        shape_of({"prompt": start + "a"}, COMPLETIONS).prefix_key
        == shape_of({"prompt": start + "b"}, COMPLETIONS).prefix_key
    )
    assert (
        shape_of({"prompt": "a"}, COMPLETIONS).prefix_key != shape_of({"prompt": "b"}, COMPLETIONS).prefix_key
    )
    assert (
        shape_of({"prompt": "a"}, COMPLETIONS).prefix_key
        != shape_of({"prompt": "a", "cache_salt": "s"}, COMPLETIONS).prefix_key
    )
    system = {"role": "system", "content": start}
    chats = [{"messages": [system, {"role": "user", "content": text}]} for text in "ab"]
    assert len({shape_of(chat, CHAT).prefix_key for chat in chats}) == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": ["a", "b"]}, "several_prompts"),
        ({"prompt": [[1], [2]]}, "several_prompts"),
        ({"prompt": [1, 2]}, None),
        ({"prompt": ["a"]}, None),
        ({"prompt": "a", "echo": True}, None),
        ({"prompt": "a", "echo": True, "logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_handed_over_says_why(body: dict[str, Any], reason: str | None) -> None:
    assert shape_of(body, COMPLETIONS).direct_reason == reason
