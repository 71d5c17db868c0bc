"""`baton serve MODEL`: serves one engine with an OpenAI-compatible API.

`ServeSettings` declares the options, and `baton.server.run` serves.
"""

import gc
from typing import TYPE_CHECKING

import typer

from baton.cli.exposure import exposure_of
from baton.cli.serve_settings import COMMAND, Resolved, read_named
from baton.cli.settings import Values
from baton.core.config import EngineConfig
from baton.tracing import find_endpoint

if TYPE_CHECKING:
    from baton.server.registration import Registrar

app = typer.Typer()


@app.command()
@COMMAND.entry
def serve(values: Values, show_config: bool) -> int:
    """Serve one engine with an OpenAI-compatible API.

    Every setting can also come from the environment (BATON_MAX_NUM_SEQS) or from a TOML file (--config).
    """
    resolved = read_named(values)
    if show_config:
        typer.echo(resolved.shown())
        return 0
    return _serve(resolved)


def _serve(resolved: Resolved) -> int:
    """Serve and return the exit status."""
    import asyncio
    import logging

    from baton.assemble import make_connector_metrics, make_connector_stats, make_door, places_lent
    from baton.cli.engine_config import CONNECTOR_FACTORY, engine_config
    from baton.engine.core.client import EngineClient, EngineDeadError
    from baton.engine.text.tokenizer import Tokenizer
    from baton.server.connector_log import ConnectorLog
    from baton.server.run import EXIT_ENGINE_DIED, Parts, run

    settings = resolved.settings
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    exposure = exposure_of(settings.host, resolved.http, settings.tls, also=[resolved.secret_warning])
    if exposure is not None:
        logging.getLogger("baton.cli.serve").warning("%s", exposure)
    config = engine_config(resolved)
    factory = CONNECTOR_FACTORY if settings.moves_kv else None
    build_stats = make_connector_stats(config)
    parts = Parts(
        start_engine=lambda: EngineClient.start(config, connector_factory=factory),
        load_tokenizer=lambda: Tokenizer.from_folder(config.model_config.model),
        check_params=make_door(config),
        http=resolved.http,
        places_lent=tuple(sorted(places_lent(config))),
        build_connector_metrics=make_connector_metrics(config),
        connector_log=ConnectorLog(build_stats) if build_stats is not None else None,
        new_registrar=lambda url: _new_registrar(resolved, url, config.model_config.served_model_name),
        otlp_traces_endpoint=find_endpoint(settings.otlp_traces_endpoint, resolved.values.environment),
    )
    try:
        return asyncio.run(run(config, settings, parts, lambda url: _announce(config, url)))
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
