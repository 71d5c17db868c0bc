"""Source of the cluster secret: the order of its sources, and the generated secret."""

import os
import stat
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from baton.core.config import ClusterSecret, KVTransferConfig
from baton.core.errors import ConfigError
from baton.core.limited_file import read_limited
from baton.core.secret_source import FoundSecret, find_secret, with_secret
from tests.connectors.pull_world import engine_config

OLD, NEW = "the old secret of the cluster", "the new secret of the cluster"


def found(
    environment: dict[str, str],
    *,
    file: Path | None = None,
    is_file_first: bool = True,
    moves_kv: bool = True,
    is_insecure: bool = False,
) -> FoundSecret:
    return find_secret(
        environment,
        file=str(file) if file else None,
        field="secret_file",
        is_file_first=is_file_first,
        moves_kv=moves_kv,
        is_insecure=is_insecure,
    )


def private(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "given"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_both_secrets_come_from_the_environment_or_from_two_lines(tmp_path: Path) -> None:
    both = ClusterSecret(NEW.encode(), OLD.encode())
    environment = {"BATON_SECRET": NEW, "BATON_PREVIOUS_SECRET": OLD}
    file = private(tmp_path, f"{NEW}\n{OLD}\n")
    assert found(environment).secret == both
    assert found({}, file=file).secret == both
    assert found({"BATON_SECRET": OLD}, file=file).secret == both
    assert found({"BATON_SECRET": OLD}, file=file, is_file_first=False).secret == ClusterSecret(OLD.encode())


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"BATON_PREVIOUS_SECRET": OLD}, "BATON_PREVIOUS_SECRET: needs BATON_SECRET"),
        ({"BATON_SECRET": NEW, "BATON_PREVIOUS_SECRET": "short"}, "at least 16 bytes"),
        ({"BATON_SECRET": "short"}, "at least 16 bytes"),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        found(environment)


@pytest.mark.parametrize("text", ["", "\n", f"{NEW}\n{OLD}\n{OLD}\n"])
def test_a_file_has_one_or_two_lines(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"secret_file: has \d lines"):
        found({}, file=private(tmp_path, text))


def test_a_file_that_others_can_read_is_warned_about(tmp_path: Path) -> None:
    file = private(tmp_path, NEW)
    assert found({}, file=file).warning is None
    file.chmod(0o644)
    warning = found({}, file=file).warning
    assert warning is not None
    assert f"chmod 600 {file}" in warning
    assert NEW not in warning


def test_a_missing_secret_is_generated_and_kept(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path / "state")}
    first = found(environment)
    path = tmp_path / "state" / "baton" / "secret"
    assert first.secret is not None
    assert first.secret.is_generated
    assert len(first.secret.key) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert found(environment) == first
    assert os.listdir(path.parent) == ["secret"]
    assert found({"HOME": str(tmp_path)}).origin == f"generated, file {tmp_path}/.local/state/baton/secret"


def test_engines_that_start_at_once_generate_one_secret(tmp_path: Path) -> None:
    secrets: list[ClusterSecret | None] = []
    together = threading.Barrier(8)

    def start() -> None:
        together.wait()
        secrets.append(found({"HOME": str(tmp_path)}).secret)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(secrets) == 8
    assert len({secret.key for secret in secrets if secret}) == 1


def test_a_generated_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    found(environment)
    path = tmp_path / "baton" / "secret"
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        found(environment)
    path.unlink()
    path.symlink_to(private(tmp_path, NEW))
    with pytest.raises(ConfigError, match="must be a file of this user"):
        found(environment)


def test_an_error_names_the_variable_if_no_secret_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "baton").write_text("a file where the folder should be")
    for environment in ({}, {"XDG_STATE_HOME": str(tmp_path)}):
        with pytest.raises(ConfigError, match="BATON_SECRET: is required"):
            found(environment)


def test_an_engine_that_moves_no_kv_needs_no_secret() -> None:
    assert found({}, moves_kv=False) == FoundSecret()


def test_moving_kv_without_a_secret_needs_an_explicit_setting_and_warns() -> None:
    insecure = found({}, is_insecure=True)
    assert insecure.secret is None
    assert insecure.warning is not None
    assert "wrong answers" in insecure.warning
    with pytest.raises(ConfigError, match="insecure_no_secret: must not be set together with a secret"):
        found({"BATON_SECRET": NEW}, is_insecure=True)


def test_an_embedded_engine_gets_a_secret_if_it_moves_kv(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    given, _ = with_secret(engine_config("e"), environment)
    assert given == engine_config("e")
    config = engine_config("e", secret=None)
    insecure, warning = with_secret(config, environment)
    assert (insecure, warning is not None) == (config, True)
    generated, warning = with_secret(replace(config, insecure_no_secret=False), environment)
    assert (generated.cluster_secret is not None, warning) == (True, None)
    alone = replace(config, insecure_no_secret=False, kv_transfer_config=KVTransferConfig())
    assert with_secret(alone, environment) == (alone, None)
    with pytest.raises(ConfigError, match="cluster_secret: is required"):
        _ = replace(config, insecure_no_secret=False).transfer_secret


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_limited(fifo, 100, field="x")
