"""`baton demo`: shows that a handoff gives the same tokens as a single engine.

    a small model --> prefill + decode + router, and a single engine --> 20 prompts to both --> table

With `--connector` of a store or of several connectors, every prompt is sent twice (`demo_rounds`). Exits with
1 if a token differs, or if a prompt was not moved as expected.
"""

import json
import os
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from baton.cli.demo_check import Outcome
    from baton.cli.demo_prompts import DemoPrompt
    from baton.cli.demo_rounds import RoundsPlan
    from baton.cli.processes import Fleet
    from baton.cli.system import HandoffArguments, SystemPlan

app = typer.Typer(help="Hand prompts over between two engines and compare with a single one.")

Device = Literal["auto", "cpu", "cuda"]

BLOCK_SIZE = 32  # The shortest prompt is below one block.
NUM_BLOCKS = 1024
START_TIMEOUT_S = 180.0  # Importing torch is slow on a loaded machine.
MODEL_TIMEOUT_S = 120.0
MODEL_ARGUMENTS = ("--family", "qwen3", "--hidden", "256", "--layers", "4")


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a checkpoint; by default a small model is made.")
    ] = None,
    connector: Annotated[
        str | None,
        typer.Option(
            help="pull or push, like --mode; offload, shared-storage or multi (pull with offload): each "
            "prompt is sent twice, the second time loaded from the store.",
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
    cache_dir: Annotated[Path | None, typer.Option(help="Folder in which the small model is kept.")] = None,
    log_dir: Annotated[Path, typer.Option(help="Folder for the logs.")] = Path(".baton/logs"),
    keep: Annotated[bool, typer.Option("--keep", help="Leave the system running until Ctrl-C.")] = False,
) -> None:
    """Prefill on one engine, decode on another, and check every token against a single engine."""
    from rich.console import Console

    from baton.cli.demo_check import DemoError
    from baton.cli.demo_rounds import plan_rounds
    from baton.cli.processes import ChildDied, Fleet, StartTimeout, Stopped, raising_on_stop_signals
    from baton.cli.system import EngineArguments, plan_system
    from baton.core.errors import ConfigError

    if model is not None and not (model / "config.json").is_file():
        raise typer.BadParameter(f"{model} has no config.json; omit --model to use a small model")
    of_a_pair = (prefill_tp, decode_tp, prefill_block_size)
    try:
        store, handoff = _choose(connector, mode, stream, is_uneven=any(n is not None for n in of_a_pair))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    console = Console(highlight=False)
    began_s = time.monotonic()
    status = 1
    try:
        with (
            raising_on_stop_signals(),
            ExitStack() as stack,
            Fleet(log_dir, env=_own_environment()) as fleet,
        ):
            folder = model or _small_model(fleet, cache_dir or _cache_folder(), console)
            arguments = EngineArguments(
                folder,
                tp=decode_tp or tp,
                block_size=block_size,
                num_blocks=num_blocks,
                dtype=dtype,
                device=device,
            )
            if store is not None:
                kv_folder = Path(stack.enter_context(TemporaryDirectory(prefix="baton-kv-")))
                rounds = plan_rounds(store, arguments, folder=kv_folder, handoff=handoff)
                url = rounds.second_url
                is_good = _show_rounds(
                    fleet,
                    rounds,
                    console,
                    began_s,
                    log_dir,
                    num_prompts=prompts,
                    max_tokens=max_tokens,
                    seed=seed,
                )
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
                outcomes = _run(fleet, plan, console, num_prompts=prompts, max_tokens=max_tokens, seed=seed)
                _report(console, outcomes, took_s=time.monotonic() - began_s, plan=plan, log_dir=log_dir)
                is_good = all(outcome.is_good for outcome in outcomes)
            status = 0 if is_good else 1
            if keep:
                console.print(f"Still up at {url} until Ctrl-C.")
                ended = fleet.wait_exit(None)
                assert ended is not None
                raise ChildDied(ended)
    except (KeyboardInterrupt, Stopped):
        console.print("stopped")
    except (ChildDied, StartTimeout, DemoError) as error:
        Console(stderr=True, highlight=False).print(str(error), markup=False, soft_wrap=True)
        status = 1
    raise typer.Exit(status)


def _choose(
    connector: str | None, mode: str | None, stream: str | None, *, is_uneven: bool
) -> tuple[str | None, "HandoffArguments"]:
    """Return (the storing connector, if any; the handoff arguments). Raises ConfigError."""
    from baton.cli.demo_rounds import KEEPING
    from baton.cli.system import CONNECTORS, HandoffArguments
    from baton.core.errors import ConfigError

    if connector in CONNECTORS:
        if mode not in (None, connector):
            raise ConfigError(f"is {connector!r}, and --mode is {mode!r}", field="connector")
        return None, HandoffArguments(connector, stream)
    if connector is None:
        return None, HandoffArguments(mode or "pull", stream)
    if connector not in KEEPING:
        raise ConfigError(f"must be one of {', '.join((*CONNECTORS, *KEEPING))}", field="connector")
    if connector != "multi" and (mode is not None or stream is not None):
        raise ConfigError("transfers no KV between engines; omit --mode and --stream", field="connector")
    if is_uneven:
        raise ConfigError("needs equal engines; use --tp and --block-size", field="connector")
    return connector, HandoffArguments(mode or "pull", stream)


def _prompts(model: Path, *, num_prompts: int, max_tokens: int, seed: int) -> "list[DemoPrompt]":
    from baton.cli.demo_prompts import LONGEST, make_prompts

    config = json.loads((model / "config.json").read_text())
    longest = min(LONGEST, config.get("max_position_embeddings", LONGEST + max_tokens) - max_tokens)
    return make_prompts(num_prompts, seed=seed, vocab_size=config["vocab_size"], longest=longest)


def _show_rounds(
    fleet: "Fleet",
    plan: "RoundsPlan",
    console: "Console",
    began_s: float,
    log_dir: Path,
    *,
    num_prompts: int,
    max_tokens: int,
    seed: int,
) -> bool:
    """Run both rounds and print the result. True if every outcome is good."""
    from baton.cli.demo_report import make_rounds_table, print_rounds_summary
    from baton.cli.demo_rounds import run_rounds
    from baton.cli.processes import ChildDied
    from baton.cli.system import start_engines, start_system

    model = plan.engines[0].arguments.model
    prompts = _prompts(model, num_prompts=num_prompts, max_tokens=max_tokens, seed=seed)
    if plan.system is not None:
        start_system(fleet, plan.system, timeout_s=START_TIMEOUT_S, console=console)
    else:
        start_engines(fleet, plan.engines, timeout_s=START_TIMEOUT_S, console=console)
    outcomes = run_rounds(plan, prompts, max_tokens=max_tokens)
    if ended := fleet.wait_exit(0):
        raise ChildDied(ended)
    console.print(make_rounds_table(outcomes, title=plan.title))
    print_rounds_summary(console, outcomes, took_s=time.monotonic() - began_s, log_folder=log_dir)
    return all(outcome.is_good for outcome in outcomes)


def _run(
    fleet: "Fleet", plan: "SystemPlan", console: "Console", *, num_prompts: int, max_tokens: int, seed: int
) -> list["Outcome"]:
    from baton.cli.demo_check import Checker
    from baton.cli.demo_prompts import num_new_blocks
    from baton.cli.processes import ChildDied
    from baton.cli.system import start_system

    arguments = plan.single[0].arguments
    prompts = _prompts(arguments.model, num_prompts=num_prompts, max_tokens=max_tokens, seed=seed)
    start_system(fleet, plan, timeout_s=START_TIMEOUT_S, console=console)
    checker = Checker(
        router_url=plan.router_url,
        decode_urls=[engine.url for engine in plan.decode],
        single_url=plan.single[0].url,
        max_tokens=max_tokens,
    )
    outcomes = []
    try:
        for index, prompt in enumerate(prompts):
            must_move = num_new_blocks(prompts, index, block_size=arguments.block_size or BLOCK_SIZE) > 0
            outcomes.append(checker.check(prompt, must_move=must_move))
    finally:
        checker.close()
    if ended := fleet.wait_exit(0):
        raise ChildDied(ended)
    return outcomes


def _report(
    console: "Console", outcomes: list["Outcome"], *, took_s: float, plan: "SystemPlan", log_dir: Path
) -> None:
    from baton.cli.demo_report import make_table, print_summary

    console.print(make_table(outcomes, mode=plan.handoff.mode))
    model = plan.single[0].arguments.model
    print_summary(console, outcomes, took_s=took_s, model=model, log_folder=log_dir, command=_baton_command())


def _small_model(fleet: "Fleet", cache: Path, console: "Console") -> Path:
    """Return the small model's folder. A child process makes it once, because this one must not import
    torch.
    """
    from baton import __version__
    from baton.cli.processes import ChildDied, StartTimeout

    folder = cache / f"demo-model-{__version__}"
    if (folder / "config.json").is_file():
        return folder
    console.print(f"making a small model in {folder}", soft_wrap=True)
    unfinished = cache / f"{folder.name}.{os.getpid()}"
    child = fleet.start(
        "model", [sys.executable, "-m", "baton.cli", "model", "new", str(unfinished), *MODEL_ARGUMENTS]
    )
    if fleet.wait_exit(MODEL_TIMEOUT_S) is None:
        raise StartTimeout(f"the model was not made within {MODEL_TIMEOUT_S:.0f} s; see {child.log_path}")
    if child.exit_status() != 0:
        raise ChildDied(child)
    fleet.forget(child)
    if not folder.exists():  # Another demo may have been faster; its model has the same bytes.
        unfinished.rename(folder)
    return folder


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


def _baton_command() -> str:
    """Return the command for `baton`: `make demo` installs it in an environment that is not on the PATH."""
    if shutil.which("baton") is not None:
        return "baton"
    script = Path(sys.executable).with_name("baton")
    return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)
