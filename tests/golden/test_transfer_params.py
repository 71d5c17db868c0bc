"""`kv_transfer_params` in both directions: what routers send, what engines answer, what requests may choose.

What an engine makes of each form is in tests/core/test_transfer_params.py, what is signed in `wire_fields`.
"""

import json
from types import SimpleNamespace
from typing import Any

from baton.connectors.decode_bench.halves import ANSWERED
from baton.connectors.hidden_states.settings import OUTPUT_KEY, PATH_KEY
from baton.connectors.pull.intent import FetchLoan as Borrow
from baton.connectors.pull.intent import LendBlocks as Lend
from baton.connectors.pull.producer.loans import Loans
from baton.connectors.pull.settings import PullSettings, TurnSettings
from baton.connectors.pull.stats import PullStats
from baton.core.transfer_params import CACHED_TOKENS, FIELD, OFFLOAD_CHOICES
from baton.router.introductions import ASKING
from baton.router.legs import decode_body, first_token_body, prefill_body, push_params
from baton.server.first_token import GOES_ON
from baton.server.first_token import KEY as FIRST_TOKEN
from tests.golden.golden import check
from tests.golden.samples import LOAN, PUBLIC_KEY, TICKET, TRANSFER, P, pull_identity

CLIENTS_BODY: dict[str, Any] = {
    "model": "m",
    "prompt": "p",
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 9,
    "max_completion_tokens": 9,
    "min_tokens": 2,
    "logprobs": 1,
    "temperature": 0,
    "n": 1,
}
REQUEST: Any = SimpleNamespace(
    request_id="cmpl-1",
    prompt_token_ids=list(range(20)),
    all_token_ids=list(range(20)),
    num_prompt_tokens=20,
    num_computed_tokens=20,
    cache_salt=None,
    status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
)


def answer_of_an_engine(wish: Lend | Borrow) -> dict[str, Any]:
    """Its ticket, which is pinned elsewhere, is left out."""
    identity = pull_identity(settings=PullSettings(turns=TurnSettings(min_tokens=1)))
    agent: Any = SimpleNamespace(address=P, lend=lambda now: LOAN, keep=lambda now, hold_s: LOAN)
    requests: Any = SimpleNamespace(params_of=lambda request: wish)
    lender = Loans(agent, identity, "tcp://10.0.0.7:14600", PUBLIC_KEY, requests, PullStats())
    holds, params = lender.finished(REQUEST, [[4, 9]], now=0.0)
    assert holds
    assert params is not None
    return {**params, "baton_ticket": "..."}


def test_what_routers_and_engines_send() -> None:
    answered = answer_of_an_engine(Lend(TRANSFER))
    sent = {
        "router to prefill": prefill_body(CLIENTS_BODY, "t"),
        "router to prefill, for its first token": first_token_body(CLIENTS_BODY, "t"),
        "router to decode, push": decode_body(
            CLIENTS_BODY, push_params("t", engine_id="p", introduction="...")
        ),
        "router to decode, alone": decode_body(CLIENTS_BODY, None),
        "router that asks a vLLM who it is": ASKING,
        "prefill engine's answer": answered,
        "decode engine's answer, for the next turn": answer_of_an_engine(Borrow(TICKET)),
    }
    check("transfer_params", json.dumps(sent, indent=1).splitlines())


def test_keys_of_single_features() -> None:
    assert FIELD == "kv_transfer_params"
    assert list(OFFLOAD_CHOICES) == ["off", "load_only", "store_only"]
    assert (CACHED_TOKENS, FIRST_TOKEN, GOES_ON) == (
        "baton_cached_tokens",
        "baton_first_token",
        "baton_goes_on",
    )
    assert (PATH_KEY, OUTPUT_KEY) == ("hidden_states_path", "include_output_tokens")
    assert ANSWERED == "baton_synthetic_tokens"
