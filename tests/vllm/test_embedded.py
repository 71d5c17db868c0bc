"""A vLLM engine and Baton's own hand over with one checkpoint: layouts differ, tokens do not."""

from collections.abc import Iterator

import pytest

from tests.vllm.engines import BatonPlan, Server, Site, check_at_once, check_handoffs, completion, transfer
from tests.vllm.plain import PLAIN, D, P
from tests.vllm.prompts import NUM_TOKENS, Single, chat_body, prompts

BATON_P = BatonPlan("baton-p", transfer("BatonPushConnector", "kv_producer", "baton-p"))
BATON_D = BatonPlan("baton-d", transfer("BatonPushConnector", "kv_consumer", "baton-d"))
ASKED = [
    prompt for prompt in prompts() if len(prompt) in (8, 16, 17, 128, 129, 257, 512, 513, 1500, 3000, 3900)
]


@pytest.fixture(scope="module")
def engines(site: Site, single: Single) -> Iterator[dict[str, Server]]:
    yield site.cast(PLAIN, P, D, BATON_P, BATON_D)
    site.dismiss("baton-p", "baton-d")


@pytest.fixture(scope="module", params=["pull", "push"])
def mode(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture(scope="module", params=[("p", "baton-d"), ("baton-p", "d")], ids=" to ".join)
def names(request: pytest.FixtureRequest) -> tuple[str, str]:
    both: tuple[str, str] = request.param
    return both


@pytest.fixture(scope="module")
def router(site: Site, engines: dict[str, Server], names: tuple[str, str], mode: str) -> Iterator[Server]:
    with site.router(engines[names[0]], engines[names[1]], mode) as router:
        yield router


def test_tokens_equal_a_single_vllms(
    router: Server, engines: dict[str, Server], names: tuple[str, str], single: Single
) -> None:
    check_handoffs(router, engines[names[1]], ASKED, single.tokens, num_cached=1)


def test_concurrent_streams_equal_a_single_vllms(router: Server, single: Single) -> None:
    check_at_once(router, ASKED, single.tokens)
    assert router.metric("baton:router_first_tokens_total", agreed="no") == 0


def test_batons_engine_continues_after_a_vllms_first_token(
    router: Server, names: tuple[str, str], mode: str, single: Single
) -> None:
    if (names, mode) != (("p", "baton-d"), "pull"):
        pytest.skip("D returns all tokens, or continues the answer in another way")
    before = router.metric("baton:router_first_tokens_total", agreed="unasked")
    asked = [prompt for prompt in ASKED if prompt in single.texts]
    for prompt in asked:
        salt = f"{router.name} continued"
        got = router.stream(completion(prompt, max_tokens=NUM_TOKENS, cache_salt=salt))
        assert (got.is_done, got.text) == (True, single.texts[prompt])
        assert got.token_ids == single.tokens(prompt, NUM_TOKENS)
    # Except after a token without text of its own, or with half a character.
    assert router.metric("baton:router_first_tokens_total", agreed="unasked") >= before + len(asked) // 2


def test_a_chat_equals_a_single_vllms(router: Server, single: Single) -> None:
    got = router.stream(chat_body(), "/v1/chat/completions")
    assert got.is_done
    assert got.text == single.chat
