"""Tokenizer, detokenizer and chat templates, compared with the libraries that define them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import UserError
from baton.engine.text.detokenizer import IncrementalDetokenizer
from baton.engine.text.tokenizer import LONG_TOKENS, Tokenizer, TokenizerPanic

TEXT = "Hello, wörld!\n  日本語 😀 e\u0301 <|im_end|> def f(x): return x"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why <b>&</b> 'how'?"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & 'c' é"}}]


@pytest.fixture(scope="module")
def tokenizer(checkpoint_of: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_folder(checkpoint_of("llama"))


@pytest.fixture(scope="module")
def reference(checkpoint_of: Callable[[str], Path]) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(checkpoint_of("llama"))


@settings(deadline=None)
@given(text=st.text())
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("skips", [True, False])
def test_a_long_text_is_that_of_transformers(tokenizer: Tokenizer, reference: Any, skips: bool) -> None:
    """More than LONG_TOKENS ids take another call of the library, which releases the interpreter's lock."""
    ids = tokenizer.encode(TEXT) * (LONG_TOKENS // 8)
    assert len(ids) > LONG_TOKENS
    assert tokenizer.decode(ids, skip_special_tokens=skips) == reference.decode(
        ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
    )


def test_ids_are_those_of_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    for special in (True, False):
        expected = reference(TEXT, add_special_tokens=special)["input_ids"]
        assert tokenizer.encode(TEXT, add_special_tokens=special) == expected
        assert tokenizer.decode(expected, skip_special_tokens=special) == reference.decode(
            expected, skip_special_tokens=special
        )
    assert tokenizer.encode("") == [reference.bos_token_id]


def render(tokenizer: Tokenizer, messages: Any, **options: Any) -> str:
    assert tokenizer.chat_template is not None
    return tokenizer.chat_template.render(messages, **{"add_generation_prompt": True, **options})


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_chats_are_rendered_as_transformers_renders_them(
    tokenizer: Tokenizer, reference: Any, add_generation_prompt: bool, tools: Any
) -> None:
    options = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    expected = reference.apply_chat_template(CHAT, tokenize=False, **options)
    assert render(tokenizer, CHAT, **options) == expected
    ids = tokenizer.encode(expected, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert ids.count(reference.bos_token_id) == 1


@pytest.mark.parametrize("messages", [[{"role": "alien", "content": "x"}], [{"content": "x"}], [{}]])
def test_a_chat_that_the_template_refuses_is_the_users_fault(tokenizer: Tokenizer, messages: Any) -> None:
    with pytest.raises(UserError) as caught:
        render(tokenizer, messages)
    assert caught.value.field == "messages"


class PanicException(BaseException):
    """An exception like those that the tokenizers library raises from Rust."""


def test_a_panic_of_the_library_is_an_error_of_one_request() -> None:
    class Panicking:
        def encode(self, text: str, add_special_tokens: bool) -> None:
            raise PanicException("index out of bounds")

    fast: Any = Panicking()
    with pytest.raises(TokenizerPanic, match="index out of bounds"):
        Tokenizer(fast, None).encode("a")


def test_a_string_that_is_no_text_is_the_users_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="surrogate"):
        tokenizer.encode("a\ud800")


def written(folder: Path, source: Path, **settings: Any) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_templates_are_found_wherever_folders_keep_them(
    tmp_path: Path, checkpoint_of: Callable[[str], Path]
) -> None:
    source = checkpoint_of("llama")
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}yes"}]
    eos = {"content": "<|im_end|>", "lstrip": False}
    folder = written(tmp_path / "named", source, chat_template=named, eos_token=eos)
    tokenizer = Tokenizer.from_folder(folder)
    assert render(tokenizer, CHAT) == "<|im_end|>yes"
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%%') }}"
    )
    assert render(Tokenizer.from_folder(folder), CHAT) == '"Be brief."%'
    assert Tokenizer.from_folder(written(tmp_path / "bare", source)).chat_template is None


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> None:
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    folder = written(tmp_path / "evil", checkpoint_of("llama"), chat_template=escape)
    with pytest.raises(UserError, match="unsafe"):
        render(Tokenizer.from_folder(folder), CHAT)


def test_broken_folders_are_named(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
    folder = written(tmp_path / "broken", checkpoint_of("llama"), chat_template="{% for %}")
    with pytest.raises(UserError, match="chat_template: is not a valid template"):
        render(Tokenizer.from_folder(folder), CHAT)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.from_folder(folder)


def streamed(decode: Callable[[Sequence[int]], str], ids: list[int], chunk: int) -> str:
    detokenizer = IncrementalDetokenizer(decode)
    pieces = [detokenizer.push(ids[start : start + chunk]) for start in range(0, len(ids), chunk)]
    return "".join(pieces) + detokenizer.flush()


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(0, 800), max_size=60), chunk=st.integers(1, 5))
def test_a_stream_of_any_ids_joins_to_the_text_of_all(
    tokenizer: Tokenizer, ids: list[int], chunk: int
) -> None:
    assert streamed(tokenizer.decode, ids, chunk) == tokenizer.decode(ids)


@given(content=st.binary(max_size=60))
def test_a_stream_of_any_bytes_joins_to_the_text_of_all(content: bytes) -> None:
    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    assert streamed(decode, list(content), 1) == decode(list(content))


@given(words=st.lists(st.sampled_from([" a", " b", "c", "", " "]), max_size=50))
def test_a_decoder_that_drops_the_first_space_keeps_the_others(words: list[str]) -> None:
    def decode(ids: Sequence[int]) -> str:
        return "".join(words[i] for i in ids).removeprefix(" ")

    ids = list(range(len(words)))
    assert streamed(decode, ids, 1) == decode(ids)


@given(text=st.text(alphabet="aé日😀", max_size=40))
def test_no_half_character_is_ever_emitted(text: str) -> None:
    detokenizer = IncrementalDetokenizer(lambda ids: bytes(ids).decode(errors="replace"))
    pieces = [detokenizer.push([byte]) for byte in text.encode()]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", {"chat_template": "{{ messages[0].content }} other"}),
        ("tokenizer_config.json", {"bos_token": "<|im_end|>"}),
        ("tokenizer.json", {"post_processor": None}),
        ("tokenizer_config.json", {"model_max_length": 7}),
    ],
    ids=["template", "bos", "tokenizer", "nothing that changes a text"],
)
def test_the_digest_names_what_makes_tokens_of_texts(
    tokenizer: Tokenizer, checkpoint_of: Callable[[str], Path], tmp_path: Path, file: str, change: Any
) -> None:
    for source in checkpoint_of("llama").glob("*token*"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    assert Tokenizer.from_folder(tmp_path).digest == tokenizer.digest
    content = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps({**content, **change}))
    is_other = "model_max_length" not in change
    assert (Tokenizer.from_folder(tmp_path).digest != tokenizer.digest) == is_other
