"""Who says the first token to the client: decided for each pair of engines, and for each request.

WHOLE     D says all tokens.
AGREE     P says it and stops behind it, both by Baton's `baton_first_token`; D says it too, and has to
          agree. Exact for every request, since each engine judges the whole answer.
BEHIND    P says it in an answer of one token, and D goes on behind it as behind a prompt (`said_token`).
          Nobody can disagree; exact for the requests that `exact.can_go_behind` knows.
OVERLAP   As BEHIND, but D's leg left before P had said it: D says it too. If it says another one, it is
          asked again, to go on behind P's.
"""

from enum import Enum, auto

from baton.router.fleet import Engine, Kind


class Way(Enum):
    WHOLE = auto()
    AGREE = auto()
    BEHIND = auto()
    OVERLAP = auto()


def choose_way(
    producer: Kind | None,
    consumer: Kind | None,
    *,
    is_push: bool,
    may_agree: bool,
    may_go_behind: bool,
) -> Way:
    if producer == consumer == "baton" and may_agree:
        return Way.AGREE
    if producer is not None and consumer == "vllm" and may_go_behind:
        return Way.OVERLAP if is_push else Way.BEHIND
    # In push they would overlap: two kinds of engines draw unlike tokens, however they are seeded.
    if producer == "vllm" and consumer == "baton" and may_go_behind and not is_push:
        return Way.BEHIND
    return Way.WHOLE


def can_go_on(consumer: Engine, *, is_chat: bool) -> bool:
    """Behind another engine's token. Baton's server takes no chat in ids; that it knows how, it says by
    naming its length.
    """
    if consumer.kind == "baton":
        return consumer.max_model_len is not None and not is_chat
    return consumer.kind == "vllm"
