"""The engine that gives the client the first token: chosen for each request and its pair of engines.

WHOLE      D gives all tokens.
VERIFY     P gives the first token and stops after it (`baton_first_token`). D gives it too, and has to give
           the same. Exact for every request, since each engine sees the whole request.
CONTINUE   P gives the first token in an answer of one token. D continues after it as after a prompt
           (`kept_token`). The engines cannot disagree. Exact for requests that `exact.can_split` accepts.
OVERLAP    As CONTINUE, but D's leg left before P had answered: D gives the token too. If it gives another
           one, it is asked again, to continue after P's. Not for models with recurrent states: P's state
           after the whole prompt is of no use to a D that has to give the first token.
"""

from enum import Enum, auto

from baton.router.fleet.engine import Engine
from baton.router.identity import Kind


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
    # In push they would overlap: two kinds of engines draw unlike tokens, however they are seeded.
    if producer == "vllm" and consumer == "baton" and may_continue and not is_push:
        return FirstTokenMode.CONTINUE
    return FirstTokenMode.WHOLE


def can_continue(consumer: Engine) -> bool:
    """After tokens of another engine. Baton's server reports its length if it can."""
    return consumer.kind == "vllm" or (consumer.kind == "baton" and consumer.max_model_len is not None)
