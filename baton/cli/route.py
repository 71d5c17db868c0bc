"""`baton route`: the P/D router in front of engines that run already."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Route requests between prefill and decode engines.")

ENV_PREFIX = "BATON_ROUTE"

# Longer than clients and balancers keep an idle connection (aiohttp 15 s, nginx 60 s): whoever closes first
# must not be us, or a request that is sent at that moment meets a reset.
KEEP_ALIVE_S = 75


def _use_config(context: typer.Context, path: Path | None) -> Path | None:
    """Before the other options are looked at: the file's values become their defaults."""
    if path is not None:
        from baton.cli.route_config import OWN_OPTIONS, read_route_config
        from baton.core.errors import UserError

        known = {option.name for option in context.command.params if option.name} - {*OWN_OPTIONS}
        try:
            context.default_map = read_route_config(path, known)
        except UserError as error:
            raise typer.BadParameter(str(error)) from error
    return path


@app.command(context_settings={"auto_envvar_prefix": ENV_PREFIX})
def route(
    context: typer.Context,
    prefill: Annotated[list[str], typer.Option(help="Root URL of a prefill engine; repeat for more.")],
    decode: Annotated[list[str], typer.Option(help="Root URL of a decode engine; repeat for more.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    mode: Annotated[
        str, typer.Option(help="pull: one leg after the other; push: both at once, KV moves early.")
    ] = "pull",
    decode_leg: Annotated[
        str,
        typer.Option(
            help="In push: at_once; late, when the prompt is computed or shortly before; "
            "auto: late for a vLLM on its prefill engine's host."
        ),
    ] = "auto",
    first_token: Annotated[
        bool,
        typer.Option(
            "--first-token/--no-first-token", help="Stream the prefill engine's first token at once."
        ),
    ] = True,
    policy: Annotated[
        str, typer.Option(help="least_in_flight, round_robin or prefix_affinity.")
    ] = "least_in_flight",
    on_prefill_failure: Annotated[
        str, typer.Option(help="local: the decode engine prefills by itself; fail: the request fails.")
    ] = "local",
    min_prefill_tokens: Annotated[
        int, typer.Option(help="Shorter prompts (estimated) go straight to a decode engine.", min=0)
    ] = 0,
    connect_timeout_s: Annotated[float, typer.Option(help="To connect to an engine.")] = 2.0,
    prefill_timeout_s: Annotated[float, typer.Option(help="For the whole prefill leg.")] = 120.0,
    first_byte_timeout_s: Annotated[float, typer.Option(help="For a stream's first piece.")] = 120.0,
    answer_timeout_s: Annotated[float, typer.Option(help="For an answer that is not streamed.")] = 600.0,
    idle_timeout_s: Annotated[float, typer.Option(help="Between two pieces of a stream.")] = 60.0,
    total_timeout_s: Annotated[float, typer.Option(help="For one request, all attempts together.")] = 3600.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with a table [route]; flags and BATON_ROUTE_* go over it.",
            callback=_use_config,
            is_eager=True,
        ),
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print what holds and why, and exit.")
    ] = False,
) -> None:
    """Serve an OpenAI-compatible endpoint; the dashboard is at /, the fleet's state at /fleet.

    Every option can also come from the environment (BATON_ROUTE_MODE) or from a TOML file (--config).
    """
    import msgspec
    import uvicorn

    from baton.core.errors import UserError
    from baton.core.validation import explain
    from baton.router.app import create_app
    from baton.router.settings import RouterSettings

    wanted = {
        "prefill_urls": [url.rstrip("/") for url in prefill],
        "decode_urls": [url.rstrip("/") for url in decode],
        "mode": mode,
        "decode_leg": decode_leg,
        "first_token": first_token,
        "policy": policy,
        "on_prefill_failure": on_prefill_failure,
        "min_prefill_tokens": min_prefill_tokens,
        "timeouts": {
            "connect_s": connect_timeout_s,
            "prefill_s": prefill_timeout_s,
            "first_byte_s": first_byte_timeout_s,
            "answer_s": answer_timeout_s,
            "idle_s": idle_timeout_s,
            "total_s": total_timeout_s,
        },
    }
    try:
        settings = msgspec.convert(wanted, RouterSettings)
    except msgspec.ValidationError as error:
        problem, path = explain(error, RouterSettings)
        raise typer.BadParameter(f"{path.lstrip('.')}: {problem}") from error
    except UserError as error:
        raise typer.BadParameter(str(error)) from error
    if show_config:
        from baton.cli.route_config import show_route_config

        typer.echo(show_route_config(context))
        return
    uvicorn.run(
        create_app(settings),
        host=host,
        port=port,
        log_level=log_level,
        log_config=_log_config(log_level),
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        # Streams in flight get this long to end once we are told to stop.
        timeout_graceful_shutdown=5,
    )


def _log_config(level: str) -> dict[str, object]:
    """One plain line per event on standard error, uvicorn's and ours alike."""
    loggers = {
        name: {"handlers": ["stderr"], "level": level.upper(), "propagate": False} for name in _LOGGERS
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": loggers,
    }


_LOGGERS = ("baton", "uvicorn", "uvicorn.error")
