"""`baton up MODEL`: starts engines and a router, and ends them together."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from baton.cli.settings import plain_entry
from baton.cli.system_settings import SystemSettings
from baton.core.option import AtLeast1, Option

app = typer.Typer(help="Start a whole prefill/decode system on this machine.")

Count = Annotated[int, msgspec.Meta(ge=1, le=64)]


class UpSettings(SystemSettings, frozen=True, kw_only=True):
    """Options of `baton up`.

    model: Folder of the checkpoint.
    prefill: Number of prefill engines.
    decode: Number of decode engines.
    host: Address of the router; engines stay on the loopback.
    port: Port of the router.
    tls_cert: PEM file with the router's certificate and chain.
    tls_key: PEM file with the key of the certificate.
    max_model_len: Limit for prompt plus answer, in tokens.
    served_model_name: Name in the API.
    on_death: When a process dies: restart it, with a growing delay and up to 5 times in 10 minutes, or exit
        and stop all.
    start_timeout_s: Time for all processes to be ready.
    """

    model: Annotated[Path, Option(metavar="MODEL", is_argument=True)]
    prefill: Annotated[Count, Option()] = 1
    decode: Annotated[Count, Option()] = 1
    host: Annotated[str, Option()] = "127.0.0.1"
    port: Annotated[Annotated[int, msgspec.Meta(ge=1, le=65535)], Option()] = 8000
    tls_cert: Annotated[str | None, Option(variable="BATON_ROUTE_TLS_CERT")] = None
    tls_key: Annotated[str | None, Option(variable="BATON_ROUTE_TLS_KEY")] = None
    mode: Annotated[str, Option()] = "pull"
    max_model_len: Annotated[AtLeast1 | None, Option()] = None
    served_model_name: Annotated[str | None, Option()] = None
    on_death: Annotated[Literal["restart", "exit"], Option()] = "restart"
    start_timeout_s: Annotated[Annotated[float, msgspec.Meta(ge=1)], Option()] = 180.0


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
@partial(plain_entry, UpSettings)
def up(settings: UpSettings, extra: list[str]) -> None:
    """Start engines and a router, restart processes that die, and stop all of them on Ctrl-C.

    Arguments after `--` are passed to each engine's `baton serve`, for example: baton up MODEL --
    --max-num-seqs 64
    """
    from rich.console import Console

    from baton.cli import processes
    from baton.cli.http_options import verifying_own
    from baton.cli.supervision import supervise
    from baton.cli.system import HandoffArguments, plan_system, start_system
    from baton.core.errors import ConfigError
    from baton.http.tls import TlsFiles

    if not (settings.model / "config.json").is_file():
        raise typer.BadParameter(
            f"{settings.model} has no config.json; `baton model new DIR` makes a small model"
        )
    if not processes.is_port_free(settings.host, settings.port):
        raise typer.BadParameter(f"{settings.host}:{settings.port} is in use; choose another --port")
    try:
        handoff = HandoffArguments(settings.mode, settings.stream)
        if (tls := TlsFiles.of(settings.tls_cert, settings.tls_key, None)) is not None:
            verifying_own(tls)  # Refuses files that do not fit.
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    arguments = settings.arguments(
        settings.model,
        max_model_len=settings.max_model_len,
        served_model_name=settings.served_model_name,
        extra=tuple(extra),
    )
    plan = plan_system(
        arguments,
        num_prefill=settings.prefill,
        num_decode=settings.decode,
        router_host=settings.host,
        router_port=settings.port,
        router_tls=tls,
        handoff=handoff,
        prefill_arguments=settings.prefill_arguments(arguments),
    )
    console = Console(highlight=False)
    try:
        with processes.raising_on_stop_signals(), processes.Fleet(settings.log_dir) as fleet:
            start_system(fleet, plan, timeout_s=settings.start_timeout_s, console=console)
            for engine in plan.engines:
                console.print(f"{engine.name:<12} {engine.url}", soft_wrap=True)
            console.print(
                f"{'router':<12} [bold]{plan.router_url}[/]  (page at /, logs in {settings.log_dir})",
                soft_wrap=True,
            )
            console.print(_example(plan.router_url), soft_wrap=True, markup=False)
            if settings.on_death == "restart":
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
