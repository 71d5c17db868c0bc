"""`baton route`: the P/D router in front of running engines.

Its configuration file is TOML with one table, [route], whose keys are the options' names:

    [route]
    prefill = ["http://10.0.0.7:8100"]
    decode = ["http://10.0.0.8:8200"]
    mode = "push"

Flags override the environment (BATON_ROUTE_MODE=push), which overrides the file, which overrides defaults.
"""

import logging
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from baton.cli.exposure import exposure_of
from baton.cli.http_options import (
    ADMIN_API_KEY_ENV,
    ADMIN_API_KEY_HELP,
    ALLOWED_HOSTS_HELP,
    API_KEY_ENV,
    API_KEY_HELP,
    ENGINE_API_KEY_ENV,
    LIMITS_HELP,
    OTLP_HELP,
    PEER_SECRET_ENV,
    REGISTER_API_KEY_ENV,
    REGISTER_API_KEY_HELP,
    TLS_CERT_HELP,
    TLS_CLIENT_CA_HELP,
    TLS_KEY_HELP,
    read_api_keys,
)
from baton.cli.members import MEMBERS_HELP, ROLES, TABLE, read_members, read_route_config, source_of
from baton.cli.show_config import to_toml
from baton.core.errors import ConfigError, UserError
from baton.core.json_text import NotJson, decode_json
from baton.tracing import find_endpoint

app = typer.Typer(help="Route requests between prefill and decode engines.")

ENV_PREFIX = "BATON_ROUTE"
OWN_OPTIONS = ("config", "show_config", "help")  # Not keys of the table.


_ORIGINS = {"COMMANDLINE": "command line", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}


def show_route_config(context: typer.Context) -> str:
    """Return the options of `baton route` in the format of `--config`, each with its origin."""
    lines = [f"[{TABLE}]"]
    for name, value in context.params.items():
        if name not in OWN_OPTIONS and value is not None:
            source = context.get_parameter_source(name)
            origin = _ORIGINS.get(source.name, "default") if source is not None else "default"
            lines.append(f"{name} = {to_toml(value)}  # {origin}")
    return "\n".join(lines)


def _known_options(context: typer.Context) -> set[str]:
    return {option.name for option in context.command.params if option.name} - {*OWN_OPTIONS}


