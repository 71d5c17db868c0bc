"""`baton up MODEL`: starts engines and a router, and ends them together."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.cli.http_options import verifying_own

app = typer.Typer(help="Start a whole prefill/decode system on this machine.")

START_TIMEOUT_S = 180.0


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def up(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of the checkpoint.")],
    prefill: Annotated[int, typer.Option(help="Number of prefill engines.", min=1, max=64)] = 1,
    decode: Annotated[int, typer.Option(help="Number of decode engines.", min=1, max=64)] = 1,
    mode: Annotated[
        str, typer.Option(help="pull: one leg after the other; push: both at once, KV moves early.")
    ] = "pull",
    stream: Annotated[
        str | None, typer.Option(help="When KV moves in push: off, chunk or layer.", show_default=False)
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size of each engine.", min=1)] = 1,
    prefill_tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel size of prefill engines, if different.", min=1)
    ] = None,
    decode_tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel size of decode engines, if different.", min=1)
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address of the router; engines stay on the loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the router.", min=1, max=65535)] = 8000,
    tls_cert: Annotated[
        str | None,
        typer.Option(
            help="Of the router: PEM file with its certificate and chain.",
            envvar="BATON_ROUTE_TLS_CERT",
            show_envvar=False,
            show_default=False,
        ),
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option(
            help="Of the router: PEM file with the key of the certificate.",
            envvar="BATON_ROUTE_TLS_KEY",
            show_envvar=False,
            show_default=False,
        ),
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a KV block.", min=1)] = None,
    prefill_block_size: Annotated[
        int | None, typer.Option(help="Of the prefill engines, if it is another.", min=1)
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks of each engine.", min=2)] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Limit for prompt plus answer, in tokens.", min=1)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name in the API.")] = None,
    on_death: Annotated[
        Literal["restart", "exit"],
        typer.Option(
            help="When a process dies: restart it, with a growing delay and up to 5 times in 10 minutes, "
            "or exit and stop all.",
        ),
    ] = "restart",
    log_dir: Annotated[Path, typer.Option(help="Folder for the logs.")] = Path(".baton/logs"),
    start_timeout_s: Annotated[
        float, typer.Option(help="Time for all processes to be ready.", min=1)
    ] = START_TIMEOUT_S,
) -> None:
    """Start engines and a router, restart processes that die, and stop all of them on Ctrl-C.

    Arguments after `--` are passed to each engine's `baton serve`, for example: baton up MODEL --
    --max-num-seqs 64
    """
    from rich.console import Console

    from baton.cli import processes
    from baton.cli.supervision import supervise
    from baton.cli.system import EngineArguments, HandoffArguments, plan_system, start_system
    from baton.core.errors import ConfigError
    from baton.http.tls import TlsFiles

    if not (model / "config.json").is_file():
        raise typer.BadParameter(f"{model} has no config.json; `baton model new DIR` makes a small model")
    if not processes.is_port_free(host, port):
        raise typer.BadParameter(f"{host}:{port} is in use; choose another --port")
    arguments = EngineArguments(
        model,
        decode_tp or tp,
        block_size,
        num_blocks,
        max_model_len,
        dtype,
        served_model_name,
        extra=tuple(context.args),
    )
    try:
        handoff = HandoffArguments(mode, stream)
        if (tls := TlsFiles.of(tls_cert, tls_key, None)) is not None:
            verifying_own(tls)  # Refuses files that do not fit.
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    plan = plan_system(
        arguments,
        num_prefill=prefill,
        num_decode=decode,
        router_host=host,
        router_port=port,
        router_tls=tls,
        handoff=handoff,
        prefill_arguments=replace(
            arguments, tp=prefill_tp or tp, block_size=prefill_block_size or block_size
        ),
    )
    console = Console(highlight=False)
    try:
        with processes.raising_on_stop_signals(), processes.Fleet(log_dir) as fleet:
            start_system(fleet, plan, timeout_s=start_timeout_s, console=console)
            for engine in plan.engines:
                console.print(f"{engine.name:<12} {engine.url}", soft_wrap=True)
            console.print(
                f"{'router':<12} [bold]{plan.router_url}[/]  (page at /, logs in {log_dir})",
                soft_wrap=True,
            )
            console.print(_example(plan.router_url), soft_wrap=True, markup=False)
            if on_death == "restart":
                supervise(fleet, plan.roles, lambda line: console.print(line, markup=False, soft_wrap=True))
            ended = fleet.wait_exit(None)
            assert ended is not None
            raise processes.ChildDied(ended)
    except (KeyboardInterrupt, processes.Stopped):
        console.print("stopped")
    except (processes.ChildDied, processes.StartTimeout) as error:
        Console(stderr=True, highlight=False).print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


def _example(url: str) -> str:
    return (
        "Try it (Ctrl-C stops everything):\n"
        f"  curl {url}/v1/completions -H 'content-type: application/json' \\\n"
        """    -d '{"prompt": "The quick brown fox", "max_tokens": 32, "stream": true}'"""
    )
