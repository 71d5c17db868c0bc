"""`baton route`: the P/D router in front of running engines.

`RouteSettings` and the router's own settings declare the options. The configuration file is TOML with one
table, [route], whose keys are the options' names:

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
from baton.cli.http_options import http_settings
from baton.cli.members import ROLES, TABLE, read_members, source_of
from baton.cli.settings import Command, Values
from baton.core.errors import ConfigError
from baton.core.option import Option
from baton.http.options import PEER_SECRET_ENV, REGISTER_API_KEY_ENV, HttpOptions
from baton.router.values.settings import AdmissionSettings, LegTimeouts, PeerSettings, Role, RouterSettings
from baton.tracing import find_endpoint

app = typer.Typer(help="Route requests between prefill and decode engines.")


class RouteSettings(HttpOptions, frozen=True, kw_only=True):
    """Settings of `baton route` that are not the router's own.

    members: Further engines, which join and leave while the router runs: dns:NAME?role=decode&port=8200,
        kubernetes:NAMESPACE?selector=LABELS, redis://HOST:PORT/0, or register (engines register at this
        router); repeat for more.
    workers: Processes that serve clients on the port (SO_REUSEPORT). 0: one for each four engines, and four
        if --members may bring more, at most one for each core
    peer_secret_file: File with the secret that these routers share; or set BATON_PEER_SECRET.
    auth_file: TOML file with tenants' keys and rate limits, and issuers of JSON Web Tokens; see
        docs/operations.md.
    register_api_key_file: File with the keys with which engines may register, and that open nothing else; or
        set BATON_REGISTER_API_KEY. Keys of the administrator may register, too.
    """

    members: Annotated[tuple[str, ...], Option(metavar="SOURCE")] = ()
    workers: Annotated[Annotated[int, msgspec.Meta(ge=0, le=64)], Option()] = 0
    peer_secret_file: Annotated[str | None, Option(content=PEER_SECRET_ENV)] = None
    auth_file: Annotated[str | None, Option()] = None
    register_api_key_file: Annotated[str | None, Option(content=REGISTER_API_KEY_ENV)] = None


COMMAND = Command(
    "route",
    RouterSettings,
    LegTimeouts,
    AdmissionSettings,
    PeerSettings,
    RouteSettings,
    prefix="BATON_ROUTE_",
    table=TABLE,
)


@app.command()
@COMMAND.entry
def route(values: Values, show_config: bool) -> int:
    """Serve an OpenAI-compatible endpoint; the page of the fleet is at /, the fleet's state at /fleet.

    Every option can also come from the environment (BATON_ROUTE_MODE) or from a TOML file (--config), whose
    engines are read again when it changes. At SIGHUP files with keys, tenants and certificates are too.
    """
    from baton.http.tls import ClientTls, ServerTls
    from baton.router.members.sources.file import FileSource
    from baton.router.processes.run import num_workers_for, serve
    from baton.router.shell.access_log import AccessLog

    own = values.make(RouteSettings)
    reread = tuple(role for role in ROLES if values.origins.get(role, "").startswith("file"))
    sources = [source for text in own.members if (source := source_of(text)) is not None]
    if reread:
        assert values.config_file is not None
        read = partial(read_members, values.config_file, COMMAND.read_file, reread)
        sources.append(FileSource(values.config_file, read))
    settings = _router_settings(values, own, reread)
    if settings.tls is not None:
        ServerTls(settings.tls)  # Refuses files that do not fit.
    if settings.engine_ca is not None:
        ClientTls(settings.engine_ca, field="engine_ca")
    if settings.access_log is not None:
        try:
            AccessLog(settings.access_log).close()
        except OSError as error:
            raise ConfigError(
                f"{settings.access_log} cannot be written: {error.strerror}", field="access_log"
            ) from error
    if show_config:
        typer.echo(values.shown())
        return 0
    if (exposure := exposure_of(own.host, settings.doors, settings.tls)) is not None:
        logging.getLogger("baton.cli.route").warning("%s", exposure)
    return serve(
        settings,
        host=own.host,
        port=own.port,
        admin_port=own.admin_port,
        num_workers=own.workers or num_workers_for(settings, os.cpu_count() or 1),
        log_config=_log_config(own.log_level),
        sources=sources,
    )


def _router_settings(values: Values, own: RouteSettings, reread: tuple[Role, ...]) -> RouterSettings:
    """Settings of the router, with the keys in the files that they name. Raises ConfigError."""
    from baton.http.gate import hosts_to_check
    from baton.router.shell.engine_keys import split_engine_keys

    if (tokenizer := values["tokenizer"]) is not None:
        if not (Path(tokenizer) / "tokenizer.json").is_file():
            raise ConfigError(f"{tokenizer} has no tokenizer.json", field="tokenizer")
        if find_spec("tokenizers") is None:
            raise ConfigError("needs the package: pip install tokenizers", field="tokenizer")
    http = http_settings(values)
    if http.register_keys and not (http.api_keys or http.admin_keys):
        raise ConfigError(
            "needs --admin-api-key-file or --api-key-file: without them every client may register",
            field="register_api_key_file",
        )
    admission = peers = None
    if values["max_prefill_tokens"] or values["max_running"]:
        admission = values.make(AdmissionSettings)
        admission = msgspec.structs.replace(admission, shares=(*http.auth.shares, *admission.shares))
    if values["peer_bind"] is not None:
        peers = values.make(PeerSettings, secret=next(iter(values.keys("peer_secret_file")), ""))
    elif values["peer"]:
        raise ConfigError("is needed with --peer", field="peer_bind")
    engine_key, engine_keys = split_engine_keys(values.keys("engine_api_key_file"))
    hosts = hosts_to_check(own.host, http.allowed_hosts)
    return values.make(
        RouterSettings,
        has_sources=bool(own.members),
        reread_roles=reread,
        admission=admission,
        peers=peers,
        doors=http,
        tls=own.tls,
        checked_hosts=None if hosts is None else tuple(hosts),
        otlp_traces_endpoint=find_endpoint(own.otlp_traces_endpoint, values.environment),
        # One key for a whole fleet is the usual case.
        engine_api_key=next(iter(filter(None, (engine_key, *http.api_keys))), None),
        engine_api_keys=engine_keys,
        engines_have_own_key=engine_key is None,
        timeouts=values.make(LegTimeouts),
    )


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
