"""Hashes of prompts: all that vLLM hashes of a request is in them, and they are the same on every engine."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.lora import lora_model, peft_helper
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from baton.connectors.adapters import FILES, Adapters
from baton.connectors.prompt_identity import RequestNames
from baton.connectors.pull.intent import hash_of_tokens
from baton.hosts.vllm.requests import NAMED_INPUTS, OTHER_INPUTS

# --- Names that vLLM may add to -----------------------------------------------------------------------

INPUTS = NAMED_INPUTS | OTHER_INPUTS.keys()

# Set by the scheduler, or derived from the inputs.
OF_SCHEDULER = """
    _all_token_ids _block_hasher _output_token_ids _prompt_embeds_per_block_hashes all_token_ids block_hashes
    drop_stale_output ec_transfer_params events is_prefill_chunk kv_cache_report_mode kv_transfer_params
    last_sched_seq max_tokens next_decode_eligible_step num_computed_tokens num_in_flight_tokens
    num_nans_in_logits num_output_placeholders num_preemptions num_prompt_tokens num_stale_output_tokens
    output_token_ids prefill_stats replay_start shared_prefix_boundary skip_reading_prefix_cache
    spec_decode_metrics spec_token_ids status stop_reason streaming_queue structured_output_request
"""
# Fields that tell which engine of a group computes the request, and its name for clients.
OF_FRONT_END = "current_wave data_parallel_rank external_req_id"
# Fields that choose, constrain and describe tokens; a token's KV does not depend on how it was chosen.
OF_SAMPLING = """
    n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed
    stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids
    prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens
    spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval skip_clone
    output_text_buffer_length _eos_token_id _all_stop_token_ids _watermarking_skipped structured_outputs
    logit_bias allowed_token_ids extra_args bad_words _bad_words_token_ids skip_reading_prefix_cache
    thinking_token_budget repetition_detection routed_experts_prompt_start trace_decode_token_ids
"""
# Fields that say what is made of the last hidden states. `extra_kwargs` may be an input: requests that have
# it are unnamed.
OF_POOLING = """
    use_activation dimensions step_tag_id returned_token_ids task requires_token_ids skip_reading_prefix_cache
    late_interaction_params late_chunking_params extra_kwargs output_kind
"""
# The name is hashed, the id and the path lead to the files, which are hashed, as the flag is.
OF_ADAPTER = "lora_name lora_int_id lora_path base_model_name load_inplace is_3d_lora_weight"


@pytest.mark.parametrize(
    ("found", "known"),
    [
        (inspect.signature(Request.__init__).parameters, INPUTS),
        (vars(Request("r", [1], SamplingParams(max_tokens=1), None)), INPUTS | {*OF_SCHEDULER.split()}),
        (EngineCoreRequest.__struct_fields__, INPUTS | {*OF_FRONT_END.split()}),
        (SamplingParams.__struct_fields__, OF_SAMPLING.split()),
        (PoolingParams.__struct_fields__, OF_POOLING.split()),
        (LoRARequest.__struct_fields__, OF_ADAPTER.split()),
        ([field.name for field in dataclasses.fields(PlaceholderRange)], ["offset", "length", "is_embed"]),
    ],
    ids=["inputs", "request", "core request", "sampling", "pooling", "adapter", "place"],
)
def test_every_field_of_a_request_is_known(found: Any, known: Any) -> None:
    """A new one is named, or gets a reason why it cannot change the KV of given tokens."""
    assert {*found} - {*known} == set()


def test_every_file_of_an_adapter_is_known() -> None:
    texts = {
        node.value
        for module in (lora_model, peft_helper)
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert {text for text in texts if text.endswith((".json", ".safetensors", ".bin", ".pt"))} == {*FILES}


# --- Hashes -------------------------------------------------------------------------------------------

BLOCK, NUM_TOKENS = 4, 12
FIELDS = ("tokens", "cache_salt", "media", "adapter", "embeds", "mask")
CONTENTS = {"one": b"weights", "two": b"other weights"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two hosts with the same adapters, in other folders."""
    found = tmp_path_factory.mktemp("p"), tmp_path_factory.mktemp("d")
    for host in found:
        for name, weights in CONTENTS.items():
            (host / name).mkdir()
            (host / name / "adapter_config.json").write_text("{}")
            (host / name / "adapter_model.safetensors").write_bytes(weights)
    init_none_hash(sha256)
    return found


