"""Log-probabilities of tokens that are parts of characters: bytes, offsets and keys."""

import asyncio
import json
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from baton.checkpoints.random_tokenizer import write_tokenizer
from baton.engine.api import EngineOutput, EngineRequest, PromptLogprobs, TokenLogprob, TokenLogprobs
from baton.engine.text.detokenizer import BROKEN
from baton.engine.text.tokenizer import Tokenizer
from baton.http.workers import WorkerPool
from baton.server.logprobs import LogprobFormat
from baton.server.tokens import PromptEncoder
from tests.server.fakes import LiveServer, ScriptedEngine, model_config, service_around

TEXT = "a 世🌍é e\u0301 b"
NUM_TOP = 3


def byte_fallback() -> FastTokenizer:
    """A tokenizer like that of Llama 2: words with a space, and bytes for characters that are in no word."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "e", "▁a", "▁b", "é", "ab", "▁ab", "\u0301"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    model = models.BPE(
        {word: index for index, word in enumerate(words)},
        merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    fast = FastTokenizer(model)
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    fast.add_special_tokens(["<s>", "</s>"])
    return fast


def metaspace() -> FastTokenizer:
    fast = byte_fallback()
    fast.normalizer = None
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return fast


@pytest.fixture(scope="module", params=["byte level", "byte fallback", "metaspace"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    if request.param == "byte level":
        write_tokenizer(folder, vocab=512, with_bos=True, max_position=512)
    else:
        fast = byte_fallback() if request.param == "byte fallback" else metaspace()
        fast.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return Tokenizer.from_folder(folder)


def vocabulary(tokenizer: Tokenizer) -> int:
    return tokenizer._fast.get_vocab_size()


def rows(token_ids: Sequence[int], num_tokens: int, num_top: int = NUM_TOP) -> list[TokenLogprobs]:
    """The most likely tokens are neighbours of the chosen one: among the bytes, other parts of characters."""
    return [
        TokenLogprobs(
            TokenLogprob(chosen, -1.0, 2),
            tuple(TokenLogprob((chosen + 1 - i) % num_tokens, -0.5 * (i + 1), i + 1) for i in range(num_top)),
        )
        for chosen in token_ids
    ]


def entries_of(tokenizer: Tokenizer, token_ids: Sequence[int], **options: Any) -> list[TokenLogprobs]:
    return rows(token_ids, vocabulary(tokenizer), **options)


def check_whole(tokenizer: Tokenizer, token_ids: list[int], text: str, **options: Any) -> None:
    """Check both formats of tokens whose text has no broken character."""
    entries = entries_of(tokenizer, token_ids)
    content = LogprobFormat(tokenizer, **options).chat(entries, num_top=NUM_TOP).content or []
    assert b"".join(bytes(entry.bytes or ()) for entry in content) == text.encode()
    shown = LogprobFormat(tokenizer, **options).completion(entries, num_top=NUM_TOP)
    assert shown.text_offset == sorted(shown.text_offset)
    for token_id, token, offset in zip(token_ids, shown.tokens, shown.text_offset, strict=True):
        if tokenizer.special_text(token_id) is None:
            assert text.startswith(token, offset)
    assert [entry.token for entry in content] == shown.tokens


@pytest.mark.parametrize("skips", [True, False])
@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=BROKEN + "▁")))
def test_bytes_of_any_text_join_to_it(tokenizer: Tokenizer, skips: bool, text: str) -> None:
    token_ids = tokenizer.encode(text)
    decoded = tokenizer.decode(token_ids, skip_special_tokens=skips)
    if BROKEN not in decoded:
        check_whole(tokenizer, token_ids, decoded, skip_special_tokens=skips)


@settings(deadline=None)
@given(data=st.data())
def test_any_tokens_have_offsets_in_their_text_and_all_entries(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    token_ids = data.draw(st.lists(st.integers(0, vocabulary(tokenizer) - 1), min_size=1, max_size=12))
    num_top, as_ids = data.draw(st.integers(0, 20)), data.draw(st.booleans())
    text = tokenizer.decode(token_ids)
    entries = entries_of(tokenizer, token_ids, num_top=num_top)
    shown = LogprobFormat(tokenizer, as_token_ids=as_ids).completion(entries, num_top=num_top)
    assert shown.text_offset == sorted(shown.text_offset)
    assert all(0 <= offset <= len(text) for offset in shown.text_offset)
    for token, top, entry in zip(shown.tokens, shown.top_logprobs, entries, strict=True):
        assert top is not None
        assert token in top
        assert len(top) == len({one.token_id for one in (*entry.top, entry.chosen)})
    if BROKEN not in text:
        check_whole(tokenizer, token_ids, text, as_token_ids=False)
    cut = data.draw(st.integers(0, len(token_ids)))
    form = LogprobFormat(tokenizer, as_token_ids=as_ids)
    parts = [form.completion(part, num_top=num_top) for part in (entries[:cut], entries[cut:])]
    for name in shown.__struct_fields__:
        assert [one for part in parts for one in getattr(part, name)] == getattr(shown, name), "streamed"


def test_parts_of_characters_have_their_own_bytes_and_keys(tokenizer: Tokenizer) -> None:
    parts = tokenizer.encode("世", add_special_tokens=False)[-3:]
    assert [tokenizer.token_bytes(part) for part in parts] == [b"\xe4", b"\xb8", b"\x96"]
    shown = LogprobFormat(tokenizer).completion(entries_of(tokenizer, parts), num_top=NUM_TOP)
    assert shown.tokens == ["", "", "世"]
    assert shown.text_offset == [0, 0, 0]
    [first, _, last] = shown.top_logprobs
    assert first is not None
    assert last is not None
    assert [key for key in first if key] == [r"bytes:\xe5", r"bytes:\xe3"]
    assert list(last) == ["丗", "世", "丕"]


def test_tokens_of_equal_bytes_keep_their_entries(tokenizer: Tokenizer) -> None:
    """The library may have a token for a character that is also that of a byte."""
    candidates = [TokenLogprob(token_id, -1.0 - token_id, 1) for token_id in range(vocabulary(tokenizer))]
    [top] = (
        LogprobFormat(tokenizer)
        .completion([TokenLogprobs(candidates[0], tuple(candidates))], num_top=len(candidates))
        .top_logprobs
    )
    assert top is not None
    assert sorted(top.values()) == sorted(one.logprob for one in candidates)


def test_a_stream_of_any_tokens_has_the_text_of_all(tokenizer: Tokenizer) -> None:
    """Byte fallback decodes the bytes of several characters as a whole, so a part breaks those before it."""
    for text in (TEXT, "世🌍" * 9, "🌍e🌍🌍 世"):
        stream = tokenizer.detokenizer()
        pieces = [stream.push([token_id]) for token_id in tokenizer.encode(text, add_special_tokens=False)]
        assert "".join([*pieces, stream.flush()]) == text
    stream = tokenizer.detokenizer()
    token_ids = tokenizer.encode("世🌍", add_special_tokens=False)
    assert stream.push(token_ids[:-1]) + stream.flush() in ("世" + BROKEN, "世" + 3 * BROKEN)


# --- Through the server ----------------------------------------------------------------------------


class TokenEngine(ScriptedEngine):
    """Answers with the tokens `answer_ids`."""

    answer_ids: list[int]
    num_tokens: int

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        params = request.sampling_params
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            entries = rows(request.prompt_token_ids[1:], self.num_tokens, params.prompt_logprobs)
            shown = [one for entry in entries for one in (entry.chosen, *entry.top)]
            prompt_logprobs = PromptLogprobs(
                1 + params.prompt_logprobs,
                array("i", [one.token_id for one in shown]).tobytes(),
                array("f", [one.logprob for one in shown]).tobytes(),
                array("i", [entry.chosen.rank for entry in entries]).tobytes(),
            )
        for index in range(len(request.output_token_ids), len(self.answer_ids)):
            await asyncio.sleep(0)
            token_ids = self.answer_ids[index : index + 1]
            yield EngineOutput(
                request_id=request.request_id,
                new_token_ids=token_ids,
                new_logprobs=None if params.logprobs is None else rows(token_ids, self.num_tokens),
                prompt_logprobs=None if index else prompt_logprobs,
                finish_reason="length" if index + 1 == len(self.answer_ids) else None,
            )


@pytest.fixture(scope="module")
def http(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    engine = TokenEngine()
    engine.answer_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    engine.num_tokens = vocabulary(tokenizer)
    model, workers = model_config(vocab_size=engine.num_tokens, max_model_len=512), WorkerPool()
    encoder = PromptEncoder(tokenizer, model, workers)
    try:
        with (
            service_around(engine, model_config=model, tokenizer=tokenizer, encoder=encoder) as service,
            LiveServer(service) as server,
            server.client() as client,
        ):
            yield client
    finally:
        encoder.close()
        workers.close()


def streamed(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    lines = http.post(path, json={**body, "stream": True}).raise_for_status().text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [choice for event in events[:-1] for choice in json.loads(event)["choices"]]


@pytest.mark.parametrize("echo", [False, True])
def test_completions_whole_and_streamed(http: httpx.Client, tokenizer: Tokenizer, echo: bool) -> None:
    body = {"prompt": "é 世", "max_tokens": 99, "logprobs": NUM_TOP, "echo": echo}
    [choice] = http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    text, shown = choice["text"], choice["logprobs"]
    assert text == ("é 世" if echo else "") + TEXT
    names = {tokenizer.special_text(token_id) for token_id in range(vocabulary(tokenizer))}
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        assert token in names or text.startswith(token, offset) or (echo and token == " é")
    assert shown["text_offset"] == sorted(shown["text_offset"])
    assert all(top is None or len(top) >= NUM_TOP for top in shown["top_logprobs"])
    chunks = streamed(http, "/v1/completions", **body)
    for name in shown:
        assert [one for chunk in chunks for one in chunk["logprobs"][name]] == shown[name]


def test_chats_whole_and_streamed(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": NUM_TOP}
    [choice] = http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == TEXT.encode()
    assert "".join(entry["token"] for entry in content) == TEXT
    chunks = [c for c in streamed(http, "/v1/chat/completions", **body) if c["logprobs"]]
    assert [entry for chunk in chunks for entry in chunk["logprobs"]["content"]] == content


def test_the_rest_of_an_answer_has_the_logprobs_of_the_whole(
    http: httpx.Client, tokenizer: Tokenizer
) -> None:
    """Another engine's last token may be a part of a character."""
    body = {"prompt": "x", "max_tokens": 99, "logprobs": NUM_TOP}
    whole = [chunk["logprobs"] for chunk in streamed(http, "/v1/completions", **body)]
    given = tokenizer.encode(TEXT, add_special_tokens=False)
    for num_given in range(1, len(given)):
        params = {"baton_output_token_ids": given[:num_given]}
        rest = streamed(http, "/v1/completions", **body, kv_transfer_params=params)
        assert [chunk["logprobs"] for chunk in rest] == whole[num_given:]


def test_prompt_logprobs_show_a_character_with_the_token_that_ends_it(
    http: httpx.Client, tokenizer: Tokenizer
) -> None:
    body = {"prompt": "世", "max_tokens": 1, "prompt_logprobs": 0}
    [choice] = http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    shown = [next(iter(row.values()))["decoded_token"] for row in choice["prompt_logprobs"] if row]
    assert shown[-3:] == ["", "", "世"][-len(shown) :]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_end_with_a_text_that_a_stop_string_ends(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 99, "logprobs": 0, "stop": "é e"}
    if stream:
        choices = streamed(http, "/v1/completions", **body)
    else:
        choices = http.post("/v1/completions", json=body).json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    assert text == "a 世🌍"
    assert choices[-1]["logprobs"]["text_offset"][-1] == len(text)
