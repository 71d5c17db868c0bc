"""kill -9 of either engine during handoffs: requests end, tokens are right, the other engine continues."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.vllm.engines import Server, Site, Streamed, completion
from tests.vllm.plain import PLAIN, D, P
from tests.vllm.prompts import NUM_TOKENS, Prompt, Single, prompts

ASKED = [prompt for prompt in prompts() if 500 <= len(prompt) <= 3000]
CONCURRENCY = 8
ENDS_S = 120.0  # Every request has ended by then: twice the longest deadline, plus computing.


def kill(server: Server) -> None:
    """Kill all processes of the engine at once, as when a machine fails."""
    os.killpg(server.child.pid, signal.SIGKILL)


def ask_all(router: Server, salt: str, on_first: Callable[[], None]) -> dict[Prompt, Streamed]:
    """Ask all of ASKED; `on_first` runs once, at the first token of the second answer."""
    begun = threading.Semaphore(0)

    def ask(prompt: Prompt) -> Streamed:
        is_first = True

        def tell(message: object) -> None:
            nonlocal is_first
            if is_first:
                is_first = False
                begun.release()

        body = completion(prompt, max_tokens=NUM_TOKENS, cache_salt=salt)
        return router.stream(body, on_event=tell)

    with ThreadPoolExecutor(CONCURRENCY) as threads:
        asked = {prompt: threads.submit(ask, prompt) for prompt in ASKED}
        for _ in range(2):
            assert begun.acquire(timeout=ENDS_S)
        on_first()
        return {prompt: future.result(timeout=ENDS_S) for prompt, future in asked.items()}


def test_a_killed_decode_engine_ends_its_answers_clearly_and_p_continues(site: Site, single: Single) -> None:
    servers = site.cast(PLAIN, P, D)
    p, d = servers[P.name], servers[D.name]
    with site.router(p, d, "push") as router:
        answers = ask_all(router, "D dies", lambda: kill(d))
        num_failed = 0
        for prompt, got in answers.items():
            expected = single.tokens(prompt, NUM_TOKENS)
            assert got.token_ids == expected[: len(got.token_ids)], "the tokens before the end must be right"
            assert got.broke is None
            if got.error is None:
                assert got.token_ids == expected
            else:
                num_failed += 1
                assert got.error["type"] in ("upstream_error", "service_unavailable_error", "timeout_error")
        assert num_failed > 0
        refused = router.complete(ASKED[0])
        assert refused.status_code in (502, 503)
    assert p.is_healthy()
    p.wait_all_returned(prompts()[0])
    assert p.tokens(ASKED[0], cache_salt="after") == single.tokens(ASKED[0])
    site.dismiss(D.name)
    d = site.cast(PLAIN, P, D)[D.name]
    assert d.tokens(ASKED[1], p.prefill(ASKED[1])) == single.tokens(ASKED[1])


def check_that_killing_p_costs_no_answer(site: Site, single: Single, mode: str) -> None:
    servers = site.cast(PLAIN, P, D)
    p, d = servers[P.name], servers[D.name]
    with site.router(p, d, mode) as router:
        answers = ask_all(router, f"P dies in {mode}", lambda: kill(p))
        for prompt, got in answers.items():
            assert got.is_done
            assert got.error is None, f"a prompt of {len(prompt)} tokens: {got.error}"
            assert got.token_ids == single.tokens(prompt, NUM_TOKENS), f"a prompt of {len(prompt)} tokens"
        assert router.metric("baton:router_prefills_total", where="local") > 0
        assert d.is_healthy()
        assert router.tokens(ASKED[0], cache_salt="alone") == single.tokens(ASKED[0])
    site.dismiss(P.name)


def test_a_prefill_engine_killed_in_pull_costs_no_answer(site: Site, single: Single) -> None:
    check_that_killing_p_costs_no_answer(site, single, "pull")


def test_a_restarted_prefill_engine_is_read_from_again(site: Site, single: Single) -> None:
    """The new engine has the name that D knows from its predecessor. The predecessor's tickets are not valid
    any more.
    """
    servers = site.cast(PLAIN, P, D)
    p, d = servers[P.name], servers[D.name]
    before = d.metric("baton:kv_transfer_seconds_count")
    for mode in ("pull", "push"):
        with site.router(p, d, mode) as router:
            for prompt in ASKED[:3]:
                assert router.tokens(prompt, cache_salt=f"back in {mode}") == single.tokens(prompt)
            assert router.metric("baton:router_prefills_total", where="local") == 0
    d.wait_metric("baton:kv_transfer_seconds_count", lambda count: count >= before + 6)


def test_a_prefill_engine_killed_in_push_costs_no_answer(site: Site, single: Single) -> None:
    check_that_killing_p_costs_no_answer(site, single, "push")
