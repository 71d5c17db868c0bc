"""`baton serve MODEL`: serves one engine with an OpenAI-compatible API.

This module has only the flags; `settings.py` merges them with environment and file, and `baton.server.run`
serves.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.http_options import ALLOWED_HOSTS_HELP, API_KEY_HELP, LIMITS_HELP, warn_if_open

if TYPE_CHECKING:
    from baton.cli.settings import Resolved
    from baton.core.config import EngineConfig

app = typer.Typer()

EXIT_BAD_CONFIG = 2

_MODEL, _SERVER, _CACHE, _SCHEDULER = "Model", "Server", "KV cache", "Scheduler"
_PARALLEL, _CLUSTER, _CONFIG = "Parallelism and device", "Cluster", "Configuration"


def _option(name: str, help: str, panel: str, metavar: str | None = None) -> typer.models.OptionInfo:
    """Make an option with default None: a flag that was not given must not hide the environment or the
    file.
    """
    option: typer.models.OptionInfo = typer.Option(
        *name.split(), help=help, rich_help_panel=panel, show_default=False, metavar=metavar
    )
    return option


@app.command()
def serve(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder of the checkpoint.", show_default=False)
    ] = None,
    served_model_name: Annotated[
        str | None,
        _option("--served-model-name", "Model name in the API (default: the folder's name).", _MODEL),
    ] = None,
    dtype: Annotated[
        str | None, _option("--dtype", "auto, float32, bfloat16 or float16 (default auto).", _MODEL)
    ] = None,
    max_model_len: Annotated[
        int | None,
        _option("--max-model-len", "Limit for prompt plus answer, in tokens (default: the model's).", _MODEL),
    ] = None,
    seed: Annotated[int | None, _option("--seed", "Seed of requests that have none.", _MODEL)] = None,
    host: Annotated[str | None, _option("--host", "Address to bind (default 127.0.0.1).", _SERVER)] = None,
    port: Annotated[
        int | None, _option("--port", "Port; 0 selects a free one (default 8000).", _SERVER)
    ] = None,
    log_level: Annotated[
        str | None, _option("--log-level", "debug, info, warning or error (default info).", _SERVER)
    ] = None,
    admin_port: Annotated[
        int | None,
        _option("--admin-port", "Port for /metrics and /baton/* (default: the main port).", _SERVER),
    ] = None,
    api_key_file: Annotated[str | None, _option("--api-key-file", API_KEY_HELP, _SERVER, "FILE")] = None,
    allowed_hosts: Annotated[
        str | None, _option("--allowed-hosts", ALLOWED_HOSTS_HELP, _SERVER, "NAMES")
    ] = None,
    limits: Annotated[str | None, _option("--limits", LIMITS_HELP, _SERVER, "JSON")] = None,
    shutdown_timeout_s: Annotated[
        float | None,
        _option(
            "--shutdown-timeout-s", "Time for running requests after a stop signal (default 5).", _SERVER
        ),
    ] = None,
    drain_timeout_s: Annotated[
        float | None,
        _option(
            "--drain-timeout-s",
            "Time to drain before that: new requests get 503, running ones finish, lent KV is returned "
            "(default 30 for producers, else 0).",
            _SERVER,
        ),
    ] = None,
    step_timeout_s: Annotated[
        float | None,
        _option(
            "--step-timeout-s",
            "Time limit of a step: an engine without progress for so long is ended (default 300).",
            _SERVER,
        ),
    ] = None,
    block_size: Annotated[
        int | None, _option("--block-size", "Tokens in a block (default 16).", _CACHE)
    ] = None,
    num_blocks: Annotated[
        int | None, _option("--num-blocks", "Blocks of the cache (default 2048).", _CACHE)
    ] = None,
    kv_cache_memory: Annotated[
        str | None,
        _option(
            "--kv-cache-memory",
            "Size of the cache on each rank, such as 512MiB, instead of --num-blocks.",
            _CACHE,
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        _option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            "Reuse the KV of equal prefixes (default on).",
            _CACHE,
        ),
    ] = None,
    hybrid_kv_cache: Annotated[
        str | None,
        _option(
            "--hybrid-kv-cache",
            "auto: layers with a sliding window free the blocks before it; off (default auto).",
            _CACHE,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, _option("--max-num-batched-tokens", "Token budget of a step (default 2048).", _SCHEDULER)
    ] = None,
    max_num_seqs: Annotated[
        int | None, _option("--max-num-seqs", "Largest number of running requests (default 256).", _SCHEDULER)
    ] = None,
    scheduling_policy: Annotated[
        str | None, _option("--scheduling-policy", "fcfs or priority (default fcfs).", _SCHEDULER)
    ] = None,
    enable_chunked_prefill: Annotated[
        bool | None,
        _option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            "Spread long prompts over steps (default on).",
            _SCHEDULER,
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        _option("--tensor-parallel-size -tp", "Ranks that share the model (default 1).", _PARALLEL),
    ] = None,
    executor: Annotated[
        str | None,
        _option(
            "--executor",
            "Executor of the ranks: inprocess, multiprocess or ray (default: multiprocess for several).",
            _PARALLEL,
        ),
    ] = None,
    max_concurrent_batches: Annotated[
        int | None,
        _option("--max-concurrent-batches", "Steps in flight at once (default 1).", _PARALLEL),
    ] = None,
    on_rank_death: Annotated[
        str | None,
        _option(
            "--on-rank-death",
            "exit, or restart the ranks; open requests fail in both cases (default exit).",
            _PARALLEL,
        ),
    ] = None,
    device: Annotated[str | None, _option("--device", "auto, cpu or cuda (default auto).", _PARALLEL)] = None,
    graph_mode: Annotated[
        str | None,
        _option("--graph-mode", "CUDA graphs of decode steps: off, auto, piecewise, full.", _PARALLEL),
    ] = None,
    threads: Annotated[
        int | None, _option("--threads", "Compute threads of one rank on CPU (default 1).", _PARALLEL)
    ] = None,
    kv_transfer_config: Annotated[
        str | None,
        _option("--kv-transfer-config", "KV connector, in vLLM's JSON.", _CLUSTER, "JSON"),
    ] = None,
    kv_events_config: Annotated[
        str | None,
        _option("--kv-events-config", "Publication of KV events, in vLLM's JSON.", _CLUSTER, "JSON"),
    ] = None,
    secret_file: Annotated[
        str | None,
        _option("--secret-file", "File with the cluster secret; or set BATON_SECRET.", _CLUSTER, "FILE"),
    ] = None,
    insecure_no_secret: Annotated[
        bool | None,
        _option(
            "--insecure-no-secret",
            "Transfer KV without a secret: trusts every process of this host. For tests.",
            _CLUSTER,
        ),
    ] = None,
    config: Annotated[
        Path | None, _option("--config", "TOML file; flags and BATON_* override it.", _CONFIG, "FILE")
    ] = None,
    show_config: Annotated[
        bool,
        typer.Option(
            "--show-config", help="Print the settings with their origins, and exit.", rich_help_panel=_CONFIG
        ),
    ] = False,
) -> None:
    """Serve one engine with an OpenAI-compatible API.

    Every setting can also come from the environment (BATON_MAX_NUM_SEQS) or from a TOML file (--config).
    """
    import os

    from baton.cli.settings import resolve
    from baton.core.errors import UserError

    given = {
        name: value
        for name, value in context.params.items()
        if value is not None and name not in ("config", "show_config")
    }
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


def _serve(resolved: "Resolved") -> int:
    """Serve and return the exit status."""
    import asyncio
    import logging

    from baton.assemble import make_connector_metrics, make_connector_stats, make_door
    from baton.cli.engine_config import CONNECTOR_FACTORY, engine_config
    from baton.engine.core.client import EngineClient, EngineDeadError
    from baton.engine.text.tokenizer import Tokenizer
    from baton.http.gate import is_loopback
    from baton.server.connector_log import ConnectorLog
    from baton.server.run import EXIT_ENGINE_DIED, Parts, ServeOptions, run

    settings = resolved.settings
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if resolved.secret_warning:
        logging.getLogger("baton.cli.serve").warning(resolved.secret_warning)
    config = engine_config(resolved)
    warn_if_open(settings.host, resolved.http.api_keys, is_loopback=is_loopback(settings.host))
    options = ServeOptions(
        settings.host,
        settings.port,
        settings.shutdown_timeout_s,
        settings.drains_for_s,
        resolved.http,
        settings.admin_port,
    )
    factory = CONNECTOR_FACTORY if settings.moves_kv else None
    build_stats = make_connector_stats(config)
    parts = Parts(
        start_engine=lambda: EngineClient.start(config, connector_factory=factory),
        load_tokenizer=lambda: Tokenizer.from_folder(config.model_config.model),
        check_params=make_door(config),
        build_connector_metrics=make_connector_metrics(config),
        connector_log=ConnectorLog(build_stats) if build_stats is not None else None,
    )
    try:
        return asyncio.run(run(config, options, parts, lambda url: _announce(config, url)))
    except EngineDeadError as error:
        typer.echo(f"baton serve: the engine did not start: {error}", err=True)
        return EXIT_ENGINE_DIED


def _announce(config: "EngineConfig", url: str) -> None:
    """Print the ready line, which supervisors wait for."""
    role = config.kv_transfer_config.kv_role if config.kv_transfer_config else None
    what = (
        f"{config.model_config.served_model_name} ({role})" if role else config.model_config.served_model_name
    )
    typer.echo(f"baton: ready, serving {what} at {url}")
