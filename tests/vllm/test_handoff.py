"""vLLM prefills and vLLM decodes, with `baton route` in front: the tokens are those of one vLLM engine."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.system.collector import Collector
from tests.vllm.engines import ANSWER_S, Server, Site, check_at_once, check_handoffs, completion
from tests.vllm.prompts import NUM_TOKENS, Prompt, Single, chat_body, prompts

MODES = ("pull", "push")


@pytest.fixture(scope="module", params=MODES)
def router(request: pytest.FixtureRequest, site: Site, plain_pair: tuple[Server, Server]) -> Iterator[Server]:
    with site.router(*plain_pair, request.param) as router:
        yield router


def test_every_prompt_is_answered_as_by_one_engine(
    router: Server, plain_pair: tuple[Server, Server], single: Single
) -> None:
    """Whole answers, including prefix hits and repeated prompts."""
    check_handoffs(router, plain_pair[1], prompts(), single.tokens, num_cached=6)


def test_streams_begin_with_the_first_token_of_p_and_equal_one_engines(
    router: Server, single: Single
) -> None:
    asked = [prompt for prompt in prompts() if len(prompt) in (8, 129, 513, 1000, 3900)]
    for prompt in asked:
        body = completion(
            prompt,
            max_tokens=NUM_TOKENS,
            cache_salt=f"{router.name} streams",
            stream_options={"include_usage": True},
        )
        got = router.stream(body)
        assert got.is_done
        assert got.token_ids == single.tokens(prompt, NUM_TOKENS)
        assert got.text == single.texts[prompt]
        assert got.usage == single.usage[prompt]
    # D can be faster than P's answer in push; the answers agree.
    agreements = {label: router.metric("baton:router_first_tokens_total", agreed=label) for label in AGREED}
    assert agreements["no"] == 0
    if router.client.get(f"{router.url}/fleet").json()["mode"] == "pull":
        assert agreements["unasked"] == len(asked)


AGREED = ("yes", "no", "unasked")


def test_a_push_with_a_delayed_decode_leg_equals_one_engines(
    site: Site, plain_pair: tuple[Server, Server], single: Single
) -> None:
    """Short prompts become pulls; for the second long one the router knows when to ask D."""
    asked = [prompt for prompt in prompts() if len(prompt) in (8, 129, 513, 1000, 3900)]

    def ask(prompt: Prompt, turn: str) -> list[int]:
        salt = f"{router.name} {turn}"
        got = router.stream(completion(prompt, max_tokens=NUM_TOKENS, cache_salt=salt))
        assert got.is_done, got
        return got.token_ids

    with site.router(*plain_pair, "push late") as router:
        wanted = [single.tokens(prompt, NUM_TOKENS) for prompt in asked]
        for turn in ("first", "second"):
            assert [ask(prompt, turn) for prompt in asked] == wanted
        with ThreadPoolExecutor(len(asked)) as threads:
            assert list(threads.map(ask, asked, ["at once"] * len(asked))) == wanted
        assert router.metric("baton:router_first_tokens_total", agreed="no") == 0
        assert router.metric("baton:router_pushes_total", decode_leg="at_once") == 0
        assert router.metric("baton:router_pushes_total", decode_leg="after") >= len(asked)
        assert router.metric("baton:router_prefills_total", where="local") == 0


def test_many_at_once_are_answered_as_by_one_engine(router: Server, single: Single) -> None:
    check_at_once(router, [prompt for prompt in prompts() if len(prompt) <= 1500], single.tokens)


def test_a_chat_equals_one_engines(router: Server, single: Single) -> None:
    for fields in ({}, {"cache_salt": router.name}):
        got = router.stream(chat_body(**fields), "/v1/chat/completions")
        assert got.is_done
        assert got.text == single.chat
        roles = [c["delta"]["role"] for e in got.events for c in e["choices"] if c["delta"].get("role")]
        assert roles == ["assistant"]


def test_requests_that_cannot_be_split_are_left_to_d(router: Server, single: Single) -> None:
    """Stop strings, seeds and logprobs are exact, without a first token from P."""
    prompt = prompts()[11]
    text = single.texts[prompt]
    stop = text[len(text) // 2 :][:5]
    before = [router.metric("baton:router_first_tokens_total", agreed=label) for label in AGREED]
    stopped = router.stream(completion(prompt, max_tokens=NUM_TOKENS, stop=[stop]))
    assert stopped.text == text[: text.index(stop)]
    logprobs = router.stream(completion(prompt, logprobs=1))
    assert logprobs.token_ids == single.tokens(prompt)
    seeded = [router.stream(completion(prompt, temperature=0.8, seed=5)).token_ids for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert before == [router.metric("baton:router_first_tokens_total", agreed=label) for label in AGREED]


def test_params_that_clients_may_not_send_are_refused_by_the_router(router: Server) -> None:
    """vLLM's connectors cannot refuse with a 4xx, so the router does."""
    for params in ({"do_remote_prefill": True}, {"baton_ticket": "x"}, [], "x"):
        answer = router.complete(prompts()[0], params)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "kv_transfer_params"


TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SPANS = """\
POST /v1/completions            baton-router
  prefill                       baton-router
    kv_loan                     baton-connector
  decode                        baton-router
    kv_fetch                    baton-connector
      handshake                 baton-connector
      post                      baton-connector
      wire                      baton-connector
      verify                    baton-connector
    install                     baton-connector
"""


def test_the_connectors_spans_stand_below_the_routers_legs(router: Server, collector: Collector) -> None:
    collector.clear()
    body = completion(prompts()[13], cache_salt=f"{router.name} traced")
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    answer = router.client.post(f"{router.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    root = collector.wait_tree(CALLER, num_spans=len(SPANS.splitlines()), timeout_s=ANSWER_S)
    print("\n".join(root.lines()))
    assert {node.trace_id for node in root.all()} == {TRACE}
    assert sorted(root.names()) == sorted(SPANS.splitlines())
