"""Options of a bucket: each wrong name, type or value is a ConfigError that names the option."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.connectors.extra_config import FIELD, parse_extra
from baton.connectors.storage.stores.settings import StorageSettings
from baton.connectors.storage.stores.tiers import make_tiers
from baton.core.errors import ConfigError
from baton.stores.backends.objects import ObjectStore

GOOD: dict[str, dict[str, str]] = {
    "s3://bucket/kv": {"access_key_id": "key", "secret_access_key": "secret", "region": "eu-central-1"},
    "gs://bucket/kv": {"bucket": "other"},
    "az://container/kv": {"account_name": "name", "account_key": "a2V5"},
    "http://host/kv": {},
    "memory:///": {},
    "file:///tmp": {},
}
CLIENT = """
    allow_http allow_invalid_certificates connect_timeout default_content_type http1_only http2_only
    http2_keep_alive_interval http2_max_frame_size pool_idle_timeout pool_max_idle_per_host proxy_url
    proxy_ca_certificate proxy_excludes randomize_addresses read_timeout timeout user_agent
"""
KNOWN = """
    region bucket endpoint access_key_id skip_signature virtual_hosted_style_request checksum_algorithm
    server_side_encryption account_key sas_token use_emulator service_account service_account_key base_url
"""
PREFIXES = ["", "aws_", "google_", "azure_", "AWS_"]
known = st.tuples(st.sampled_from(PREFIXES), st.sampled_from((CLIENT + KNOWN).split())).map("".join)
names = st.one_of(known, st.text(max_size=8))
values = st.one_of(
    st.sampled_from(["true", "false", "", "5s", "http://127.0.0.1:9", "localhost:9000", "key\n"]),
    st.text(max_size=12),
    st.none() | st.booleans() | st.integers() | st.floats() | st.lists(st.text()) | st.just({}),
)


def make(url: str, options: dict[str, Any]) -> None:
    tier = {"type": "objects", "url": url, "options": options}
    make_tiers(parse_extra(StorageSettings, {"tiers": [tier]}).stored_tiers, lambda: 0.0).close()


@contextmanager
def named(field: str) -> Iterator[None]:
    """A ConfigError has this field, and comes from no panic."""
    try:
        yield
    except ConfigError as raised:
        if raised.field != field or "the client cannot use it" in str(raised):
            pytest.fail(str(raised))
        raise


@given(st.sampled_from(sorted(GOOD)), names, values)
def test_an_option_is_taken_or_refused_by_its_name(url: str, name: str, value: Any) -> None:
    make(url, GOOD[url])
    with suppress(ConfigError), named(f"{FIELD}.options.{name}"):
        make(url, {name: value} | GOOD[url] | {name: value})  # First: it may repeat another by an alias.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allow_http", "true"),
        ("AWS_Timeout", "5s"),
        ("endpoint", "localhost:9000"),
        ("aws_endpoint_url", "http://host:99999"),
        ("endpoint", ""),
        ("endpoint", "http://host with spaces"),
        ("access_key_id", "key\n"),
        ("session_token", "\0"),
        ("region", "eu central"),
        ("bucket", "a/b c"),
        ("virtual_hosted_style_request", False),
        ("skip_signature", "perhaps"),
    ],
)
def test_the_client_does_not_panic_at_an_option(
    name: str, value: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    url = "s3://bucket/kv"
    options = {**GOOD[url], "endpoint": "http://127.0.0.1:9", name: value}
    with pytest.raises(ConfigError, match=rf"^store\.{name}: "):
        ObjectStore(url, options, timeout_s=0.3, options_field="store").check()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("options", [[], "region", 1, None, {"region": None}])
def test_options_are_an_object_of_strings(options: Any) -> None:
    with pytest.raises(ConfigError, match="options"):
        make("s3://bucket/kv", options)


@pytest.mark.parametrize("endpoint", ["http://[::1]:9000", "HTTPS://s3.example.com/path", "http://a_b.c-d"])
def test_an_endpoint_is_any_url(endpoint: str) -> None:
    make("s3://bucket/kv", {"endpoint": endpoint})


def test_a_panic_at_the_first_request_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """An exception of the same name as obstore's."""

    def panic(*_: object) -> None:
        raise PanicException("called `Result::unwrap()`")

    store = ObjectStore("memory:///", timeout_s=1.0)
    monkeypatch.setattr(store, "write", panic)
    with pytest.raises(ConfigError, match="options: cannot be used: the client cannot use it: called"):
        store.check()
    monkeypatch.setattr(store, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.check()
