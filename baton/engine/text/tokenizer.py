"""Tokenizer of a model folder: text to ids and back, chat template, special tokens.

    tokenizer.json           vocabulary, merges, pre- and post-processing (the `tokenizers` library runs it)
    tokenizer_config.json    special tokens by role, chat template
    chat_template.jinja      the template, if the folder has it as a separate file

Imports neither torch nor transformers: the server starts in a second. Safe to use from several threads.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as FastTokenizer

from baton.checkpoints.checkpoint import read_json
from baton.core.errors import BatonError, UserError, panics_as
from baton.core.json_text import NotJson, decode_json
from baton.core.limited_file import read_limited
from baton.engine.text.chat_template import ChatTemplate
from baton.engine.text.detokenizer import BROKEN, IncrementalDetokenizer

MAX_TOKENIZER_BYTES = 256 << 20  # Tokenizers with large vocabularies have 33 MiB.
MAX_TEMPLATE_BYTES = 4 << 20
MAX_GROWTH = 64  # Most growth of a text by normalizer and decoder. Real tokenizers at most double a space.
LONG_TOKENS = 1 << 12  # This many take half a millisecond to decode.
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """A tokenizer; create it with `from_folder`."""

    def __init__(
        self,
        fast: FastTokenizer,
        chat_template: ChatTemplate | None,
        digest: str = "",
    ) -> None:
        """`digest`: names the vocabulary and its rules, the template and the special tokens."""
        self._fast = fast
        self.chat_template = chat_template
        self.digest = digest
        # Bytes of the tokens seen so far: at the beginning of a text, and elsewhere.
        self._bytes: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Raises UserError with the file that is missing or wrong."""
        root = Path(folder)
        path = root / "tokenizer.json"
        if not path.exists():
            raise UserError(
                f"tokenizer.json is missing in {root}; convert a sentencepiece tokenizer with "
                "transformers' AutoTokenizer(...).save_pretrained(...)",
                field="tokenizer",
            )
        content = read_limited(path, MAX_TOKENIZER_BYTES, field="tokenizer.json")
        _check_growth(content)
        try:
            with panics_as(_panic):
                fast = FastTokenizer.from_buffer(content)
        except Exception as error:  # The library raises plain Exception for all errors.
            raise UserError(f"cannot be read: {error}", field="tokenizer.json") from error
        # Truncation and padding are for training batches.
        fast.no_truncation()
        fast.no_padding()
        settings = read_json(root / "tokenizer_config.json", required=False)
        special_tokens = _special_tokens(
            settings, read_json(root / "special_tokens_map.json", required=False)
        )
        source = _template_source(root, settings)
        named = [hashlib.sha256(content).hexdigest(), source, sorted(special_tokens.items())]
        digest = hashlib.sha256(msgspec.json.encode(named)).hexdigest()
        return cls(fast, ChatTemplate(source, special_tokens) if source is not None else None, digest)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, with those of added tokens."""
        return self._fast.get_vocab_size()

    def json_text(self) -> str:
        """The content of a tokenizer.json, for other libraries."""
        return self._fast.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. `add_special_tokens`: add those around a text, such as a beginning-of-text
        token.

        Raises UserError for a string that is no valid text: JSON can contain half of a surrogate pair.
        """
        try:
            with panics_as(_panic):
                return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:
            raise UserError("has half of a surrogate pair, which is no character", field="prompt") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Ids beyond the vocabulary have no text; broken characters become U+FFFD."""
        with panics_as(_panic):
            if len(token_ids) > LONG_TOKENS:  # Only `decode_batch` releases the interpreter's lock.
                [text] = self._fast.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
                return str(text)
            return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A detokenizer for one stream of output tokens."""
        return IncrementalDetokenizer(
            lambda token_ids: self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    def special_text(self, token_id: int) -> str | None:
        """Name of a special token, which texts without special tokens leave out; None for another token."""
        return self._special.get(token_id)

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        """What a token adds to the bytes of a text. A part of a character has only its own bytes.

        `is_first`: the text begins with it. Some decoders then drop a space.
        """
        known = self._bytes[0 if is_first else 1]
        if (found := known.get(token_id)) is None:
            found = known[token_id] = self._find_bytes(token_id, is_first=is_first)
        return found

    def _find_bytes(self, token_id: int, *, is_first: bool) -> bytes:
        text = self.decode([token_id], skip_special_tokens=False)
        if BROKEN in text:
            return _bytes_of_part(self._fast.id_to_token(token_id) or "") or text.encode()
        if is_first or self._anchor is None:
            return text.encode()
        anchor, before = self._anchor
        after = self.decode([anchor, token_id], skip_special_tokens=False)
        return (after.removeprefix(before) if after.startswith(before) else text).encode()

    @cached_property
    def _special(self) -> dict[int, str]:
        """Names of the special tokens."""
        added = self._fast.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    @cached_property
    def _anchor(self) -> tuple[int, str] | None:
        """A token after which others are decoded as within a text, and its own text."""
        for token_id in self.encode("a", add_special_tokens=False)[-1:]:
            text = self.decode([token_id], skip_special_tokens=False)
            if text and BROKEN not in text:
                return token_id, text
        return None


class TokenizerPanic(BatonError):
    """The tokenizers library panicked, because of its own bug or a fault of the model folder."""


def _panic(message: str) -> TokenizerPanic:
    return TokenizerPanic(f"the model's tokenizer failed: {message}")


class _Steps(msgspec.Struct):
    """The parts of tokenizer.json that rewrite text."""

    normalizer: Any = None
    decoder: Any = None


def _check_growth(content: bytes) -> None:
    """Raises UserError for replacements that would make a short text gigabytes long."""
    try:
        steps = decode_json(content, _Steps)
    except NotJson:
        return  # The library reports the error.
    for name in ("normalizer", "decoder"):
        growth = _growth_of(getattr(steps, name))
        if growth > MAX_GROWTH:
            raise UserError(
                f"replacements make a text {growth:.3g} times as long; at most {MAX_GROWTH} times is allowed",
                field=f"tokenizer.json: {name}",
            )


def _growth_of(step: Any) -> float:
    """The largest number of characters that one character can become."""
    if not isinstance(step, Mapping):
        return 1.0
    growth = 1.0
    for value in step.values():
        for inner in value if isinstance(value, list) else ():
            growth *= _growth_of(inner)
    written = step.get("content", step.get("prepend"))
    if step.get("type") not in ("Replace", "Prepend") or not isinstance(written, str):
        return growth
    pattern = step.get("pattern")
    fixed = pattern.get("String") if isinstance(pattern, Mapping) else None
    if isinstance(fixed, str) and fixed:
        return growth * max(1.0, len(written) / len(fixed))
    return growth * (1 + len(written))  # A regular expression can match between any two characters.


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies (`bytes_to_unicode` of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # Byte fallback, of sentencepiece.


def _bytes_of_part(token: str) -> bytes:
    """The bytes of a token whose text alone is broken; empty if it stands for none."""
    if (named := _BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes.fromhex(named[1])
    return bytes(_BYTES[char] for char in token) if all(char in _BYTES for char in token) else b""


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Tokens by role, from the first source that has the role.

    A token is a string or an object with `content`.
    """
    found: dict[str, str] = {}
    for role in _ROLES:
        for source in sources:
            value = source.get(role)
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str):
                found[role] = content
                break
    return found


def _template_source(root: Path, settings: Mapping[str, Any]) -> str | None:
    apart = root / "chat_template.jinja"
    if apart.exists():
        content = read_limited(apart, MAX_TEMPLATE_BYTES, field=apart.name)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"is not text: {error}", field=apart.name) from error
    value = settings.get("chat_template")
    if isinstance(value, list):  # Several named templates; the default one is for conversations.
        named = [entry for entry in value if isinstance(entry, Mapping)]
        value = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None
