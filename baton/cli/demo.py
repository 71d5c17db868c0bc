"""`baton demo`: shows that a handoff gives the same tokens as a single engine.

    a small model --> prefill + decode + router, and a single engine --> 20 prompts to both --> table

With `--connector` of a store or of several connectors, every prompt is sent twice (`demo_rounds`). Exits with
1 if a token differs, or if a prompt was not moved as expected.
"""

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

app = typer.Typer(help="Hand prompts over between two engines and compare with a single one.")

Device = Literal["auto", "cpu", "cuda"]

BLOCK_SIZE = 32  # The shortest prompt is below one block.
NUM_BLOCKS = 1024


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a checkpoint; by default a small model is made.")
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            help="Family of the small model, as in `baton model new`; qwen3 by default.", show_default=False
        ),
    ] = None,
    connector: Annotated[
        str | None,
        typer.Option(
            help="pull or push, like --mode; offload, shared-storage, tiered (through a restart) or multi "
            "(pull with offload): each prompt is sent twice, the second time loaded from the store.",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="pull (default): one leg after the other; push: both at once, KV moves early.",
            show_default=False,
        ),
    ] = None,
    stream: Annotated[
        str | None, typer.Option(help="When KV moves in push: off, chunk or layer.", show_default=False)
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size of each engine.", min=1)] = 1,
    prefill_tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel size of the prefill engine, if different.", min=1)
    ] = None,
    decode_tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel size of the decode engine, if different.", min=1)
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.", min=1)] = BLOCK_SIZE,
    prefill_block_size: Annotated[
        int | None, typer.Option(help="Of the prefill engine, if it is another.", min=1)
    ] = None,
    prompts: Annotated[int, typer.Option(help="Number of prompts, of 20.", min=1, max=20)] = 20,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=1, max=512)] = 24,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    num_blocks: Annotated[int, typer.Option(help="KV blocks of each engine.", min=128)] = NUM_BLOCKS,
    device: Annotated[
        Device, typer.Option(help="Device of all engines. With cuda, they share one GPU.")
    ] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="Of the KV cache, as in `baton serve`.", show_default=False)
    ] = None,
    update_weights: Annotated[
        bool,
        typer.Option(
            "--update-weights",
            help="Update the weights of the running pair, first P's and then D's, and roll back.",
        ),
    ] = False,
    cache_dir: Annotated[Path | None, typer.Option(help="Folder in which the small model is kept.")] = None,
    log_dir: Annotated[Path, typer.Option(help="Folder for the logs.")] = Path(".baton/logs"),
    keep: Annotated[bool, typer.Option("--keep", help="Leave the system running until Ctrl-C.")] = False,
) -> None:
    """Prefill on one engine, decode on another, and check every token against a single engine."""
    from rich.console import Console

    from baton.cli import demo_run, processes
    from baton.cli.asking import AskingError
    from baton.cli.demo_rounds import plan_rounds
    from baton.cli.demo_update import plan_update
    from baton.cli.system import EngineArguments, plan_system
    from baton.core.errors import ConfigError

    if model is not None and not (model / "config.json").is_file():
        raise typer.BadParameter(f"{model} has no config.json; omit --model to use a small model")
    if model is not None and family is not None:
        raise typer.BadParameter("--model has a family of its own; omit --family")
    if update_weights and (model is not None or connector not in (None, "pull", "push")):
        raise typer.BadParameter("--update-weights has two small models and a pair; omit --model and a store")
    of_a_pair = (prefill_tp, decode_tp, prefill_block_size)
    try:
        store, handoff = demo_run.choose(
            connector, mode, stream, is_uneven=any(n is not None for n in of_a_pair)
        )
        chosen = demo_run.choose_family(family)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    console = Console(highlight=False)
    status = 1
    try:
        with (
            processes.raising_on_stop_signals(),
            ExitStack() as stack,
            processes.Fleet(log_dir, env=_own_environment()) as fleet,
        ):
            run = demo_run.Demo(
                fleet=fleet, console=console, num_prompts=prompts, max_tokens=max_tokens, seed=seed
            )
            arguments = EngineArguments(
                model or run.small_model(cache_dir or _cache_folder(), chosen),
                tp=decode_tp or tp,
                block_size=block_size,
                num_blocks=num_blocks,
                dtype=dtype,
                device=device,
                extra=() if kv_cache_dtype is None else ("--kv-cache-dtype", kv_cache_dtype),
            )
            if update_weights:
                folders = [arguments.model, run.small_model(cache_dir or _cache_folder(), chosen, seed=1)]
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
                    prefill_arguments=replace(
                        arguments, tp=prefill_tp or tp, block_size=prefill_block_size or block_size
                    ),
                )
                url = plan.router_url
                is_good = run.show_handoffs(plan)
            status = 0 if is_good else 1
            if keep:
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
