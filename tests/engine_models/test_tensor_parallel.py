"""Several ranks in threads of one process, compared with one rank."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.checkpoints.checkpoint import load_model_config, read_json
from baton.checkpoints.random_model import write_checkpoint
from baton.core.errors import UserError
from baton.engine.models import TensorParallelGroup, build_model
from tests.engine_models.paged import SHUFFLED_BLOCKS, CheckpointOf, PagedModel, PagedModelOf, prompt_of

WAIT_S = 60.0
ATOL = 3e-4  # Logits reach 13, and float32 is up to 6e-5 from float64, by torch or by compiled code.


class Meeting:
    """Shared state by which the ranks of one group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=WAIT_S)


class ThreadGroup(TensorParallelGroup):
    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._meeting.tensors[self.rank] = tensor
        self._meeting.barrier.wait()
        everyone = list(self._meeting.tensors)
        self._meeting.barrier.wait()
        return everyone

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._exchange(tensor), dim)


@pytest.mark.parametrize(
    ("family", "tp_size"),
    [
        ("llama", 2),
        ("mistral", 2),
        ("qwen2", 2),
        ("qwen3", 2),
        ("qwen3", 4),
        ("qwen2", 4),
        ("gemma3", 2),
        ("gpt_oss", 4),
        ("mixtral", 2),
        ("qwen3_moe", 4),
        ("deepseek_v2", 2),
        ("deepseek_v2, as Lite", 4),
        ("deepseek_v3", 2),
        ("deepseek_v32", 4),
        ("mamba2", 2),
        ("mamba2", 4),
        ("granite_hybrid", 2),
        ("granite_hybrid", 4),
        ("qwen3_next", 2),
        ("qwen3_next", 4),
        ("qwen3_5", 2),
        ("qwen3_5_moe", 4),
        ("nemotron_h", 4),
    ],
)
def test_ranks_together_give_the_logits_of_one(
    family: str, tp_size: int, checkpoint_of: CheckpointOf, paged_model_of: PagedModelOf
) -> None:
    config, prompt = load_model_config(checkpoint_of(family)), prompt_of(4, 50)
    meeting = Meeting(tp_size)

    def run_rank(rank: int) -> torch.Tensor:
        model = PagedModel(config, ThreadGroup(rank, tp_size, meeting))
        first = model.step([(prompt[:30], 0, SHUFFLED_BLOCKS)])
        rest = model.step([(prompt[30:], 30, SHUFFLED_BLOCKS)])
        return torch.cat((first, rest))

    with ThreadPoolExecutor(tp_size) as pool:
        answers = list(pool.map(run_rank, range(tp_size), timeout=WAIT_S))
    alone = paged_model_of(family).step([(prompt, 0, SHUFFLED_BLOCKS)])
    for answer in answers:
        torch.testing.assert_close(answer, alone, atol=ATOL, rtol=0)
        assert answer.equal(answers[0])


def test_biases_of_row_parallel_layers_are_added_once(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path, family="llama", hidden=32, layers=1, heads=2, vocab=512, intermediate=48
    )
    config_json = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps({**config_json, "attention_bias": True, "mlp_bias": True}))
    tensors = load_file(folder / "model.safetensors")
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    for name in [f"{attention}.{p}_proj" for p in "qkvo"] + [
        f"{mlp}.{p}_proj" for p in ("gate", "up", "down")
    ]:
        tensors[f"{name}.bias"] = torch.randn(len(tensors[f"{name}.weight"]))
    save_file(tensors, folder / "model.safetensors")
    config, meeting = load_model_config(folder), Meeting(2)
    prompt = [token % 500 for token in prompt_of(5, 12)]

    def run_rank(rank: int) -> torch.Tensor:
        return PagedModel(config, ThreadGroup(rank, 2, meeting)).step([(prompt, 0, [0, 1])])

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(run_rank, range(2), timeout=WAIT_S))
    torch.testing.assert_close(answers[0], PagedModel(config).step([(prompt, 0, [0, 1])]), atol=1e-4, rtol=0)


def test_a_size_that_does_not_divide_the_model_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, hidden=32, layers=1, heads=4, vocab=512, intermediate=49)
    config = load_model_config(folder)
    for size, named in ((3, "num_attention_heads"), (2, "intermediate_size")):
        with pytest.raises(UserError, match=named):
            build_model(config, ThreadGroup(0, size, Meeting(size)))


@pytest.mark.parametrize(("heads", "groups", "size"), [(6, 2, 4), (6, 3, 2)])
def test_ranks_that_do_not_divide_the_states_are_refused(
    heads: int, groups: int, size: int, tmp_path: Path
) -> None:
    folder = write_checkpoint(
        tmp_path, family="mamba2", hidden=48, layers=1, heads=heads, kv_heads=groups, vocab=512
    )
    with pytest.raises(UserError) as caught:
        build_model(load_model_config(folder), ThreadGroup(0, size, Meeting(size)))
    assert caught.value.field == "parallel_config.tensor_parallel_size"
