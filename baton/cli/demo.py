"""`baton demo`: shows that a handoff gives the same tokens as a single engine.

    a small model --> prefill + decode + router, and a single engine --> 20 prompts to both --> table

With `--connector` of a store or of several connectors, every prompt is sent twice (`demo_rounds`). Exits with
1 if a token differs, or if a prompt was not moved as expected.
"""

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import msgspec
import typer

from baton.cli.settings import plain_entry
from baton.cli.system_settings import SystemSettings
from baton.core.option import AtLeast1, Option

app = typer.Typer(help="Hand prompts over between two engines and compare with a single one.")


class DemoSettings(SystemSettings, frozen=True, kw_only=True):
    """Options of `baton demo`. The shortest prompt is below one block.

    model: Folder of a checkpoint; by default a small model is made.
    family: Family of the small model, as in `baton model new`; qwen3 by default.
    connector: pull or push, like --mode; offload, shared-storage, tiered (through a restart) or multi (pull
        with offload): each prompt is sent twice, the second time loaded from the store.
    prompts: Number of prompts, of 20.
    max_tokens: Tokens of each answer.
    seed: Seed of the prompts.
    device: Device of all engines. With cuda, they share one GPU.
    kv_cache_dtype: Dtype of the KV cache, as in `baton serve`.
    update_weights: Update the weights of the running pair, first P's and then D's, and roll back.
    cache_dir: Folder in which the small model is kept.
    keep: Leave the system running until Ctrl-C.
    """

    model: Annotated[Path | None, Option()] = None
    family: Annotated[str | None, Option()] = None
    connector: Annotated[str | None, Option()] = None
    block_size: Annotated[AtLeast1, Option()] = 32
    prompts: Annotated[Annotated[int, msgspec.Meta(ge=1, le=20)], Option()] = 20
    max_tokens: Annotated[Annotated[int, msgspec.Meta(ge=1, le=512)], Option()] = 24
    seed: Annotated[int, Option()] = 0
    num_blocks: Annotated[Annotated[int, msgspec.Meta(ge=128)], Option()] = 1024
    device: Annotated[Literal["auto", "cpu", "cuda"], Option()] = "cpu"
    kv_cache_dtype: Annotated[str | None, Option()] = None
    update_weights: Annotated[bool, Option()] = False
    cache_dir: Annotated[Path | None, Option()] = None
    keep: Annotated[bool, Option()] = False


@app.command()
@partial(plain_entry, DemoSettings)
def demo(settings: DemoSettings, _: list[str]) -> None:
    """Prefill on one engine, decode on another, and check every token against a single engine."""
    from rich.console import Console

    from baton.cli import demo_run, processes
    from baton.cli.asking import AskingError
    from baton.cli.demo_rounds import plan_rounds
    from baton.cli.demo_update import plan_update
    from baton.cli.system import plan_system
    from baton.core.errors import ConfigError

    model, connector = settings.model, settings.connector
    if model is not None and not (model / "config.json").is_file():
        raise typer.BadParameter(f"{model} has no config.json; omit --model to use a small model")
    if model is not None and settings.family is not None:
        raise typer.BadParameter("--model has a family of its own; omit --family")
    if settings.update_weights and (model is not None or connector not in (None, "pull", "push")):
        raise typer.BadParameter("--update-weights has two small models and a pair; omit --model and a store")
    of_a_pair = (settings.prefill_tp, settings.decode_tp, settings.prefill_block_size)
    try:
        store, handoff = demo_run.choose(
            connector, settings.mode, settings.stream, is_uneven=any(n is not None for n in of_a_pair)
        )
        chosen = demo_run.choose_family(settings.family)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    console = Console(highlight=False)
    status = 1
    try:
        with (
            processes.raising_on_stop_signals(),
            ExitStack() as stack,
            processes.Fleet(settings.log_dir, env=_own_environment()) as fleet,
        ):
            run = demo_run.Demo(
                fleet=fleet,
                console=console,
                num_prompts=settings.prompts,
                max_tokens=settings.max_tokens,
                seed=settings.seed,
            )
            cache, dtype = settings.cache_dir or _cache_folder(), settings.kv_cache_dtype
            arguments = settings.arguments(
                model or run.small_model(cache, chosen),
                device=settings.device,
                extra=() if dtype is None else ("--kv-cache-dtype", dtype),
            )
            if settings.update_weights:
                folders = [arguments.model, run.small_model(cache, chosen, seed=1)]
                plan = plan_update(arguments, folders, handoff)
                url = plan.router_url
                is_good = run.show_update(plan, folders)
            elif store is not None:
                kv_folder = Path(stack.enter_context(TemporaryDirectory(prefix="baton-kv-")))
                rounds = plan_rounds(store, arguments, folder=kv_folder, handoff=handoff)
                url = rounds.second_url
                is_good = run.show_rounds(rounds)
            else:
                plan = plan_system(
                    arguments,
                    num_prefill=1,
                    num_decode=1,
                    num_single=1,
                    handoff=handoff,
                    prefill_arguments=settings.prefill_arguments(arguments),
                )
                url = plan.router_url
                is_good = run.show_handoffs(plan)
            status = 0 if is_good else 1
            if settings.keep:
                console.print(f"Still up at {url} until Ctrl-C.")
                ended = fleet.wait_exit(None)
                assert ended is not None
                raise processes.ChildDied(ended)
    except (KeyboardInterrupt, processes.Stopped):
        console.print("stopped")
    except (processes.ChildDied, processes.StartTimeout, AskingError) as error:
        Console(stderr=True, highlight=False).print(str(error), markup=False, soft_wrap=True)
        status = 1
    raise typer.Exit(status)


def _cache_folder() -> Path:
    """Return the user's cache folder, or one in the working directory if that is not writable."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(".baton")
    return cache if os.access(cache, os.W_OK) else Path(".baton")


def _own_environment() -> dict[str, str]:
    """Return our environment without the settings of `baton serve`, which the demo sets by options."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
