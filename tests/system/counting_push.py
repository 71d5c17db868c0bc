"""BatonPushConnector in processes that write down each signed token that they verify.

The environment variable COUNT_FILE names the file; each line is a process id and a token.
"""

import os
from typing import Any

from baton.connectors.push import BatonPushConnector
from baton.protocol.signed_token import TokenSigner

__all__ = ["BatonPushConnector"]

_open_token = TokenSigner.open


def _open_and_count(self: TokenSigner[Any], text: str, *keys: bytes | None) -> Any:
    with open(os.environ["COUNT_FILE"], "a") as file:
        file.write(f"{os.getpid()} {text}\n")
    return _open_token(self, text, *keys)


TokenSigner.open = _open_and_count  # type: ignore[method-assign]
