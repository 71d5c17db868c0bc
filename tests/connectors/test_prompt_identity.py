"""Names of requests: all that a host computes the KV from is in them, and what is not known has none."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.connectors.adapters import Adapters
from baton.connectors.prompt_identity import WITHOUT_ADAPTERS, RequestNames, UnnamedPrompt
from baton.core.hashing import block_hash, root_hash, tail_hash
from tests.connectors.pull_world import BLOCK, Engine, FakeRequest, World
from tests.connectors.push_world import PushWorld

TOKENS = [1, 2, 3, 4, 5, 6]


@dataclass(frozen=True)
class Adapter:
    """vLLM's LoRARequest."""

    lora_path: str
    lora_name: str = "x"
    lora_int_id: int = 1
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


def write_adapter(folder: Path, weights: bytes = b"weights", alpha: int = 16) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(f'{{"r": 8, "lora_alpha": {alpha}}}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "README.md").write_text(str(folder))  # vLLM does not read this file.
    return str(folder)


def request_of(adapter: Adapter | None = None, **fields: Any) -> FakeRequest:
    return FakeRequest("r", TOKENS, lora_request=adapter, **fields)


def at_once(job: Callable[[], None]) -> None:
    job()


def names() -> RequestNames:
    """Return what one engine names its requests by."""
    return RequestNames(Adapters(at_once))


def is_named(names: RequestNames, request: FakeRequest) -> bool:
    try:
        names.extra_of(request)
    except UnnamedPrompt:
        return False
    return True


# --- Every input ------------------------------------------------------------------------------------


INPUTS = ("cache_salt", "mm_features", "prompt_embeds", "prompt_is_token_ids", "lora_request")


LENGTHS = ((1, None), (11, None), (2, (True, True)), (2, (True, False)))


@st.composite
def inputs(draw: st.DrawFn) -> dict[str, Any]:
    """Few values, so that two are often equal, and often differ in one input only."""
    item = st.tuples(st.sampled_from(["1", "11", "a:1"]), st.integers(0, 12), st.sampled_from(LENGTHS))
    media = draw(st.lists(item, max_size=2))
    rows = draw(st.sampled_from([None, "zeros", "ones", "flat", "bfloat16"]))
    return {
        "cache_salt": draw(st.sampled_from([None, "", "s", "sa", "ax"])),
        "mm_features": sorted(media, key=lambda item: item[1]),
        "prompt_embeds": rows,
        "prompt_is_token_ids": draw(st.sampled_from([None, "all", "none", "first"])) if rows else None,
        "lora_request": draw(st.sampled_from([None, "one x", "one y", "two x", "scaled x"])),
    }


EMBEDS = {
    "zeros": torch.zeros(len(TOKENS), 2),
    "ones": torch.ones(len(TOKENS), 2),
    "flat": torch.zeros(len(TOKENS) * 2, 1),
    "bfloat16": torch.zeros(len(TOKENS), 4, dtype=torch.bfloat16),
    None: None,
}
MASKS = {"all": [True] * 6, "none": [False] * 6, "first": [True] + [False] * 5, None: None}


def build(drawn: dict[str, Any], folder: Path) -> Any:
    adapter = None
    if drawn["lora_request"]:
        content, name = drawn["lora_request"].split()
        adapter = Adapter(str(folder / content), name, list(CONTENTS).index(content) + 1)
    embeds = EMBEDS[drawn["prompt_embeds"]]
    media = [
        SimpleNamespace(
            identifier=identifier,
            mm_position=SimpleNamespace(
                offset=offset, length=length, is_embed=None if mask is None else torch.tensor(mask)
            ),
        )
        for identifier, offset, (length, mask) in drawn["mm_features"]
    ]
    request: Any = request_of(
        adapter,
        cache_salt=drawn["cache_salt"],
        prompt_embeds=None if embeds is None else embeds.clone(),
        prompt_is_token_ids=MASKS[drawn["prompt_is_token_ids"]],
    )
    request.mm_features = media
    return request


CONTENTS = {"one": (b"weights", 16), "two": (b"other weights", 16), "scaled": (b"weights", 32)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same adapters on two hosts."""
    hosts = tmp_path_factory.mktemp("p"), tmp_path_factory.mktemp("d")
    for host in hosts:
        for content, (weights, alpha) in CONTENTS.items():
            write_adapter(host / content, weights, alpha)
    return hosts


@given(one=inputs(), change=inputs(), changed=st.sampled_from(INPUTS))
def test_two_requests_have_the_same_name_exactly_if_all_inputs_are_equal(
    folders: tuple[Path, Path], one: dict[str, Any], change: dict[str, Any], changed: str
) -> None:
    other = {**one, changed: change[changed]}
    if other["prompt_embeds"] is None:
        other["prompt_is_token_ids"] = None
    p, d = names(), names()
    assert (p.extra_of(build(one, folders[0])) == d.extra_of(build(other, folders[1]))) == (one == other)


def test_inputs_that_are_not_known_leave_a_request_without_a_name() -> None:
    requests: list[Any] = [request_of() for _ in range(7)]
    requests[1].steering = torch.ones(2)
    requests[2].steering = None
    requests[3].resumable = True
    requests[4].prompt_token_ids = None
    requests[5].pooling_params = SimpleNamespace(extra_kwargs={"compressed_token_type_ids": 3})
    requests[6].pooling_params = SimpleNamespace(extra_kwargs=None)
    of_newer_host = RequestNames(unknown_inputs=["steering"])
    found = [is_named(of_newer_host, request) for request in requests]
    assert found == [True, False, True, False, False, False, True]
    assert not is_named(WITHOUT_ADAPTERS, request_of(Adapter("/x")))


# --- Adapters ---------------------------------------------------------------------------------------


def test_an_adapter_is_unnamed_until_its_digest_is_computed(tmp_path: Path) -> None:
    jobs: list[Callable[[], None]] = []
    p, request = RequestNames(Adapters(jobs.append)), request_of(Adapter(write_adapter(tmp_path / "x")))
    p.seen(request)
    assert not is_named(p, request)
    (job,) = jobs
    job()
    assert p.extra_of(request) == names().extra_of(request_of(Adapter(write_adapter(tmp_path / "y"))))


def test_a_file_that_changes_while_it_is_read_has_no_digest(tmp_path: Path) -> None:
    jobs: list[Callable[[], None]] = []
    p, request = RequestNames(Adapters(jobs.append)), request_of(Adapter(write_adapter(tmp_path / "x")))
    p.seen(request)
    write_adapter(tmp_path / "x", b"longer weights")
    jobs[0]()
    assert not is_named(p, request)


@pytest.mark.parametrize("weights", [b"weights", b"Weights"], ids=["equal", "other"])
def test_files_that_are_replaced_after_they_were_loaded_end_the_name(tmp_path: Path, weights: bytes) -> None:
    """Also with the old size and mtime. The host may load them again, or not."""
    adapter, p = Adapter(write_adapter(tmp_path / "x")), names()
    request = request_of(adapter)
    assert is_named(p, request)
    file = tmp_path / "x" / "adapter_model.safetensors"
    before = file.stat()
    file.with_name("new").write_bytes(weights)
    os.utime(file.with_name("new"), ns=(before.st_atime_ns, before.st_mtime_ns))
    file.with_name("new").rename(file)
    assert not is_named(p, request)
    assert not is_named(p, request_of(adapter))


def test_an_adapter_in_place_of_another_leaves_requests_that_run_without_a_name(tmp_path: Path) -> None:
    adapters = Adapters(at_once)
    p = RequestNames(adapters)
    old = Adapter(write_adapter(tmp_path / "1"))
    new = Adapter(write_adapter(tmp_path / "2", b"new"), load_inplace=True)
    adapters.loading(old)
    running = request_of(old)
    p.seen(running)
    assert is_named(p, running)
    adapters.loading(new)
    assert not is_named(p, running)
    assert is_named(p, request_of(new))
    late = request_of(old)  # The front end had the old path; which weights compute the request is not known.
    assert not is_named(p, late)
    assert not is_named(p, request_of(new)), "the host may have loaded the old one again"


def test_other_files_loaded_from_the_same_path_have_no_name(tmp_path: Path) -> None:
    """The host's own cache still has blocks of the old ones, under the same name and path."""
    adapters = Adapters(at_once)
    p = RequestNames(adapters)
    adapters.loading(Adapter(write_adapter(tmp_path / "x")))
    write_adapter(tmp_path / "x", b"new")
    again = Adapter(str(tmp_path / "x"), load_inplace=True)
    adapters.loading(again)
    assert not is_named(p, request_of(again))


def test_a_request_that_was_seen_too_late_has_no_name(tmp_path: Path) -> None:
    request = request_of(Adapter(write_adapter(tmp_path / "x")), num_computed_tokens=1)
    assert not is_named(names(), request)


@pytest.mark.parametrize("path", ["organisation/adapter", "~no-user-of-this-name/x", "a\0b"])
def test_an_adapter_that_is_no_folder_here_has_no_name(path: str) -> None:
    assert not is_named(names(), request_of(Adapter(path)))


# --- Handoffs ---------------------------------------------------------------------------------------


def is_handed_over(p: Engine, d: Engine, name: str, of_p: dict[str, Any], of_d: dict[str, Any]) -> bool:
    """Prefill on P, then ask D. Returns whether D has loaded the prompt."""
    tokens = list(range(2 * BLOCK + 1))
    params = p.finish_prefill(name, tokens, **of_p)
    if params is None:
        return False
    request = d.fetch(name, tokens, params, **of_d)
    p.world.settle()
    if name in d.recomputed:
        return False
    d.read_out(request)
    return True


def test_the_ticket_of_other_embeddings_is_refused(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    embeds = torch.zeros(2 * BLOCK + 1, 2)
    mask = [True] * BLOCK + [False] * (BLOCK + 1)
    of_p = {"prompt_embeds": embeds, "prompt_is_token_ids": mask}
    assert is_handed_over(p, d, "equal", of_p, {**of_p, "prompt_embeds": embeds.clone()})
    assert not is_handed_over(p, d, "other", of_p, {**of_p, "prompt_embeds": embeds + 1})
    assert not is_handed_over(p, d, "mask", of_p, {**of_p, "prompt_is_token_ids": mask[::-1]})
    assert not is_handed_over(p, d, "of p only", of_p, {})
    assert not is_handed_over(p, d, "of d only", {}, of_p)


@pytest.mark.parametrize("content", CONTENTS)
def test_an_adapter_with_other_files_under_the_same_name_is_computed(
    world: World, folders: tuple[Path, Path], content: str
) -> None:
    world.names = {"p": names(), "d": names()}
    p, d = world.engine("p"), world.engine("d")
    of_p, of_d = Adapter(str(folders[0] / "one")), Adapter(str(folders[1] / content))
    is_equal = is_handed_over(p, d, "r", {"lora_request": of_p}, {"lora_request": of_d})
    assert is_equal == (content == "one")


@pytest.mark.parametrize("named", ["p", "d"])
def test_what_cannot_be_named_is_neither_lent_nor_fetched(
    world: World, folders: tuple[Path, Path], named: str
) -> None:
    world.names = {named: names()}
    p, d = world.engine("p"), world.engine("d")
    adapter = {"lora_request": Adapter(str(folders[0] / "one"))}
    assert not is_handed_over(p, d, "r", adapter, adapter)
    world.settle()
    assert (p.half.num_open_loans, d.counted("refused")) == ((1, {"unnamed": 1}) if named == "p" else (0, {}))


def test_a_consumer_learns_at_once_that_a_prefill_cannot_be_named(folders: tuple[Path, Path]) -> None:
    world = PushWorld()
    world.names = {"d": names()}
    p, d = world.engine("p", num_blocks=32), world.engine("d", num_blocks=32)
    adapter, tokens = Adapter(str(folders[0] / "one")), list(range(3 * BLOCK))
    request = d.follow("r", tokens, p, lora_request=adapter)
    world.settle()
    assert d.half.get_num_new_matched_tokens(request, 0) == (len(tokens), True)
    p.begin("r", tokens, lora_request=adapter)
    world.settle()
    assert d.half.get_num_new_matched_tokens(request, 0) == (0, False)
    world.close()


# --- Keys of stored tails -----------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**32 - 1), max_size=6), st.integers(0, 6), st.booleans())
def test_no_extra_can_be_read_as_more_tokens_of_a_tail(tokens: list[int], cut: int, is_tail: bool) -> None:
    """A client chooses its salt and its tokens, and would find the KV of a longer tail or chunk."""
    extra = array("I", tokens[cut:]).tobytes()
    longer = tail_hash(root_hash(), tokens) if is_tail else block_hash(root_hash(), tokens)
    if extra:
        assert tail_hash(root_hash(), tokens[:cut], extra) != longer
    else:
        assert (tail_hash(root_hash(), tokens[:cut]) == longer) == is_tail
