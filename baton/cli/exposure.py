"""Exposure of a server and of its secret files: what others can do now, and the setting that closes it."""

import stat
from collections.abc import Iterable
from pathlib import Path

from baton.http.gate import is_loopback
from baton.http.options import API_KEY_ENV
from baton.http.settings import HttpSettings
from baton.http.tls import TlsFiles


def open_doors(*, is_open: bool, has_tls: bool, has_admin_keys: bool = False) -> list[str]:
    """Return what everyone on the network can do with a server beyond the loopback."""
    doors = []
    if is_open:
        pages = "" if has_admin_keys else " and read the administrator's pages"
        doors.append(
            f"every client that reaches the port can send requests{pages}, because no API key is set "
            f"(--api-key-file, {API_KEY_ENV})"
        )
    if not has_tls:
        doors.append(
            "everyone on the path can read prompts, answers and keys, because there is no TLS "
            "(--tls-cert and --tls-key, or a proxy in front that ends TLS)"
        )
    return doors


def doors_of(host: str, http: HttpSettings, tls: TlsFiles | None) -> list[str]:
    """Return the same for a server with these settings; nothing for one on the loopback."""
    if is_loopback(host):
        return []
    needs_certificate = tls is not None and tls.client_ca is not None
    return open_doors(
        is_open=http.is_open and not needs_certificate,
        has_tls=tls is not None,
        has_admin_keys=bool(http.admin_keys),
    )


def readable_files(paths: Iterable[str | None]) -> list[str]:
    """Return the files among `paths` that other users of this machine can read."""
    found = []
    for path in filter(None, paths):
        try:
            mode = Path(path).stat().st_mode
        except OSError:
            continue  # The reader of this file reports it.
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            shown = f"{path} (mode {stat.S_IMODE(mode):04o})"
            found.append(f"other users of this machine can read {shown}: chmod 600 {path}")
    return found


def exposure_of(
    host: str, http: HttpSettings, tls: TlsFiles | None, *, also: Iterable[str | None] = ()
) -> str | None:
    """Return one warning for the log, or None. `also`: further exposures.

    Files with keys are not looked at: their readers warn, also when a file changes while the server runs.
    """
    found = [*doors_of(host, http, tls), *readable_files([tls.key] if tls is not None else [])]
    found += filter(None, also)
    return f"exposed at {host}: {'; '.join(found)}" if found else None
