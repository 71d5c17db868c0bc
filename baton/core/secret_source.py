"""Source of the cluster secret: the environment, a file, or a secret generated once per user.

    BATON_SECRET, BATON_PREVIOUS_SECRET      the current secret, and the one that it replaces
    a file                                   the same two, one per line
    $XDG_STATE_HOME/baton/secret             generated when an engine moves KV and neither is given

Engines that move KV without a secret trust every process of their host. That needs an explicit
`insecure_no_secret`.
"""

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from baton.core.config import MIN_SECRET_BYTES, ClusterSecret, EngineConfig
from baton.core.errors import ConfigError
from baton.core.limited_file import read_limited

SECRET_ENV = "BATON_SECRET"
PREVIOUS_SECRET_ENV = "BATON_PREVIOUS_SECRET"
MAX_SECRET_BYTES = 1 << 16
_GENERATED_BYTES = 32
_EXAMPLE = "for example: openssl rand -hex 32"
_INSECURE = (
    "insecure_no_secret is set: every process on this host can read the KV of prompts, end loans, and send "
    "this engine false KV, which leads to wrong answers. Use it for tests only"
)


class FoundSecret(NamedTuple):
    secret: ClusterSecret | None = None
    origin: str | None = None
    warning: str | None = None  # Text for the log.


def find_secret(
    environment: Mapping[str, str],
    *,
    file: str | None,
    field: str,
    is_file_first: bool,
    moves_kv: bool,
    is_insecure: bool,
) -> FoundSecret:
    """The secret of an engine. `field` names the setting of `file`, which takes precedence over BATON_SECRET
    if `is_file_first`. An engine that moves KV gets a generated secret, unless `is_insecure`.

    Raises ConfigError for a file that cannot be used, a secret that is too short, and settings that
    contradict each other.
    """
    if PREVIOUS_SECRET_ENV in environment and not environment.get(SECRET_ENV, "").strip():
        raise ConfigError(f"needs {SECRET_ENV}, the secret that replaces it", field=PREVIOUS_SECRET_ENV)
    in_environment = _from_environment(environment)
    in_file = _from_file(Path(file), field) if file and (is_file_first or not in_environment) else None
    found = in_file or in_environment
    if found is not None:
        if is_insecure:
            raise ConfigError(
                f"must not be set together with a secret, which comes from: {found.origin}",
                field="insecure_no_secret",
            )
        return found
    if not moves_kv:
        return FoundSecret()
    if is_insecure:
        return FoundSecret(warning=_INSECURE)
    return _generated(environment)


def with_secret(config: EngineConfig, environment: Mapping[str, str]) -> tuple[EngineConfig, str | None]:
    """`config` of an embedded engine with a secret if it needs one, and a warning for the log or None."""
    transfer = config.kv_transfer_config
    if config.cluster_secret is not None or transfer is None or not transfer.is_kv_transfer_instance:
        return config, None
    found = find_secret(
        {} if config.insecure_no_secret else environment,
        file=None,
        field="secret_file",
        is_file_first=False,
        moves_kv=True,
        is_insecure=config.insecure_no_secret,
    )
    return msgspec.structs.replace(config, cluster_secret=found.secret), found.warning


def _from_environment(environment: Mapping[str, str]) -> FoundSecret | None:
    key = environment.get(SECRET_ENV, "").strip()
    previous = environment.get(PREVIOUS_SECRET_ENV, "").strip()
    if not key:
        return None
    return FoundSecret(_secret([key.encode(), previous.encode()], SECRET_ENV), f"environment {SECRET_ENV}")


def _from_file(path: Path, field: str) -> FoundSecret:
    lines = read_limited(path, MAX_SECRET_BYTES, field=field).split(b"\n")
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {os.strerror(error.errno or 0)}", field=field) from error
    warning = None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        warning = (
            f"{field}: {path} can be read by other users (mode {stat.S_IMODE(mode):04o}): chmod 600 {path}"
        )
    return FoundSecret(_secret(lines, field), f"file {path}", warning)


def _generated(environment: Mapping[str, str]) -> FoundSecret:
    """The secret of this user on this host. The first engine that needs it generates it."""
    state = environment.get("XDG_STATE_HOME") or (
        f"{environment['HOME']}/.local/state" if environment.get("HOME") else None
    )
    if state is None:
        raise ConfigError(
            f"is required by an engine that moves KV, and none can be generated without HOME; {_EXAMPLE}",
            field=SECRET_ENV,
        )
    path = Path(state) / "baton" / "secret"
    try:
        if not os.path.lexists(path):
            _generate(path)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"is required by an engine that moves KV, and a generated one cannot be kept in {path}: "
            f"{os.strerror(error.errno or 0)}",
            field=SECRET_ENV,
        ) from error
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path} must be a file of this user that only it can read (chmod 600), or set {SECRET_ENV}",
            field=SECRET_ENV,
        )
    secret = _secret(read_limited(path, MAX_SECRET_BYTES, field=SECRET_ENV).split(b"\n"), SECRET_ENV)
    return FoundSecret(msgspec.structs.replace(secret, is_generated=True), f"generated, file {path}")


def _generate(path: Path) -> None:
    """Writes the file atomically: if two engines start at once, one complete file remains."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_hex(_GENERATED_BYTES).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return  # Another engine was first.
    finally:
        draft.unlink()


def _secret(lines: list[bytes], field: str) -> ClusterSecret:
    """The secret of a file or variable: the current key, then optionally the previous one."""
    keys = [line.strip() for line in lines if line.strip()]
    if not 1 <= len(keys) <= 2:
        raise ConfigError(
            f"has {len(keys)} lines, expected 1 or 2: the secret, then optionally the previous one; "
            f"{_EXAMPLE}",
            field=field,
        )
    if any(len(key) < MIN_SECRET_BYTES for key in keys):
        raise ConfigError(f"must have at least {MIN_SECRET_BYTES} bytes; {_EXAMPLE}", field=field)
    return ClusterSecret(keys[0], keys[1] if len(keys) == 2 else None)
