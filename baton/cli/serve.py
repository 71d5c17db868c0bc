"""`baton serve MODEL`: serves one engine with an OpenAI-compatible API.

The flags are the fields of `ServeSettings`; `settings.py` merges them with environment and file, and
`baton.server.run` serves.
"""

import gc
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from baton.cli.exposure import exposure_of
from baton.cli.http_options import (
    ADMIN_API_KEY_HELP,
    ALLOWED_HOSTS_HELP,
    API_KEY_HELP,
    LIMITS_HELP,
    OTLP_HELP,
    REGISTER_KEY_ENV,
    TLS_CERT_HELP,
    TLS_CLIENT_CA_HELP,
    TLS_KEY_HELP,
)
from baton.cli.settings import DRAIN_S, Resolved, ServeSettings, resolve
from baton.core.config import CacheConfig, EngineConfig
from baton.core.errors import UserError
from baton.tracing import find_endpoint

if TYPE_CHECKING:
    from baton.server.registration import Registrar

app = typer.Typer()

EXIT_BAD_CONFIG = 2

_CONFIG = "Configuration"
_FLAGS: dict[str, dict[str, str]] = {
    "Model": {
        "served_model_name": "Model name in the API (default: the folder's name).",
        "dtype": "auto, float32, bfloat16 or float16",
        "max_model_len": "Limit for prompt plus answer, in tokens (default: the model's).",
        "seed": "Seed of requests that have none",
        "weights_version": "Name of the weights, part of their identity in the fleet: for an engine that "
        "joins one whose weights were updated under this name.",
        "weights_root": "Folder below which POST /update_weights may name checkpoints (default: none; it is "
        "refused).",
    },
    "Server": {
        "host": "Address to bind",
        "port": "Port; 0 selects a free one",
        "log_level": "debug, info, warning or error",
        "otlp_traces_endpoint": OTLP_HELP,
        "admin_port": "Port for /metrics and /baton/* (default: the main port).",
        "api_key_file": API_KEY_HELP,
        "admin_api_key_file": ADMIN_API_KEY_HELP,
        "tls_cert": TLS_CERT_HELP,
        "tls_key": TLS_KEY_HELP,
        "tls_client_ca": TLS_CLIENT_CA_HELP,
        "allowed_hosts": ALLOWED_HOSTS_HELP,
        "limits": LIMITS_HELP,
        "shutdown_timeout_s": "Time for running requests after a stop signal",
        "drain_timeout_s": "Time to drain before that: new requests get 503, running ones finish, lent KV is "
        f"returned (default {DRAIN_S:g} for producers, else 0).",
        "register": "Routers at which this engine registers, such as http://10.0.0.1:8000, or a registry "
        "that they read, such as redis://10.0.0.2:6379/0; several with commas.",
        "register_url": "URL of this engine for routers (default: where it listens).",
        "register_role": "prefill, decode or both (default: as kv_role).",
        "register_weight": "Share of requests, at most 1, which the others have",
        "register_ttl_s": "Time after which a router drains this engine if it does not hear from it",
        "register_key_file": f"File with the administrator's key of the routers; or set {REGISTER_KEY_ENV} "
        "(default: the first of this engine's administrator's keys, or of its keys).",
        "register_ca": "PEM file with the authorities of https routers (default: the system's).",
        "step_timeout_s": "Time limit of a step: an engine without progress for so long is ended",
    },
    "KV cache": {
        "block_size": "Tokens in a block (default 16; with recurrent states as many as have their size).",
        "num_blocks": f"Blocks of the cache (default {CacheConfig().num_gpu_blocks}).",
        "kv_cache_memory": "Size of the cache on each rank, such as 512MiB, instead of --num-blocks.",
        "enable_prefix_caching": "Reuse the KV of equal prefixes",
        "kv_cache_dtype": "auto (that of the model), fp8, fp8_e4m3, fp8_e5m2 or int8_per_token_head",
        "hybrid_kv_cache": "auto: layers with a sliding window free the blocks before it; off",
    },
    "Scheduler": {
        "max_num_batched_tokens": "Token budget of a step",
        "max_num_seqs": "Largest number of running requests",
        "scheduling_policy": "fcfs or priority",
        "enable_chunked_prefill": "Spread long prompts over steps",
    },
    "Parallelism and device": {
        "tensor_parallel_size": "Ranks that share the model",
        "executor": "Executor of the ranks: inprocess, multiprocess or ray "
        "(default: multiprocess for several).",
        "max_concurrent_batches": "Steps in flight at once",
        "on_rank_death": "exit, or restart the ranks; open requests fail in both cases",
        "device": "auto, cpu or cuda",
        "graph_mode": "CUDA graphs of decode steps: off, auto, piecewise, full",
        "threads": "Compute threads of one rank on CPU",
    },
    "Cluster": {
        "kv_transfer_config": "KV connector, in vLLM's JSON.",
        "kv_events_config": "Publication of KV events, in vLLM's JSON.",
        "secret_file": "File with the cluster secret; or set BATON_SECRET.",
        "insecure_no_secret": "Transfer KV without a secret: trusts every process of this host. For tests.",
    },
}
"""Help of each setting, by panel. A text without a full stop gets the setting's default and one."""

_METAVARS = {
    "allowed_hosts": "NAMES",
    "limits": "JSON",
    "weights_version": "NAME",
    "weights_root": "FOLDER",
    "kv_transfer_config": "JSON",
    "kv_events_config": "JSON",
    "api_key_file": "FILE",
    "admin_api_key_file": "FILE",
    "tls_cert": "FILE",
    "tls_key": "FILE",
    "tls_client_ca": "FILE",
    "secret_file": "FILE",
    "register": "URLS",
    "register_url": "URL",
    "register_key_file": "FILE",
    "register_ca": "FILE",
}


