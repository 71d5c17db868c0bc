"""Answers that another engine has begun: D fetches the prompt and gives the rest."""

import pytest

from baton.core.config import ModelConfig
from baton.engine.api import SamplingParams
from tests.connectors.engine_world import cores, hands_over, legs_of, prompt_of, run_all

pytestmark = pytest.mark.slow

SAMPLING = SamplingParams(
    max_tokens=16, seed=3, ignore_eos=True, frequency_penalty=1.5, repetition_penalty=1.3, min_tokens=9
)


@pytest.mark.parametrize("num_given", [1, 2, 7, 15])
@pytest.mark.parametrize("kind", ["Pull", "Push"])
@pytest.mark.parametrize("is_cached", [False, True], ids=["fetched", "cached"])
def test_the_rest_equals_that_of_one_engine(
    model: ModelConfig, kind: str, num_given: int, is_cached: bool
) -> None:
    prompt = prompt_of(21)
    with cores(model) as start:
        p, d = (start(hands_over(name, kind), num_blocks=96) for name in ("p", "d"))
        whole = p.add("whole", prompt, SAMPLING)
        run_all(p, d)
        p.core.scheduler.reset_prefix_cache()
        given = whole.token_ids[:num_given]
        if is_cached:
            d.add("before", prompt, SAMPLING)
            run_all(p, d)
        # P's ticket has a token that is not the client's; the given ones win.
        on_p = SamplingParams(max_tokens=1, seed=4)
        if kind == "Pull":
            lent = p.add("lent", prompt, on_p, {"do_remote_decode": True})
            run_all(p, d)
            rest = d.add("rest", prompt, SAMPLING, lent.kv_transfer_params, output_token_ids=given)
        else:
            for_p, for_d = legs_of(p.core, "pushed")
            rest = d.add("rest", prompt, SAMPLING, for_d, output_token_ids=given)
            p.add("lent", prompt, on_p, for_p)
        run_all(p, d)
    assert rest.error is None
    assert [*given, *rest.token_ids] == whole.token_ids
    assert rest.finish_reason == whole.finish_reason == "length"
    assert (rest.num_cached_tokens, rest.num_transferred_tokens > 0) == (21, not is_cached or num_given < 4)
