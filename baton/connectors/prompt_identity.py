"""Identity of a request's KV beside its tokens: the same bytes for every connector, or none.

    extra_of(request) --> bytes                 hashed with the tokens, for tickets and names of chunks
                      --> raise UnnamedPrompt   nothing identifies its KV: it is not lent, fetched or stored

    cache salt, media with positions      as the host has them
    adapter                               its name, and a digest of its files (`baton.connectors.adapters`)
    prompt embeddings                     a digest of their bytes, and of the positions that have tokens

These are all that vLLM puts into the hash of a block. An input of a request that Baton does not know may
change its KV, so a request that has one cannot be named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from baton.connectors.adapters import Adapters
from baton.contract import host
from baton.core.errors import BadTransferParams
from baton.core.hashing import extra_key
from baton.core.reasons import Fault
from baton.core.transfer_params import FIELD


class UnnamedPrompt(BadTransferParams):
    def __init__(self, message: str) -> None:
        super().__init__(f"cannot be honoured: the request {message}", field=FIELD, reason=Fault.UNNAMED)


class RequestNames:
    """Names what the requests of one host are computed from.

    Args:
        adapters: of the host; None: requests with adapters cannot be named.
        unknown_inputs: attributes of the host's requests that Baton does not know.
    """

    def __init__(self, adapters: Adapters | None = None, unknown_inputs: Sequence[str] = ()) -> None:
        self._adapters = adapters
        self._unknown_inputs = tuple(unknown_inputs)
        self._embeds: WeakKeyDictionary[host.Request, str] = WeakKeyDictionary()  # Digests.

    def seen(self, request: host.Request) -> None:
        """Called when a request comes, before the host computes any of it."""
        if self._adapters is not None and getattr(request, "lora_request", None) is not None:
            self._adapters.seen(request)

    def extra_of(self, request: host.Request) -> bytes:
        """Unambiguous bytes of all that the KV depends on besides the tokens. Raises UnnamedPrompt."""
        if request.prompt_token_ids is None:
            raise UnnamedPrompt("has no tokens")
        if getattr(request, "resumable", False):
            raise UnnamedPrompt("is a session whose inputs may still change")
        if getattr(getattr(request, "pooling_params", None), "extra_kwargs", None):
            raise UnnamedPrompt("has extra_kwargs, which some pooling models compute with")
        for name in self._unknown_inputs:
            if _is_set(getattr(request, name, None)):
                raise UnnamedPrompt(f"has {name}, which this release does not know")
        media = getattr(request, "mm_features", None) or ()
        return extra_key(
            cache_salt=request.cache_salt,
            adapter=self._adapter_of(request),
            media=[f"{_place_of(item.mm_position)}:{item.identifier}" for item in media],
            embeds=self._embeds_of(request),
        )

    def _adapter_of(self, request: host.Request) -> str | None:
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return None
        digest = None if self._adapters is None else self._adapters.digest_of(request)
        if digest is None:
            raise UnnamedPrompt(
                f"has the adapter {adapter.lora_name!r}, whose content is not known here: it is no folder of "
                "this machine, its files have changed, or they have not been read yet"
            )
        return f"{digest} {adapter.lora_name}"

    def _embeds_of(self, request: host.Request) -> str | None:
        embeds = getattr(request, "prompt_embeds", None)
        if embeds is None:
            return None
        if request not in self._embeds:
            self._embeds[request] = embeds_digest(embeds, getattr(request, "prompt_is_token_ids", None))
        return self._embeds[request]


WITHOUT_ADAPTERS: Final = RequestNames()


def embeds_digest(embeds: Any, is_token: Sequence[bool] | None) -> str:
    """Digest of embeddings, a tensor. `is_token`: positions where the token counts instead; None: nowhere."""
    import torch  # Where there are embeddings, there is torch.

    form = [str(embeds.dtype), list(embeds.shape), None if is_token is None else list(map(int, is_token))]
    digest = hashlib.sha256(json.dumps(form).encode() + b"\n")
    digest.update(embeds.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _place_of(position: Any) -> str:
    """Name vLLM's PlaceholderRange: its tokens, and which of them the medium replaces (`is_embed`)."""
    place, mask = f"{position.offset}+{position.length}", position.is_embed
    return place if mask is None else f"{place}/{hashlib.sha256(bytes(mask.tolist())).hexdigest()}"


def _is_set(value: Any) -> bool:
    return not (value is None or (isinstance(value, int) and value == 0))
