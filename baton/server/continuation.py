"""Rest of an answer that another engine has begun, exactly as that engine would have given it. Requested with

    kv_transfer_params: {"baton_output_token_ids": [17, 4, 99], ...}

in a body that is otherwise the client's own, limits included. The tokens count as output of this engine, so
draws, penalties, limits and stop strings are those of the whole answer. The stream has only what comes after
them: text that they hold back (a part of a character, or of a stop string) is shown with the next tokens.

A router learns the tokens of a stream with

    kv_transfer_params: {"baton_token_ids": true, ...}

Each chunk that has tokens then has `,"token_ids":[17,4]` in its choice: the tokens since the last chunk. The
chunks are otherwise, byte for byte, those without the flag.
"""

from baton.server.text import SampleText
from baton.server.transfer_ask import given_refusal


def check_goes_on(
    given: list[int], *, max_tokens: int, min_tokens: int, stop_token_ids: frozenset[int]
) -> None:
    """Raise UserError if the answer has ended with these tokens or before."""
    if len(given) >= max_tokens:
        raise given_refusal(
            f"has {len(given)} tokens of an answer of at most {max_tokens}; the client has all of it"
        )
    if stop_token_ids.isdisjoint(given):
        return
    for position, token_id in enumerate(given, start=1):
        if token_id in stop_token_ids and position >= min_tokens:
            raise given_refusal(
                f"has the stop token {token_id}, which ends the answer; the client has all of it"
            )


def replay(given: list[int], text: SampleText) -> str:
    """Put `text` into its state after the given tokens. Returns what it has shown of them.

    Raises UserError if a stop string ends it there.
    """
    shown = ""
    for token_id in given:
        shown += text.feed(token_id)
        if text.stopped_by is not None:
            raise given_refusal(
                f"has the stop string {text.stopped_by!r}, which ends the answer; the client has all of it"
            )
    return shown