def _flag(field: msgspec.structs.FieldInfo, panel: str, help: str) -> inspect.Parameter:
    """Make an option with default None: a flag that was not given must not hide the environment or the
    file.
    """
    kind = next((kind for kind in (bool, int, float) if field.type in (kind, kind | None)), str)
    names = ["--" + field.name.replace("_", "-")]
    if field.default is True:
        names[0] += names[0].replace("--", "/--no-", 1)
    if field.name == "tensor_parallel_size":
        names.append("-tp")
    if not help.endswith("."):
        default = "on" if field.default is True else format(field.default, "g" if kind is float else "")
        help = f"{help} (default {default})."
    option = typer.Option(
        *names,
        help=help,
        rich_help_panel=panel,
        show_default=False,
        metavar=_METAVARS.get(field.name),
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the command's `**flags` by an option for each setting of `_FLAGS`."""
    fields = {field.name: field for field in msgspec.structs.fields(ServeSettings)}
    flags = [
        _flag(fields[name], panel, text) for panel, texts in _FLAGS.items() for name, text in texts.items()
    ]
    own = inspect.signature(command)
    model, *others = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (model, *flags, *others)]
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ |= {flag.name: flag.annotation for flag in flags}
    return command


@app.command()
@_with_flags
def serve(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder of the checkpoint.", show_default=False)
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file; flags and BATON_* override it.",
            rich_help_panel=_CONFIG,
            show_default=False,
            metavar="FILE",
        ),
    ] = None,
    show_config: Annotated[
        bool,
        typer.Option(
            "--show-config", help="Print the settings with their origins, and exit.", rich_help_panel=_CONFIG
        ),
    ] = False,
    **flags: Any,
) -> None:
    """Serve one engine with an OpenAI-compatible API.

    Every setting can also come from the environment (BATON_MAX_NUM_SEQS) or from a TOML file (--config).
    """
    given = {name: value for name, value in {"model": model, **flags}.items() if value is not None}
    try:
        resolved = resolve(given, environment=os.environ, config_file=str(config) if config else None)
        if show_config:
            from baton.cli.show_config import show_config as render

            typer.echo(render(resolved))
            return
        status = _serve(resolved)
    except UserError as error:
        typer.echo(f"baton serve: {error}", err=True)
        raise typer.Exit(EXIT_BAD_CONFIG) from error
    raise typer.Exit(status)


def _serve(resolved: Resolved) -> int:
    """Serve and return the exit status."""
    import asyncio
    import logging

    from baton.assemble import make_connector_metrics, make_connector_stats, make_door, places_lent
    from baton.cli.engine_config import CONNECTOR_FACTORY, engine_config
    from baton.engine.core.client import EngineClient, EngineDeadError
    from baton.engine.text.tokenizer import Tokenizer
    from baton.server.connector_log import ConnectorLog
    from baton.server.run import EXIT_ENGINE_DIED, Parts, ServeOptions, run

    settings = resolved.settings
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    exposure = exposure_of(settings.host, resolved.http, settings.tls, also=[resolved.secret_warning])
    if exposure is not None:
        logging.getLogger("baton.cli.serve").warning("%s", exposure)
    config = engine_config(resolved)
    options = ServeOptions(
        settings.host,
        settings.port,
        settings.shutdown_timeout_s,
        settings.drains_for_s,
        resolved.http,
        settings.admin_port,
        find_endpoint(settings.otlp_traces_endpoint, os.environ),
        settings.tls,
        None if settings.weights_root is None else Path(settings.weights_root),
    )
    factory = CONNECTOR_FACTORY if settings.moves_kv else None
    build_stats = make_connector_stats(config)
    parts = Parts(
        start_engine=lambda: EngineClient.start(config, connector_factory=factory),
        load_tokenizer=lambda: Tokenizer.from_folder(config.model_config.model),
        check_params=make_door(config),
        places_lent=tuple(sorted(places_lent(config))),
        build_connector_metrics=make_connector_metrics(config),
        connector_log=ConnectorLog(build_stats) if build_stats is not None else None,
        new_registrar=lambda url: _new_registrar(resolved, url, config.model_config.served_model_name),
    )
    try:
        return asyncio.run(run(config, options, parts, lambda url: _announce(config, url)))
    except EngineDeadError as error:
        typer.echo(f"baton serve: the engine did not start: {error}", err=True)
        return EXIT_ENGINE_DIED


def _new_registrar(resolved: Resolved, url: str, model: str | None) -> "Registrar | None":
    from baton.http.registration import register_places
    from baton.http.tls import ClientTls
    from baton.server.registration import Registrar, place_of

    settings = resolved.settings
    if settings.register is None:
        return None
    tls = ClientTls(settings.register_ca, settings.tls, field="register_ca")
    places = [place_of(place, resolved.register_key, tls) for place in register_places(settings.register)]
    return Registrar(settings.registrations(url, model), places)


def _announce(config: EngineConfig, url: str) -> None:
    """The server is ready: freeze its objects and print the line that supervisors wait for."""
    # Objects that exist now live as long as the process; the collector need not visit them again. Collecting
    # them first would take as long as the pause that this saves, and the imports leave almost no garbage.
    gc.freeze()
    role = config.kv_transfer_config.kv_role if config.kv_transfer_config else None
    what = (
        f"{config.model_config.served_model_name} ({role})" if role else config.model_config.served_model_name
    )
    typer.echo(f"baton: ready, serving {what} at {url}")
