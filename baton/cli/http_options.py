"""Settings of a server made of its options, and TLS of commands that ask a server."""

import ssl
from pathlib import Path

import msgspec
import typer

from baton.cli.settings import Values
from baton.core.errors import ConfigError
from baton.http.auth import KeyFiles, read_auth
from baton.http.settings import HttpSettings
from baton.http.tls import TlsFiles

CA_HELP = "PEM file with the authorities of an https server (default: the system's)."


def http_settings(values: Values) -> HttpSettings:
    """Settings of the HTTP layer of `baton serve` or `baton route`. Raises ConfigError."""
    has_registrations = "register_api_key_file" in values.command.settings
    auth_file = values["auth_file"] if has_registrations else None
    return HttpSettings(
        **msgspec.structs.asdict(values["limits"]),
        api_keys=values.keys("api_key_file"),
        admin_keys=values.keys("admin_api_key_file"),
        register_keys=values.keys("register_api_key_file") if has_registrations else (),
        key_files=KeyFiles(
            api_keys=values["api_key_file"],
            admin_keys=values["admin_api_key_file"],
            register_keys=values["register_api_key_file"] if has_registrations else None,
            auth=auth_file,
        ),
        auth=read_auth(auth_file),
        allowed_hosts=tuple(name.strip() for name in values["allowed_hosts"].split(",") if name.strip()),
    )


def verifying(ca: Path | None) -> ssl.SSLContext:
    """TLS context of a command that asks a server. `ca`: the file of `--ca`. Raises BadParameter."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise typer.BadParameter(f"{ca}: {error}", param_hint="--ca") from error


def verifying_own(files: TlsFiles) -> ssl.SSLContext:
    """TLS context for a server that this command has started with these files: trusts this certificate only.

    The certificate's names may differ from the address of the request. Raises ConfigError.
    """
    try:
        context = ssl.create_default_context(cafile=files.cert)
        context.load_cert_chain(files.cert, files.key)  # If the server asks for one.
    except OSError as error:
        raise ConfigError(f"{files.cert}, {files.key}: {error}", field="tls_cert") from error
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context
