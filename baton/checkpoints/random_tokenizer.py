"""Writer of a small byte-level BPE tokenizer with a ChatML template, trained in a second on Python's manual.

Every text round-trips, because every byte is a token. The corpus is part of the interpreter
(`pydoc_data.topics`), so no network is needed and the same Python makes the same vocabulary.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from baton.core.errors import UserError

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
BEGIN_OF_TEXT = "<|begin_of_text|>"

SMALLEST_VOCAB = 512  # 256 bytes, the special tokens, and enough merges for tokens to resemble words.
_CORPUS_CHARS = 400_000
_LARGEST_TRAINED_VOCAB = 8192  # More merges than the corpus has pairs that occur twice.

CHAT_TEMPLATE = (
    "{{ bos_token if bos_token is defined and bos_token else '' }}"
    "{% if tools %}<|im_start|>system\n"
    "You may call these functions:\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class WrittenTokenizer(NamedTuple):
    """Properties of the tokenizer for the model's configuration."""

    num_tokens: int  # Used ids; the model's vocabulary may be padded.
    eos_token_ids: tuple[int, ...]  # The end of a turn first, then the end of the text.
    bos_token_id: int | None
    pad_token_id: int
    mute_token_ids: frozenset[int]  # Special tokens, and bytes that are not a character by themselves.


def write_tokenizer(folder: Path, *, vocab: int, with_bos: bool, max_position: int) -> WrittenTokenizer:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    if vocab < SMALLEST_VOCAB:
        raise UserError(f"must be at least {SMALLEST_VOCAB}, is {vocab}", field="vocab")
    special = [END_OF_TEXT, TURN_START, TURN_END, *([BEGIN_OF_TEXT] if with_bos else [])]
    tokenizer = _train(min(vocab, _LARGEST_TRAINED_VOCAB), special)
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN_OF_TEXT} $A",
            pair=f"{BEGIN_OF_TEXT} $A {BEGIN_OF_TEXT} $B",
            special_tokens=[(BEGIN_OF_TEXT, special.index(BEGIN_OF_TEXT))],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": TURN_END, "pad_token": END_OF_TEXT}
    if with_bos:
        names["bos_token"] = BEGIN_OF_TEXT
    settings = {
        **names,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n")
    return WrittenTokenizer(
        num_tokens=tokenizer.get_vocab_size(),
        eos_token_ids=(special.index(TURN_END), special.index(END_OF_TEXT)),
        bos_token_id=special.index(BEGIN_OF_TEXT) if with_bos else None,
        pad_token_id=special.index(END_OF_TEXT),
        mute_token_ids=frozenset(_mute_token_ids(tokenizer, len(special))),
    )


def _train(vocab: int, special: list[str]) -> FastTokenizer:
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def _corpus() -> Iterator[str]:
    """Lines of the manual, up to a size that trains in a second."""
    left = _CORPUS_CHARS
    for _, text in sorted(topics.items()):
        for line in text.splitlines(keepends=True):
            if left <= 0:
                return
            left -= len(line)
            yield line


def _mute_token_ids(tokenizer: FastTokenizer, num_special: int) -> Iterator[int]:
    yield from range(num_special)
    for token_id in range(num_special, tokenizer.get_vocab_size()):
        if "\ufffd" in tokenizer.decode([token_id]):
            yield token_id
