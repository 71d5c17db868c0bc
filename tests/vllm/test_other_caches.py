"""fp8 caches, latents and states of Qwen3-Next in a real vLLM: contents move as they are."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from baton.checkpoints.random_model import write_checkpoint
from tests.vllm.engines import TRANSFERS, BatonPlan, Server, Site, VllmPlan, check_handoffs, transfer
from tests.vllm.prompts import Prompt, prompts

FP8 = ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8")
_LONG = next(prompt for prompt in prompts() if len(prompt) == 1500)
ASKED = [(9 + length, *_LONG[:length]) for length in (8, 31, 100, 127, 128, 300, 600)]


@pytest.fixture(scope="module")
def llama(site_of: Callable[..., Site]) -> Site:
    return site_of("--family", "llama")


@pytest.fixture(scope="module")
def engines(llama: Site) -> dict[str, Server]:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's CPU build has fp8 caches on CPUs with AVX-512 only")
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
    """A prompt that is computed at once gets other tokens in bfloat16 than one whose last token is decoded. D
    decodes that token. So the last token of these prompts is one that a single vLLM has decoded.
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


# --- Latents: tokens and bytes ----------------------------------------------------------------------------

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}  # The size that vLLM's kernel has.
# vLLM's own kernel for a CPU rotates only the first key of a step (docs/caches.md).
PLAIN_OPS = ("--compilation-config", '{"custom_ops": ["none"]}')
LATENT_LENGTHS = (9, 16, 17, 128, 129, 600)  # Blocks have 16 tokens.
SPOILED_LENGTH = 33
SEES_LATENTS = """
import json
from pathlib import Path

import torch

from baton.hosts.vllm.connector import BatonPushConnector


class SeesLatents(BatonPushConnector):
    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        [block_ids] = blocks.get_block_ids()
        self.write("blocks", lambda file: file.write_text(json.dumps([request.num_prompt_tokens, block_ids])))
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        self.latents = kv_caches

    def wait_for_save(self):
        if self.path("blocks").exists():
            num_tokens, block_ids = json.loads(self.path("blocks").read_text())
            latents = {name: cache[block_ids].reshape(-1, 576) for name, cache in self.latents.items()}
            self.write("latents", lambda file: torch.save(latents, file))
            if self._kv_transfer_config.kv_role == "kv_producer" and num_tokens == SPOILED_LENGTH:
                *_, last = self.latents.values()
                last[block_ids[0]].view(torch.uint8)[..., 3, 7] ^= 1
        super().wait_for_save()

    def path(self, name):
        return Path(FOLDER) / f"{self._kv_transfer_config.engine_id}.{name}"

    def write(self, name, write):
        write(partial := self.path(name + ".partial"))
        partial.rename(self.path(name))
"""


@pytest.fixture(scope="module")
def latents(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Path]]:
    """The folder has the latents of the last prompt, written after each step."""
    site.dismiss()
    folder = tmp_path_factory.mktemp("latents")
    write_checkpoint(folder / "model", family="deepseek_v2", fields=LATENT)
    other = Site(site.fleet, folder / "model")
    yield other, folder
    other.dismiss()


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_the_latents_of_d_are_those_of_p_byte_for_byte(latents: tuple[Site, Path], mode: str) -> None:
    """Except for one bit of one prompt, which P changes after its latents are written down."""
    site, folder = latents
    (folder / "sees_latents.py").write_text(
        f"FOLDER, SPOILED_LENGTH = {str(folder)!r}, {SPOILED_LENGTH}\n{SEES_LATENTS}"
    )
    seeing = {"kv_connector": "SeesLatents", "kv_connector_module_path": "sees_latents"}
    plans = [VllmPlan("single", None, extra=PLAIN_OPS)]
    for name, role in (("p", "kv_producer"), ("d", "kv_consumer")):
        of_name = {**transfer("BatonPushConnector", role, name), **seeing}
        plans.append(VllmPlan(name, of_name, extra=PLAIN_OPS, path=(str(folder),)))
    engines = site.cast("latents", *plans)
    p, d = engines["p"], engines["d"]
    lengths = LATENT_LENGTHS if mode == "push" else (*LATENT_LENGTHS, SPOILED_LENGTH)
    with site.router(p, d, mode, "--no-first-token") as router:
        for length in lengths:
            # Another beginning in each mode, so that no block still has the bytes of an earlier handoff.
            prompt = (9 + length + 1000 * (mode == "push"), *_LONG[: length - 1])
            before = d.metric(TRANSFERS)
            tokens = router.tokens(prompt)
            if length != SPOILED_LENGTH:
                assert tokens == engines["single"].tokens(prompt)
            d.wait_metric(TRANSFERS, lambda num, before=before: num == before + 1)
            of_p, of_d = (torch.load(folder / f"{name}.latents") for name in ("p", "d"))
            assert of_p.keys() == of_d.keys()
            assert len(of_p) == 4
            num_unlike_bytes = 0
            for name in of_p:
                theirs, ours = (of[name][: length - 1].contiguous() for of in (of_p, of_d))
                assert theirs.shape == ours.shape == (length - 1, 576)
                assert len(theirs.unique(dim=0)) >= len({*prompt[:-1]}), "unlike tokens have unlike latents"
                num_unlike_bytes += int((theirs.view(torch.uint8) != ours.view(torch.uint8)).sum())
            assert num_unlike_bytes == (length == SPOILED_LENGTH), (length, num_unlike_bytes)
        assert router.metric("baton:router_prefills_total", where="remote") == len(lengths)


@pytest.mark.parametrize("names", [("p", "baton-d"), ("baton-p", "d")], ids=" to ".join)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_latents_cross_between_a_vllm_and_the_embedded_engine(
    latents: tuple[Site, Path], names: tuple[str, str], mode: str
) -> None:
    site, _ = latents
    plans: list[VllmPlan | BatonPlan] = [VllmPlan("single", None, extra=PLAIN_OPS)]
    for name, role in (("p", "kv_producer"), ("d", "kv_consumer")):
        plans.append(VllmPlan(name, transfer("BatonPushConnector", role, name), extra=PLAIN_OPS))
        plans.append(BatonPlan(f"baton-{name}", transfer("BatonPushConnector", role, f"baton-{name}")))
    engines = site.cast("latents of both", *plans)
    with site.router(engines[names[0]], engines[names[1]], mode) as router:
        check_handoffs(router, engines[names[1]], ASKED, engines["single"].tokens)
