"""Mode of the first token: which engine gives it to the client, for each request and its pair of engines.

WHOLE      D gives all tokens.
VERIFY     P gives the first token and stops after it (`baton_first_token`). D gives it too, and has to give
           the same. Exact for every request, since each engine sees the whole request.
CONTINUE   P gives the first token in an answer of one token. D continues after it as after a prompt
           (`kept_token`). The engines cannot disagree. Exact for requests that `exact.can_split` accepts.
OVERLAP    Like CONTINUE, but D's leg left before P had answered: D gives the token too. If D gives another
           token, the router asks it again, to continue after P's. Not for models with recurrent states: a D
           that has to give the first token cannot use P's state after the whole prompt.
"""

from enum import Enum, auto

from baton.router.fleet.engine import Engine
from baton.router.values.identity import Kind


class FirstTokenMode(Enum):
    WHOLE = auto()
    VERIFY = auto()
    CONTINUE = auto()
    OVERLAP = auto()


def choose_mode(
    producer: Kind | None,
    consumer: Kind | None,
    *,
    is_push: bool,
    may_verify: bool,
    may_continue: bool,
    has_states: bool = False,
) -> FirstTokenMode:
    if producer == consumer == "baton" and may_verify:
        return FirstTokenMode.VERIFY
    if producer is not None and consumer == "vllm" and may_continue and not (is_push and has_states):
        return FirstTokenMode.OVERLAP if is_push else FirstTokenMode.CONTINUE
    # These kinds draw unlike tokens even with equal seeds, so they cannot overlap in a push.
    if producer == "vllm" and consumer == "baton" and may_continue and not is_push:
        return FirstTokenMode.CONTINUE
    return FirstTokenMode.WHOLE


def can_continue(consumer: Engine) -> bool:
    """Whether D can continue after tokens of another engine. A Baton engine reports its length if it can."""
    return consumer.kind == "vllm" or (consumer.kind == "baton" and consumer.max_model_len is not None)
