"""fp8 caches and states of Qwen3-Next in a real vLLM: contents move as they are, between equal dtypes."""

from collections.abc import Callable, Iterator

import pytest

from baton.engine.checkpoints.random_model import write_checkpoint
from tests.vllm.engines import Server, Site, VllmPlan, check_handoffs, transfer
from tests.vllm.prompts import Prompt, prompts

FP8 = ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8")
_LONG = next(prompt for prompt in prompts() if len(prompt) == 1500)
ASKED = [(9 + length, *_LONG[:length]) for length in (8, 31, 100, 127, 128, 300, 600)]


@pytest.fixture(scope="module")
def llama(site_of: Callable[..., Site]) -> Site:
    return site_of("--family", "llama")


@pytest.fixture(scope="module")
def engines(llama: Site) -> dict[str, Server]:
    plans = [VllmPlan("single", None, extra=FP8)]
    for name, role in (("p", "kv_producer"), ("d", "kv_consumer")):
        plans.append(VllmPlan(name, transfer("BatonPushConnector", role, name), extra=FP8))
    return llama.cast("fp8", *plans)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_tokens_equal_a_single_vllms(llama: Site, engines: dict[str, Server], mode: str) -> None:
    expected: dict[Prompt, list[int]] = {prompt: engines["single"].tokens(prompt) for prompt in ASKED}
    with llama.router(engines["p"], engines["d"], mode) as router:
        check_handoffs(router, engines["d"], ASKED, expected.__getitem__)


# --- A state of another orientation than the embedded engine's ---------------------------------------------

BF16 = ("--dtype", "bfloat16", "--no-enable-prefix-caching")


@pytest.fixture(scope="module")
def qwen3_next(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """vLLM's kernel for a CPU needs heads of one size."""
    site.dismiss()
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    folder = tmp_path_factory.mktemp("model") / "qwen3-next"
    write_checkpoint(folder, family="qwen3_next", dtype="bfloat16", head_dim=128, fields=sizes)
    other = Site(site.fleet, folder)
    yield other
    other.dismiss()


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_handoff_goes_on_as_a_single_vllm_does(qwen3_next: Site, mode: str) -> None:
    """In bfloat16 a prompt that is computed at once gets other tokens than one whose last token is decoded. D
    decodes it. So the last token of these prompts is one that a single vLLM has decoded.
    """
    plans = [VllmPlan("single", None, extra=BF16)]
    for name, role in (("p", "kv_producer"), ("d", "kv_consumer")):
        plans.append(VllmPlan(name, transfer("BatonPushConnector", role, name), extra=BF16))
    engines = qwen3_next.cast("qwen3-next", *plans)
    expected: dict[Prompt, list[int]] = {}
    for prompt in ASKED:
        first, *rest = engines["single"].tokens(prompt, max_tokens=13)
        expected[*prompt, first] = rest
    with qwen3_next.router(engines["p"], engines["d"], mode) as router:
        check_handoffs(router, engines["d"], list(expected), expected.__getitem__)
