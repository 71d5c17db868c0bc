"""Sources of API keys, and the warnings that go with them."""

from pathlib import Path

import pytest

from baton.cli.doctor import look_at_exposure
from baton.cli.exposure import exposure_of
from baton.cli.serve_settings import resolve
from baton.cli.settings import read_api_keys
from baton.core.errors import ConfigError
from baton.http.options import API_KEY_ENV
from baton.http.settings import HttpSettings
from baton.http.tls import TlsFiles


def read(file: Path | None, environment: dict[str, str]) -> tuple[str, ...]:
    path = None if file is None else str(file)
    return read_api_keys(path, environment, variable=API_KEY_ENV, field="api_key_file")


def test_a_file_takes_precedence_over_the_environment(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# mine\n key-number-1\n\nkey-number-2 \n")
    environment = {API_KEY_ENV: "key-number-3,key-number-4"}
    assert read(tmp_path / "keys", environment) == ("key-number-1", "key-number-2")
    assert read(None, environment) == ("key-number-3", "key-number-4")
    assert read(None, {}) == ()


@pytest.mark.parametrize("text", ["", "# nothing\n", "short\n", "schlüssel-eins\n"])
def test_a_file_without_a_good_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match="key"):
        read(tmp_path / "keys", {})


def test_a_file_that_others_can_read_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "keys").write_text("key-number-1")
    (tmp_path / "keys").chmod(0o644)
    read(tmp_path / "keys", {})
    assert "chmod 600" in caplog.text
    caplog.clear()
    (tmp_path / "keys").chmod(0o600)
    read(tmp_path / "keys", {})
    assert caplog.text == ""


KEYS = HttpSettings(api_keys=("key-number-1",))


def tls_of(tmp_path: Path, *, mode: int = 0o600, client_ca: str | None = None) -> TlsFiles:
    key = tmp_path / "tls.key"
    key.write_text("key")
    key.chmod(mode)
    return TlsFiles(cert=str(tmp_path / "cert"), key=str(key), client_ca=client_ca)


def test_a_server_beyond_loopback_is_warned_about_once(tmp_path: Path) -> None:
    tls = tls_of(tmp_path)
    assert exposure_of("0.0.0.0", KEYS, tls) is None
    assert exposure_of("127.0.0.1", HttpSettings(), None) is None
    assert exposure_of("0.0.0.0", HttpSettings(), tls_of(tmp_path, client_ca="ca")) is None
    no_key, no_tls = exposure_of("0.0.0.0", HttpSettings(), tls), exposure_of("::", KEYS, None)
    assert no_key is not None
    assert no_tls is not None
    assert "every client that reaches the port can send requests" in no_key
    assert "--api-key-file" in no_key
    assert "TLS" not in no_key
    assert "administrator's pages" in no_key
    of_admin = exposure_of("0.0.0.0", HttpSettings(admin_keys=("key-number-1",)), tls)
    assert of_admin is not None
    assert "administrator's pages" not in of_admin
    assert "everyone on the path can read prompts" in no_tls
    assert "--tls-cert" in no_tls
    assert "API key" not in no_tls
    both = exposure_of("10.0.0.1", HttpSettings(), None, also=[None, "the secret is weak"])
    assert both is not None
    assert both.startswith("exposed at 10.0.0.1: every client")
    assert both.endswith("; the secret is weak")


def test_a_tls_key_that_others_can_read_is_warned_about(tmp_path: Path) -> None:
    found = exposure_of("127.0.0.1", KEYS, tls_of(tmp_path, mode=0o640))
    assert found is not None
    assert f"can read {tmp_path}/tls.key (mode 0640): chmod 600" in found


def test_the_doctor_lists_open_doors_and_secret_files(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key-number-1")
    (tmp_path / "secret").write_text("a" * 32)
    for name, mode in (("keys", 0o644), ("secret", 0o604)):
        (tmp_path / name).chmod(mode)
    secret = str(tmp_path / "secret")
    environment = {"BATON_HOST": "0.0.0.0"}
    first, second, file = look_at_exposure(environment, secret)
    assert [one.is_good for one in (first, second, file)] == [False] * 3
    assert (first.subject, second.subject) == ("baton serve at 0.0.0.0",) * 2
    assert ("--api-key-file" in first.mend, "--tls-cert" in second.mend) == (True, True)
    assert (f"can read {secret}" in file.found, file.mend) == (True, f"chmod 600 {secret}")
    *_, first, second = look_at_exposure({"BATON_API_KEY_FILE": str(tmp_path / "keys")}, secret)
    assert (first.found, second.found) == (file.found, second.found)
    (tmp_path / "secret").chmod(0o600)
    (good,) = look_at_exposure({}, secret)
    assert (good.is_good, good.found) == (True, "is not open to the network")
    (bad,) = look_at_exposure({"BATON_PORT": "x"}, None)
    assert (bad.is_good, "BATON_PORT" in bad.found) == (None, True)


def test_serve_takes_keys_hosts_and_limits() -> None:
    environment = {
        API_KEY_ENV: "key-number-1",
        "BATON_LIMITS": '{"body_s": 5}',
        "BATON_ALLOWED_HOSTS": "a, b",
    }
    http = resolve({}, environment=environment).http
    assert (http.api_keys, http.allowed_hosts, http.body_s) == (("key-number-1",), ("a", "b"), 5)


def test_an_impossible_limit_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"limits\.body_s: must be positive"):
        resolve({}, environment={"BATON_LIMITS": '{"body_s": 0}'})