@st.composite
def drawn_requests(draw: st.DrawFn) -> dict[str, Any]:
    """Few values, so that two requests are often equal."""
    media = draw(
        st.lists(
            st.tuples(st.integers(0, 8), st.integers(1, 3), st.sampled_from("ab"), st.booleans()), max_size=2
        )
    )
    return {
        "tokens": draw(st.sampled_from([0, 1])),
        "cache_salt": draw(st.sampled_from([None, "s", "ss"])),
        "media": sorted(media),
        "adapter": draw(st.sampled_from([None, ("one", "x"), ("two", "x"), ("one", "y")])),
        "embeds": draw(st.sampled_from([None, 0.0, 1.0])),
        "mask": draw(st.sampled_from([None, 0, 5, NUM_TOKENS])),
    }


def request_of(drawn: dict[str, Any], host: Path) -> Request:
    adapter, embeds, mask = drawn["adapter"], drawn["embeds"], drawn["mask"]
    is_mixed = embeds is not None and mask is not None
    return Request(
        "r",
        [drawn["tokens"], *range(1, NUM_TOKENS)],
        SamplingParams(max_tokens=1),
        None,
        prompt_embeds=None if embeds is None else torch.full((NUM_TOKENS, 2), embeds),
        prompt_is_token_ids=[index < mask for index in range(NUM_TOKENS)] if is_mixed else None,
        mm_features=[
            MultiModalFeatureSpec(
                None,
                "image",
                name,
                PlaceholderRange(offset, length, torch.ones(length, dtype=torch.bool) if is_masked else None),
            )
            for offset, length, name, is_masked in drawn["media"]
        ],
        lora_request=None
        if adapter is None
        else LoRARequest(adapter[1], 1 + list(CONTENTS).index(adapter[0]), str(host / adapter[0])),
        cache_salt=drawn["cache_salt"],
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def names() -> RequestNames:
    return RequestNames(Adapters(lambda job: job()))


def hash_by(names: RequestNames, request: Request, num_tokens: int) -> bytes:
    identity: Any = SimpleNamespace(names=names, kv_identity=SimpleNamespace(hash_seed="seed"))
    assert request.prompt_token_ids is not None
    return hash_of_tokens(request, request.prompt_token_ids, num_tokens, identity)


@given(
    one=drawn_requests(),
    change=drawn_requests(),
    changed=st.sampled_from(FIELDS),
    num_blocks=st.integers(1, NUM_TOKENS // BLOCK),
)
def test_prompts_that_vllm_tells_apart_have_other_hashes(
    hosts: tuple[Path, Path], one: dict[str, Any], change: dict[str, Any], changed: str, num_blocks: int
) -> None:
    """And the same request has the same hash on another engine, whose adapters are in other folders."""
    p, d, num_tokens = names(), names(), num_blocks * BLOCK
    first, other = request_of(one, hosts[0]), request_of({**one, changed: change[changed]}, hosts[0])
    is_same = hash_by(p, first, num_tokens) == hash_by(p, other, num_tokens)
    if first.block_hashes[num_blocks - 1] != other.block_hashes[num_blocks - 1]:
        assert not is_same
    if changed == "media":
        assert is_same == (one["media"] == change["media"]), "also where vLLM does not look"
    assert is_same or one != {**one, changed: change[changed]}
    assert hash_by(p, first, num_tokens) == hash_by(d, request_of(one, hosts[1]), num_tokens)
