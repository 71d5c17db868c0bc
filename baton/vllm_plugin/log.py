"""Baton's log goes where vLLM's goes, unless the operator has given it a place of its own."""

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