def _is_from_file(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT_MAP"


def _use_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults, before the other options are parsed."""
    if path is not None:
        try:
            context.default_map = read_route_config(path, _known_options(context))
        except UserError as error:
            raise typer.BadParameter(str(error)) from error
    return path


@app.command(context_settings={"auto_envvar_prefix": ENV_PREFIX})
def route(
    context: typer.Context,
    prefill: Annotated[
        list[str] | None, typer.Option(help="Root URL of a prefill engine; repeat for more.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="Root URL of a decode engine; repeat for more.")
    ] = None,
    model_alias: Annotated[
        list[str] | None,
        typer.Option(help="Another name of a model, for clients: ALIAS=MODEL; repeat for more."),
    ] = None,
    members: Annotated[list[str] | None, typer.Option(help=MEMBERS_HELP, metavar="SOURCE")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    mode: Annotated[
        str, typer.Option(help="pull: one leg after the other; push: both at once, KV moves early.")
    ] = "pull",
    decode_leg: Annotated[
        str,
        typer.Option(
            help="When push starts the decode leg. at_once; late: about when the prompt is computed; "
            "auto: late for a vLLM on its prefill engine's host."
        ),
    ] = "auto",
    first_token: Annotated[
        bool,
        typer.Option(
            "--first-token/--no-first-token", help="Stream the prefill engine's first token immediately."
        ),
    ] = True,
    hedge_prefill: Annotated[
        bool,
        typer.Option(
            "--hedge-prefill/--no-hedge-prefill",
            help="In pull: let a second prefill engine compute a prompt that is late at the first one.",
        ),
    ] = True,
    resumes: Annotated[
        int,
        typer.Option(
            help="Times that another engine continues a stream whose decode engine fails, where it gives the "
            "same answer; 0: the stream ends with an error.",
            min=0,
        ),
    ] = 2,
    policy: Annotated[
        str,
        typer.Option(
            help="least_in_flight, round_robin, prefix_affinity, or cost: where the first token is expected "
            "soonest, with little harm to others; a prompt may stay with a decode engine."
        ),
    ] = "least_in_flight",
    kv_events: Annotated[
        list[str] | None,
        typer.Option(
            help="Where an engine publishes KV events, for --policy cost: URL=ENDPOINT[,REPLAY_ENDPOINT], "
            "such as http://10.0.0.7:8100=tcp://10.0.0.7:5557,tcp://10.0.0.7:5558; repeat for more. "
            "*=tcp://{host}:5557,tcp://{host}:5558 is for all others, also for those that join later."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder with the model's tokenizer.json, to find texts in the engines' caches."),
    ] = None,
    on_prefill_failure: Annotated[
        str, typer.Option(help="local: the decode engine computes the prompt; fail: the request fails.")
    ] = "local",
    min_prefill_tokens: Annotated[
        int, typer.Option(help="Shorter prompts (by estimate) go directly to a decode engine.", min=0)
    ] = 0,
    max_prefill_tokens: Annotated[
        int,
        typer.Option(
            help="Cap: an engine with so many prompt tokens to compute gets no other prompt. With this cap "
            "or the next one, requests wait in the router by priority; 0: no cap.",
            min=0,
        ),
    ] = 0,
    engines_by_priority: Annotated[
        bool,
        typer.Option(
            help="With that cap: the engines compute urgent prompts first (`baton serve --scheduling-policy "
            "priority`), so a prompt does not wait for less urgent ones."
        ),
    ] = False,
    max_running: Annotated[
        int, typer.Option(help="Cap: requests for each decode engine at once; 0: no cap.", min=0)
    ] = 0,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that wait in the router; more get 429.", min=1)
    ] = 1024,
    max_ttft_s: Annotated[
        float,
        typer.Option(
            help="With a cap: a request whose first token is predicted later gets 429 and Retry-After. A "
            "client may ask for less with the header x-slo-ttft-ms."
        ),
    ] = 60.0,
    least_priority: Annotated[
        int,
        typer.Option(help="With a cap: least value of `priority` that clients may name; less goes earlier."),
    ] = 0,
    tenant_header: Annotated[
        str | None,
        typer.Option(
            help="With a cap: header that names the tenant, set by a gateway. Default: the API key is the "
            "tenant. Tenants get equal shares.",
        ),
    ] = None,
    tenant_share: Annotated[
        list[str] | None,
        typer.Option(help="Share of a tenant, compared with 1 of the others: NAME=SHARE; repeat for more."),
    ] = None,
    connect_timeout_s: Annotated[float, typer.Option(help="Limit for connecting to an engine.")] = 2.0,
    prefill_timeout_s: Annotated[float, typer.Option(help="Limit for the whole prefill leg.")] = 120.0,
    first_byte_timeout_s: Annotated[float, typer.Option(help="Limit for a stream's first piece.")] = 120.0,
    answer_timeout_s: Annotated[
        float, typer.Option(help="Limit for an answer that is not streamed.")
    ] = 600.0,
    idle_timeout_s: Annotated[float, typer.Option(help="Limit between two pieces of a stream.")] = 60.0,
    total_timeout_s: Annotated[float, typer.Option(help="Limit for one request with all attempts.")] = 3600.0,
    keepalive_timeout_s: Annotated[
        float, typer.Option(help="How long an idle connection to an engine is used; engines keep it longer.")
    ] = 2.0,
    drain_timeout_s: Annotated[
        float, typer.Option(help="Time for running requests to end after SIGTERM.", min=0)
    ] = 30.0,
    admin_port: Annotated[
        int | None,
        typer.Option(
            help="Port for /metrics, /fleet, /status, /instances and the page (default: the main port).",
            min=0,
            max=65535,
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            help="Processes that serve clients on the port (SO_REUSEPORT). 0: one for each four engines, and "
            "four if --members may bring more, at most one for each core.",
            min=0,
            max=64,
        ),
    ] = 0,
    peer_bind: Annotated[
        str | None,
        typer.Option(
            help="Endpoint on which this router publishes its load and sessions to other routers of the same "
            "engines, such as tcp://10.0.0.1:5600.",
            metavar="ENDPOINT",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Endpoint of another router; repeat for more.", metavar="ENDPOINT"),
    ] = None,
    peer_secret_file: Annotated[
        str | None,
        typer.Option(
            help=f"File with the secret that these routers share; or set {PEER_SECRET_ENV}.", metavar="FILE"
        ),
    ] = None,
    api_key_file: Annotated[str | None, typer.Option(help=API_KEY_HELP, metavar="FILE")] = None,
    auth_file: Annotated[
        str | None,
        typer.Option(
            help="TOML file with tenants' keys and rate limits, and issuers of JSON Web Tokens; see "
            "docs/operations.md.",
            metavar="FILE",
        ),
    ] = None,
    admin_api_key_file: Annotated[str | None, typer.Option(help=ADMIN_API_KEY_HELP, metavar="FILE")] = None,
    register_api_key_file: Annotated[
        str | None, typer.Option(help=REGISTER_API_KEY_HELP, metavar="FILE")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help=TLS_CERT_HELP, metavar="FILE")] = None,
    tls_key: Annotated[str | None, typer.Option(help=TLS_KEY_HELP, metavar="FILE")] = None,
    tls_client_ca: Annotated[str | None, typer.Option(help=TLS_CLIENT_CA_HELP, metavar="FILE")] = None,
    engine_ca: Annotated[
        str | None,
        typer.Option(
            help="PEM file with the authorities of https engines (default: the system's).", metavar="FILE"
        ),
    ] = None,
    engine_api_key_file: Annotated[
        str | None,
        typer.Option(
            help=f"File with the API key of the engines; or set {ENGINE_API_KEY_ENV}. "
            "Default: the first of the router's own keys; without any, the client's key is passed on.",
            metavar="FILE",
        ),
    ] = None,
    allowed_hosts: Annotated[str, typer.Option(help=ALLOWED_HOSTS_HELP, metavar="NAMES")] = "",
    limits: Annotated[str | None, typer.Option(help=LIMITS_HELP, metavar="JSON")] = None,
    outlier_detection: Annotated[
        str,
        typer.Option(
            help="When errors eject an engine, with Envoy's names, such as "
            "'{\"consecutive_5xx\": 5}'; see docs/operations.md.",
            metavar="JSON",
        ),
    ] = "{}",
    otlp_traces_endpoint: Annotated[str | None, typer.Option(help=OTLP_HELP, metavar="URL")] = None,
    access_log: Annotated[
        str | None,
        typer.Option(
            help="File that gets a line of JSON for each request that has ended, without prompts and "
            "answers; - is standard output.",
            metavar="FILE",
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with a table [route]; flags and BATON_ROUTE_* override it.",
            callback=_use_config,
            is_eager=True,
        ),
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the settings with their origins, and exit.")
    ] = False,
) -> None:
    """Serve an OpenAI-compatible endpoint; the page of the fleet is at /, the fleet's state at /fleet.

    Every option can also come from the environment (BATON_ROUTE_MODE) or from a TOML file (--config), whose
    engines are read again when it changes. At SIGHUP files with keys, tenants and certificates are too.
    """
    from baton.core.validation import explain
    from baton.http.auth import KeyFiles, read_auth
    from baton.http.gate import hosts_to_check
    from baton.http.settings import HttpLimits, HttpSettings
    from baton.http.tls import ClientTls, ServerTls, TlsFiles
    from baton.router.members.sources.file import FileSource
    from baton.router.processes.run import num_workers_for, serve
    from baton.router.shell.access_log import AccessLog
    from baton.router.shell.engine_keys import split_engine_keys
    from baton.router.values.settings import AdmissionSettings, LegTimeouts, PeerSettings, RouterSettings

    if tokenizer is not None and not (Path(tokenizer) / "tokenizer.json").is_file():
        raise typer.BadParameter(f"tokenizer: {tokenizer} has no tokenizer.json")
    if tokenizer is not None and find_spec("tokenizers") is None:
        raise typer.BadParameter("tokenizer: needs the package: pip install tokenizers")
    reread = [role for role in ROLES if _is_from_file(context, role)]
    options = context.params  # Most have the names of the settings.
    wanted = {
        **{name: options[name] for name in RouterSettings.__struct_fields__ if name in options},
        "prefill_urls": [url.rstrip("/") for url in prefill or ()],
        "decode_urls": [url.rstrip("/") for url in decode or ()],
        "has_sources": bool(members),
        "reread_roles": reread,
        "model_aliases": dict(_alias(text) for text in model_alias or ()),
        "kv_events": [_kv_events_source(text) for text in kv_events or ()],
        "timeouts": {
            name: options[f"{name.removesuffix('_s')}_timeout_s"] for name in LegTimeouts.__struct_fields__
        },
    }
    try:
        detection = decode_json(outlier_detection.encode())
        settings = msgspec.convert(wanted | {"outlier_detection": detection}, RouterSettings)
        sources = [source for text in members or () if (source := source_of(text)) is not None]
        if reread:
            assert config is not None
            read = partial(read_members, config, _known_options(context), tuple(reread))
            sources.append(FileSource(config, read))
        keys = read_api_keys(api_key_file, os.environ, variable=API_KEY_ENV, field="api_key_file")
        admin_keys = read_api_keys(
            admin_api_key_file, os.environ, variable=ADMIN_API_KEY_ENV, field="admin_api_key_file"
        )
        register_keys = read_api_keys(
            register_api_key_file,
            os.environ,
            variable=REGISTER_API_KEY_ENV,
            field="register_api_key_file",
        )
        if register_keys and not (keys or admin_keys):
            raise ConfigError(
                "needs --admin-api-key-file or --api-key-file: without them every client may register",
                field="register_api_key_file",
            )
        auth = read_auth(auth_file)
        if (tls := TlsFiles.of(tls_cert, tls_key, tls_client_ca)) is not None:
            ServerTls(tls)  # Refuses files that do not fit.
            settings = msgspec.structs.replace(settings, tls=tls)
        if engine_ca is not None:
            ClientTls(engine_ca, field="engine_ca")
        engine_keys = read_api_keys(
            engine_api_key_file, os.environ, variable=ENGINE_API_KEY_ENV, field="engine_api_key_file"
        )
        engine_key, engine_keys_by_url = split_engine_keys(engine_keys)
        secrets = read_api_keys(
            peer_secret_file, os.environ, variable=PEER_SECRET_ENV, field="peer_secret_file"
        )
        if max_prefill_tokens or max_running:
            admission = AdmissionSettings(
                max_tokens=max_prefill_tokens,
                max_running=max_running,
                by_priority=engines_by_priority,
                max_waiting=max_waiting,
                ttft_s=max_ttft_s,
                least_priority=least_priority,
                tenant_header=tenant_header,
                shares=(*auth.shares, *(_share(text) for text in tenant_share or ())),
            )
            settings = msgspec.structs.replace(settings, admission=admission)
        if peer_bind is None and peer:
            raise ConfigError("is needed with --peer", field="peer_bind")
        if peer_bind is not None:
            peers = PeerSettings(peer_bind, tuple(peer or ()), next(iter(secrets), ""))
            settings = msgspec.structs.replace(settings, peers=peers)
        http = HttpSettings.of(
            HttpLimits.from_json(limits or "{}"),
            api_keys=keys,
            allowed_hosts=allowed_hosts,
            admin_keys=admin_keys,
            register_keys=register_keys,
            key_files=KeyFiles(
                api_keys=api_key_file,
                admin_keys=admin_api_key_file,
                register_keys=register_api_key_file,
                auth=auth_file,
            ),
            auth=auth,
        )
        hosts = hosts_to_check(host, http.allowed_hosts)
        settings = msgspec.structs.replace(
            settings,
            doors=http,
            otlp_traces_endpoint=find_endpoint(otlp_traces_endpoint, os.environ),
            checked_hosts=None if hosts is None else tuple(hosts),
            # One key for a whole fleet is the usual case.
            engine_api_key=next(iter(filter(None, (engine_key, *keys))), None),
            engine_api_keys=engine_keys_by_url,
            engine_key_file=engine_api_key_file,
            engines_have_own_key=engine_key is None,
        )
        if access_log is not None:
            AccessLog(access_log).close()  # Raises OSError if it cannot be written.
    except OSError as error:
        raise typer.BadParameter(f"access_log: {access_log} cannot be written: {error.strerror}") from error
    except msgspec.ValidationError as error:
        problem, path = explain(error, RouterSettings)
        raise typer.BadParameter(f"{path.lstrip('.')}: {problem}") from error
    except NotJson as error:
        raise typer.BadParameter(f"outlier_detection: {error}") from error
    except UserError as error:
        raise typer.BadParameter(str(error)) from error
    if show_config:
        typer.echo(show_route_config(context))
        return
    if (exposure := exposure_of(host, http, tls)) is not None:
        logging.getLogger("baton.cli.route").warning("%s", exposure)
    status = serve(
        settings,
        host=host,
        port=port,
        admin_port=admin_port,
        num_workers=workers or num_workers_for(settings, os.cpu_count() or 1),
        log_config=_log_config(log_level),
        sources=sources,
    )
    raise typer.Exit(status)


def _alias(text: str) -> tuple[str, str]:
    alias, _, model = text.partition("=")
    return alias, model


def _share(text: str) -> tuple[str, float]:
    tenant, _, share = text.rpartition("=")
    try:
        return tenant, float(share)
    except ValueError as error:
        raise typer.BadParameter(f"tenant_share: must be NAME=SHARE, is {text!r}") from error


def _kv_events_source(text: str) -> dict[str, str | None]:
    url, _, endpoints = text.partition("=")
    endpoint, _, replay_endpoint = endpoints.partition(",")
    if not endpoint:
        raise typer.BadParameter(f"kv_events: must be URL=ENDPOINT[,REPLAY_ENDPOINT], is {text!r}")
    return {"url": url.rstrip("/"), "endpoint": endpoint, "replay_endpoint": replay_endpoint or None}


def _log_config(level: str) -> dict[str, Any]:
    """Return a configuration with one plain line per event on standard error."""
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


_LOGGERS = ("baton", "asyncio")
