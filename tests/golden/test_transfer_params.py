"""`kv_transfer_params` in both directions: what routers send, what engines answer, what requests may choose.

What an engine makes of each form is in tests/core/test_transfer_params.py, what is signed in `wire_fields`.
"""

import json
from types import SimpleNamespace
from typing import Any

from baton.connectors.pull.intent import FetchLoan as Borrow
from baton.connectors.pull.intent import LendBlocks as Lend
from baton.connectors.pull.producer.loans import Loans
from baton.connectors.pull.settings import PullSettings, TurnSettings
from baton.connectors.pull.stats import PullStats
from baton.router.fleet.introductions import ASKING
from baton.router.values.dialects import COMPLETIONS
from baton.router.values.legs import decode_body, first_token_body, prefill_body, push_params
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
    """The params that an engine answers, without its ticket, which is pinned elsewhere."""
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
        "router to prefill": prefill_body(CLIENTS_BODY, "t", COMPLETIONS),
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
