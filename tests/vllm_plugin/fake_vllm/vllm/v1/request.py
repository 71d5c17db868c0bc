"""The part of `vllm.v1.request` that Baton reads."""

from __future__ import annotations

from typing import Any


class Request:
    def __init__(self, request_id: str, prompt_token_ids: list[int] | None, cache_salt: Any = None) -> None:
        raise NotImplementedError
