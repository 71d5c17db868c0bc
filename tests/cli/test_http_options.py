"""Sources of API keys, and the warnings that go with them."""

from pathlib import Path

import pytest

from baton.cli.http_options import API_KEY_ENV, read_api_keys, warn_if_open
from baton.cli.settings import resolve
from baton.core.errors import ConfigError
from baton.http.settings import HttpSettings


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


def test_a_server_beyond_loopback_without_keys_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_open("0.0.0.0", HttpSettings(api_keys=("key-number-1",)), is_loopback=False)
    warn_if_open("127.0.0.1", HttpSettings(api_keys=()), is_loopback=True)
    assert caplog.text == ""
    warn_if_open("0.0.0.0", HttpSettings(api_keys=()), is_loopback=False)
    assert "no API key is set" in caplog.text


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
