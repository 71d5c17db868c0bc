"""The installed vLLM agrees with Baton's records of its classes and request fields; differences are named."""

from pathlib import Path

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

from baton.contract.surface import SURFACE
from baton.hosts.vllm.drift import describe, differences, installed_package, load_record
from baton.hosts.vllm.versions import release_of
from baton.server.protocol.fields import FIELDS, Endpoint

REQUESTS: dict[Endpoint, set[str]] = {
    "completions": set(CompletionRequest.model_fields),
    "chat": set(ChatCompletionRequest.model_fields),
    "tokenize": {*TokenizeCompletionRequest.model_fields, *TokenizeChatRequest.model_fields},
    "detokenize": set(DetokenizeRequest.model_fields),
}


@pytest.mark.parametrize("endpoint", REQUESTS)
def test_no_request_field_of_vllms_server_is_missing(endpoint: Endpoint) -> None:
    known = {field.name for field in FIELDS if endpoint in field.endpoints}
    assert REQUESTS[endpoint] - known == set()


@pytest.fixture(scope="module")
def package() -> Path:
    package = installed_package()
    assert package is not None, "vLLM is not installed"
    return package


def test_the_installed_vllm_is_the_one_that_was_recorded(package: Path) -> None:
    from vllm import __version__

    assert differences(load_record(release_of(__version__)), describe(package)) == []


def test_each_method_of_vllms_has_a_row_and_is_forwarded(package: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from baton.hosts.vllm.forwarding import ForwardingConnector

    theirs = {
        name
        for base in (KVConnectorBase_V1, SupportsHMA)
        for name, value in vars(base).items()
        if not name.startswith("__") and (callable(value) or isinstance(value, property | classmethod))
    }
    assert theirs - SURFACE.keys() == set(), "methods without a row in baton/contract/surface.py"
    assert theirs - vars(ForwardingConnector).keys() - {"role"} == set(), "methods that are not forwarded"
