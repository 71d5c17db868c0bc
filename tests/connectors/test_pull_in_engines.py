"""Handoffs between embedded engines that go wrong. `test_first_token_in_engines` has those that go well."""

import pytest

from baton.engine.llm import LLM
from tests.connectors.engine_world import GREEDY, ONE_TOKEN, PATIENT, QUICK, Start, hands_over, prompt_of

pytestmark = pytest.mark.slow
PREFILL = [{"do_remote_decode": True}]


def test_under_policy_fail_only_that_request_gets_the_error(start: Start) -> None:
    p = start(hands_over("p", timers=PATIENT))
    d = start({**(hands_over("d", timers=PATIENT) or {}), "kv_load_failure_policy": "fail"})
    (prefilled,) = p.generate([prompt_of(20)], ONE_TOKEN, kv_transfer_params=PREFILL)
    params = [prefilled.kv_transfer_params, None]
    wrong, right = d.generate([prompt_of(20, step=13), prompt_of(8)], GREEDY, kv_transfer_params=params)
    assert wrong.finish_reason == "error"
    assert wrong.error is not None
    assert "another prompt" in wrong.error.message
    assert right.finish_reason == "length"


def test_a_producer_that_is_gone_costs_time_and_no_token(start: Start, alone: LLM) -> None:
    p, d = start(hands_over("going", timers=PATIENT)), start(hands_over("staying", timers=QUICK))
    (prefilled,) = p.generate([prompt_of(20)], ONE_TOKEN, kv_transfer_params=PREFILL)
    p.close()
    (decoded,) = d.generate([prompt_of(20)], GREEDY, kv_transfer_params=[prefilled.kv_transfer_params])
    (expected,) = alone.generate([prompt_of(20)], GREEDY)
    assert decoded.token_ids == expected.token_ids
    assert decoded.num_transferred_tokens == 0
