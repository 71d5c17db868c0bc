"""Lookup of a request's prompt in the engines' caches, if the prompt is long enough."""

from collections.abc import Mapping
from typing import Any

from baton.router.fleet.policies import RoutedRequest
from baton.router.fleet.view import FleetView
from baton.router.request.events import Look
from baton.router.values.dialects import CHAT, COMPLETIONS, Dialect
from baton.router.values.legs import Shape

# Fields of a chat that make its prompt, and that /tokenize takes.
TOKENIZED = (
    "model",
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)


def look_for(
    view: FleetView,
    body: Mapping[str, Any],
    shape: Shape,
    routed: RoutedRequest,
    now_s: float,
    dialect: Dialect,
) -> Look | None:
    """The lookup for a request. None: it needs none. Raises RouterError as `FleetView.choose`."""
    least, salt = view.look_min_tokens, body.get("cache_salt")
    if least is None or shape.num_prompt_tokens < least:
        return None
    adapter, salt = view.fleet.models.adapter_of(routed), salt if isinstance(salt, str) else None
    if dialect is COMPLETIONS:
        return None if body.get("prompt") is None else Look(body["prompt"], adapter, salt)
    is_tokenized = dialect is CHAT and shape.is_text
    tokenizer = view.choose("decode", routed, [], now_s) if is_tokenized else None
    if tokenizer is None or body.get("messages") is None:
        return None
    chat = {name: body[name] for name in TOKENIZED if name in body}
    return Look(None, adapter, salt, tokenizer, chat)
