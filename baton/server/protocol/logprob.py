"""`prompt_logprobs` of an answer, in vLLM's format.

A list with one entry for each token of the prompt: null for the first, else an object from token ids to
`PromptLogprob`, the token itself first, then the most likely ones. Answers hold the list as JSON.
"""

import msgspec


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int  # 1 is the most likely token.
    decoded_token: str
