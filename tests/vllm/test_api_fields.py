"""The table of request fields has every field of the installed vLLM's server."""

import pytest

from baton.server.protocol.fields import FIELDS, Endpoint

pytest.importorskip("vllm")

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

OF_VLLM: dict[Endpoint, set[str]] = {
    "completions": set(CompletionRequest.model_fields),
    "chat": set(ChatCompletionRequest.model_fields),
    "tokenize": {*TokenizeCompletionRequest.model_fields, *TokenizeChatRequest.model_fields},
    "detokenize": set(DetokenizeRequest.model_fields),
}


@pytest.mark.parametrize("endpoint", OF_VLLM)
def test_no_field_of_vllm_is_missing(endpoint: Endpoint) -> None:
    known = {field.name for field in FIELDS if endpoint in field.endpoints}
    assert OF_VLLM[endpoint] - known == set()
