"""Recurrent states of vLLM's layers, with fakes of vLLM's classes: groups, tables, bytes and parts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.core.errors import ConfigError
from baton.core.kv_groups import KVCacheGroup
from baton.core.states import StatePart
from baton.hosts.vllm import states
from baton.hosts.vllm.groups import (
    groups_of,
    keep_one_token_more,
    refuse_overwritten_states,
    state_spec,
    tables_by_position,
)
from baton.hosts.vllm.host_policy import vllm_policy
from baton.hosts.vllm.states import parts_of, with_states_as_bytes
from tests.vllm_plugin.test_groups import BLOCK, MambaSpec
from tests.vllm_plugin.test_start import FullAttentionSpec, groups

HYBRID = groups(MambaSpec(), FullAttentionSpec())


def config_of(tp_size: int = 1, **cache: Any) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(**cache),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"architectures": ["Other"]})),
    )


def test_a_group_of_states_may_have_another_block_size() -> None:
    assert groups_of(HYBRID, BLOCK) == (
        KVCacheGroup((0,), 1, is_state=True),
        KVCacheGroup((1,)),
    )
    assert groups_of(groups(MambaSpec()), 4096) == (KVCacheGroup((), 1, is_state=True),)
    in_place = groups(MambaSpec(mamba_cache_mode="align", block_size=64), FullAttentionSpec())
    with pytest.raises(ConfigError, match=r"blocks of \[64\] tokens"):
        groups_of(in_place, BLOCK)
    keep_one_token_more(HYBRID)  # A state has no token to keep.


def test_stores_need_states_that_vllm_keeps() -> None:
    refuse_overwritten_states(groups(FullAttentionSpec()))
    refuse_overwritten_states(groups(MambaSpec(mamba_cache_mode="align"), FullAttentionSpec()))
    for mode in ("none", "all"):  # The latter in 0.31 only.
        with pytest.raises(ConfigError, match=f"mamba_cache_mode: is '{mode}'.* --enable-prefix-caching"):
            refuse_overwritten_states(groups(FullAttentionSpec(), MambaSpec(mamba_cache_mode=mode)))


def test_the_one_block_of_a_state_stands_at_every_position() -> None:
    expand = tables_by_position(HYBRID, BLOCK)
    assert expand(([7], [3, 4, 5]), 2 * BLOCK + 1) == ([7, 7, 7], [3, 4, 5])
    assert expand(([], []), 5) == ([], []), "a request without blocks"
    by_position = groups(MambaSpec(mamba_cache_mode="align", block_size=BLOCK), FullAttentionSpec())
    assert tables_by_position(by_position, BLOCK)(([0, 7], [3, 4]), 200) == ([0, 7], [3, 4])


def test_layers_with_unlike_states_are_refused() -> None:
    assert state_spec(groups(FullAttentionSpec())) is None
    with pytest.raises(ConfigError, match="states of different shapes"):
        state_spec(groups(MambaSpec(), MambaSpec(shapes=((6, 3), (2, 4, 6)))))


def test_pages_of_states_become_bytes() -> None:
    """vLLM registers them as [blocks, 1, 1, page]; attention and states share the memory."""
    pages = torch.arange(3 * 256, dtype=torch.int64).to(torch.int8).view(3, 256)[:, None, None]
    found = with_states_as_bytes({"l0": pages, "l1": pages}, HYBRID)
    assert found["l1"] is pages
    assert found["l0"].shape == (3, 36 + 160)
    assert found["l0"].stride() == (256, 1)
    assert found["l0"].data_ptr() == pages.data_ptr()
    with pytest.raises(ConfigError, match="has 128 bytes in a block, and a state has 196"):
        with_states_as_bytes({"l0": pages[..., :128], "l1": pages}, HYBRID)


def test_states_of_an_unknown_family_move_as_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "_conv_layout", lambda: "SD")
    assert parts_of(config_of(2), HYBRID) == (
        StatePart("SD tensor 0 of 2 ranks", 2, (6, 3), "bfloat16"),
        StatePart("SD tensor 1 of 2 ranks", 2, (2, 4, 5), "float32"),
    )
    assert parts_of(config_of(), groups(FullAttentionSpec())) == ()
    with pytest.raises(ConfigError, match=r"use_replayssm: keeps inputs beside the state"):
        parts_of(config_of(use_replayssm=True), HYBRID)


def test_a_truncated_prompt_leaves_one_token_out_once() -> None:
    truncate = vllm_policy().truncate_prompt
    tokens = [5, 6, 7]
    request = SimpleNamespace(
        prompt_token_ids=tokens,
        _all_token_ids=list(tokens),
        num_prompt_tokens=3,
        num_output_tokens=0,
        skip_reading_prefix_cache=False,
        max_tokens=9,
    )
    truncate(request)
    assert (request.prompt_token_ids, request._all_token_ids) == ([5, 6], [5, 6])
    assert (request.num_prompt_tokens, request.max_tokens) == (2, 1)
    for change in ({"num_prompt_tokens": 1}, {"skip_reading_prefix_cache": True}, {"num_output_tokens": 1}):
        other = SimpleNamespace(**{**vars(request), **change})
        truncate(other)
        assert vars(other) == {**vars(request), **change}
