"""Log handlers: Baton's log uses vLLM's handlers, unless the operator has configured its own."""

from __future__ import annotations

import logging


def share_log() -> None:
    ours, theirs = logging.getLogger("baton"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = False
