"""API keys, tenants and JSON Web Tokens: what opens a port, and in whose name."""

import base64
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from baton.core.errors import ConfigError
from baton.http.auth import Authenticator, AuthFile, AuthSettings, KeyFiles, read_auth
from baton.http.errors import ApiError
from baton.http.jwt_tokens import REFRESH_GAP_S, JwtSettings, JwtVerifier
from baton.http.registration import PATH
from baton.http.watched_files import LOOK_EVERY_S, WatchedFiles

SECRET = "a secret of more than thirty-two bytes"
CLAIMS = {"iss": "https://login.example/", "aud": "baton", "sub": "search"}
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
KEYS: dict[str, Any] = {
    "RS256": RSA_KEY,
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}


def settings_of(**given: Any) -> JwtSettings:
    return JwtSettings(issuer=CLAIMS["iss"], audience="baton", **given)


def token_of(key: Any = SECRET, algorithm: str = "HS256", *, kid: str | None = None, **claims: Any) -> str:
    given = {**CLAIMS, "exp": int(time.time()) + 3600, **claims}
    payload = {name: value for name, value in given.items() if value is not None}
    return jwt.encode(payload, key, algorithm, headers=None if kid is None else {"kid": kid})


def pem_of(key: Any) -> str:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    pem: bytes = key.public_key().public_bytes(serialization.Encoding.PEM, form)
    return pem.decode()


def jwks_of(**keys: str) -> str:
    """A JWKS with a key for each key id, of the algorithm that the id stands for."""
    found = []
    for kid, algorithm in keys.items():
        made = jwt.get_algorithm_by_name(algorithm).to_jwk(KEYS[algorithm].public_key(), as_dict=True)
        found.append({**made, "kid": kid, "alg": algorithm, "use": "sig"})
    return json.dumps({"keys": found})


def refused(verifier: JwtVerifier, token: str, now_s: float = 0.0) -> ApiError:
    with pytest.raises(ApiError) as caught:
        verifier.tenant_of(token, now_s)
    return caught.value


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_token_that_is_signed_with_the_secret_names_its_tenant() -> None:
    verifier = JwtVerifier(settings_of(secret=SECRET))
    assert verifier.tenant_of(token_of(), 0.0) == "search"


@pytest.mark.parametrize("algorithm", KEYS)
@pytest.mark.parametrize("is_set", [False, True])
def test_a_token_is_verified_with_a_public_key_in_pem_or_of_a_jwks(algorithm: str, is_set: bool) -> None:
    keys = jwks_of(k1=algorithm) if is_set else pem_of(KEYS[algorithm])
    verifier = JwtVerifier(settings_of(keys=keys))
    token = token_of(KEYS[algorithm], algorithm, kid="k1" if is_set else None)
    assert verifier.tenant_of(token, 0.0) == "search"
    assert verifier.tenant_of(token, 0.0) == "search"


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"exp": int(time.time()) - 31}, "has expired"),
        ({"exp": None}, "has no claim 'exp'"),
        ({"nbf": int(time.time()) + 3600}, "is not valid yet"),
        ({"aud": "other"}, "is for another audience"),
        ({"aud": None}, "has no claim 'aud'"),
        ({"iss": "https://other.example/"}, "is from another issuer"),
        ({"iss": None}, "has no claim 'iss'"),
        ({"sub": None}, "has no claim 'sub'"),
        ({"sub": "a" * 257}, "has no claim 'sub'"),
    ],
)
def test_a_token_with_a_wrong_claim_is_refused(claims: dict[str, Any], why: str) -> None:
    error = refused(JwtVerifier(settings_of(secret=SECRET)), token_of(**claims))
    assert (error.status, why in str(error)) == (401, True), error
    assert error.headers()["WWW-Authenticate"] == 'Bearer error="invalid_token"'


def test_clocks_may_differ_by_the_leeway() -> None:
    verifier = JwtVerifier(settings_of(secret=SECRET))
    assert verifier.tenant_of(token_of(exp=int(time.time()) - 20), 0.0) == "search"


def test_a_known_token_is_refused_once_it_has_expired() -> None:
    now = [time.time()]
    verifier = JwtVerifier(settings_of(secret=SECRET, leeway_s=0.0), wall_s=lambda: now[0])
    expired = int(time.time()) - 1
    token = token_of(exp=int(time.time()) + 5)
    assert verifier.tenant_of(token, 0.0) == "search"
    now[0] += 6
    known = verifier._verified
    assert [end > now[0] for _, end in known.values()] == [False]  # The token is checked in full again.
    assert "has expired" in str(refused(verifier, token_of(exp=expired)))


def unsigned(alg: str) -> str:
    parts = [{"alg": alg, "typ": "JWT"}, {**CLAIMS, "exp": int(time.time()) + 60}]
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    return ".".join([*encoded, ""])


@pytest.mark.parametrize("alg", ["none", "None", "NONE", "HS256", "", "x"])
@pytest.mark.parametrize("source", ["secret", "keys"])
def test_a_token_without_a_signature_is_refused(alg: str, source: str) -> None:
    key = SECRET if source == "secret" else jwks_of(k1="RS256")
    assert refused(JwtVerifier(settings_of(**{source: key})), unsigned(alg)).status == 401


def test_a_public_key_is_no_secret_of_hmac() -> None:
    """The usual confusion of algorithms: the attacker signs with the public key as HMAC's secret."""
    import hashlib
    import hmac

    pem = pem_of(RSA_KEY)
    head = unsigned("HS256").rstrip(".")
    mac = hmac.new(pem.encode(), head.encode(), hashlib.sha256).digest()
    forged = f"{head}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"
    for keys in (pem, jwks_of(k1="RS256")):
        assert "algorithm" in str(refused(JwtVerifier(settings_of(keys=keys)), forged))


@pytest.mark.parametrize("token", ["a.b.c", "..", "eyJ.eyJ.", "a." + "b" * 9000 + ".c", "é.b.c"])
def test_what_is_no_token_is_refused(token: str) -> None:
    for given in ({"secret": SECRET}, {"keys": jwks_of(k1="RS256")}):
        error = refused(JwtVerifier(settings_of(**given)), token)
        assert (error.status, token not in str(error)) == (401, True)


def test_a_token_with_a_new_key_id_waits_for_a_fetch_and_an_invented_one_causes_few() -> None:
    due: list[None] = []
    verifier = JwtVerifier(
        settings_of(jwks_url="https://login.example/jwks"), on_due=lambda: due.append(None)
    )
    verifier.note_fetch(100.0)
    new = token_of(KEYS["ES256"], "ES256", kid="k2")
    assert (refused(verifier, new, 101.0).status, due) == (503, [])  # No key is known yet.
    verifier.use_jwks(jwks_of(k1="RS256"))
    assert refused(verifier, new, 101.0).status == 401  # The keys are fresh.
    error = refused(verifier, new, 100.0 + REFRESH_GAP_S)
    assert (error.status, error.headers()["Retry-After"], len(due)) == (503, "1", 1)
    verifier.note_fetch(110.0)
    assert refused(verifier, new, 110.5).status == 503  # The fetch is under way.
    verifier.use_jwks(jwks_of(k1="RS256", k2="ES256"))
    assert verifier.tenant_of(new, 111.0) == "search"
    assert refused(verifier, token_of(KEYS["ES256"], "ES256", kid="k3"), 112.0).status == 401
    assert len(due) == 1
    verifier.note_fetch(500.0)
    verifier.use_jwks(jwks_of(k1="RS256"))
    assert refused(verifier, new, 501.0).status == 401  # A withdrawn key ends known tokens, too.


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "jwt"),
        ({"secret": SECRET, "jwks_url": "https://a/"}, "jwt"),
        ({"secret": "short"}, "jwt.secret_file"),
        ({"secret": SECRET, "algorithms": ("RS256",)}, "jwt.algorithms"),
        ({"keys": "x", "algorithms": ("HS256",)}, "jwt.algorithms"),
        ({"keys": "x", "algorithms": ("none",)}, "jwt.algorithms"),
        ({"jwks_url": "http://login.example/jwks"}, "jwt.jwks_url"),
        ({"secret": SECRET, "leeway_s": 301.0}, "jwt.leeway_s"),
        ({"secret": SECRET, "tenant_claim": ""}, "jwt.tenant_claim"),
    ],
)
def test_settings_of_tokens_that_cannot_be_safe_are_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(**given)
    assert caught.value.field == field


@pytest.mark.parametrize("keys", ["x", '{"keys": []}', '{"keys": [{"kty": "oct", "k": "YWJj"}]}', "{"])
def test_keys_that_are_none_are_refused(keys: str) -> None:
    with pytest.raises(ConfigError):
        JwtVerifier(settings_of(keys=keys))


TENANTS = """
[tenants.search]
keys = ["key-of-search"]
requests_per_minute = 5
share = 2.5

[default]
requests_per_minute = 1
"""


def test_keys_of_tenants_open_requests_and_not_the_administrators_pages() -> None:
    auth = AuthSettings.from_toml(TENANTS, lambda path, field: "")
    assert auth.shares == (("search", 2.5),)
    assert [auth.rate_of(name).requests_per_minute for name in ("search", "other")] == [5, 1]
    keys = Authenticator(["key-of-all"], auth=AuthFile(auth), is_admin=lambda path: path == "/fleet")
    assert keys.caller("/v1/models", bearer("key-of-search")).tenant == "search"
    assert keys.caller("/v1/models", {"x-api-key": "key-of-search"}).is_named
    assert not keys.caller("/fleet", bearer("key-of-all")).is_named
    for path, key in (("/fleet", "key-of-search"), ("/v1/models", "key-of-none"), ("/v1/models", "")):
        with pytest.raises(ApiError) as caught:
            keys.caller(path, bearer(key))
        assert (caught.value.status, key in str(caught.value)) == (401, key == "")


def test_the_administrators_key_alone_opens_its_pages_where_there_is_one() -> None:
    keys = Authenticator(["key-of-all"], admin_keys=["key-of-admin"], is_admin=lambda path: path == "/fleet")
    assert keys.caller("/fleet", bearer("key-of-admin"))
    assert keys.caller("/v1/models", bearer("key-of-all"))
    for path, key in (("/fleet", "key-of-all"), ("/v1/models", "key-of-admin")):
        with pytest.raises(ApiError):
            keys.caller(path, bearer(key))


def test_a_key_of_registrations_opens_nothing_else() -> None:
    keys = Authenticator(
        ["key-of-all"], register_keys=["key-of-engines"], is_admin=lambda path: path in (PATH, "/fleet")
    )
    assert not keys.caller(PATH, bearer("key-of-engines")).is_named
    assert keys.caller(PATH, bearer("key-of-all"))
    for path in ("/fleet", "/v1/models"):
        with pytest.raises(ApiError):
            keys.caller(path, bearer("key-of-engines"))


def test_a_changed_file_of_keys_is_read_again_and_a_bad_one_is_not(tmp_path: Path) -> None:
    file, now_s = tmp_path / "keys", [0.0]
    file.write_text("the-first-key")
    keys = Authenticator(["the-first-key"], files=KeyFiles(api_keys=str(file)), now_s=lambda: now_s[0])

    def opens(key: str) -> bool:
        now_s[0] += LOOK_EVERY_S
        try:
            return bool(keys.caller("/v1/models", bearer(key)))
        except ApiError:
            return False

    assert opens("the-first-key")
    for bad in ("short", ""):
        file.write_text(bad)
        assert opens("the-first-key")
    file.unlink()
    assert opens("the-first-key")
    file.write_text("the-second-key")
    assert [opens(key) for key in ("the-second-key", "the-first-key")] == [True, False]


class Tenants:
    """Tenants of a file that a test writes."""

    def __init__(self, folder: Path) -> None:
        self.path, self.now_s = folder / "auth.toml", 0.0
        self.write("search", "the-first-key", 10)
        self.auth = AuthFile(read_auth(str(self.path)), str(self.path), lambda: self.now_s)
        self.keys = Authenticator(auth=self.auth)

    def write(self, name: str, key: str, per_minute: int, more: str = "") -> None:
        tenant = f"[tenants.{name}]\nkeys = [{key!r}]\nrequests_per_minute = {per_minute}\n"
        self.path.write_text(more + tenant)
        self.path.chmod(0o600)

    def of(self, key: str) -> str | None:
        """The key's tenant, after the file has been looked at again. None: the key is refused."""
        self.now_s += LOOK_EVERY_S
        try:
            return self.keys.caller(PATH, bearer(key)).tenant
        except ApiError:
            return None


def test_a_changed_file_of_tenants_is_read_again_and_a_bad_one_is_not(tmp_path: Path) -> None:
    tenants = Tenants(tmp_path)
    assert tenants.of("the-first-key") == "search"
    tenants.path.write_text("[tenants.search]\nkeys = ['short']")
    assert tenants.of("the-first-key") == "search"
    tenants.write("shop", "the-second-key", 20)
    assert [tenants.of(key) for key in ("the-second-key", "the-first-key")] == ["shop", None]
    assert tenants.auth.current.rate_of("shop").requests_per_minute == 20
    assert not tenants.auth.current.rate_of("search").is_limited
    tenants.path.write_text("")
    assert tenants.of("any-key") is None, "a router without a key left is not open"


def test_a_worker_that_is_started_later_uses_the_keys_of_the_files(tmp_path: Path) -> None:
    """A worker's settings are those of the router's start, so they may be older than the files."""
    tenants, file = Tenants(tmp_path), tmp_path / "keys"
    tenants.write("shop", "the-second-key", 20)
    file.write_text("the-third-key")
    auth = AuthFile(tenants.auth.current, str(tenants.path))
    keys = Authenticator(["the-first-key"], files=KeyFiles(api_keys=str(file)), auth=auth)
    for key in ("the-second-key", "the-third-key"):
        assert keys.caller(PATH, bearer(key))
    with pytest.raises(ApiError):
        keys.caller(PATH, bearer("the-first-key"))


def test_what_needs_a_restart_is_named_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tenants = Tenants(tmp_path)
    tenants.write("search", "the-first-key", 10, "storage = 'redis://10.0.0.9'\n")
    with caplog.at_level("WARNING"):
        assert tenants.of("the-first-key") == "search"
    assert "changes of storage need a restart" in caplog.text
    assert tenants.auth.current.storage is None


def test_a_call_to_look_now_does_not_wait_for_the_next_time(tmp_path: Path) -> None:
    tenants = Tenants(tmp_path)
    assert tenants.of("the-first-key") == "search"
    tenants.write("shop", "the-second-key", 20)
    assert tenants.auth.current.rate_of("shop").requests_per_minute is None
    WatchedFiles.look_now()
    assert tenants.auth.current.rate_of("shop").requests_per_minute == 20


def test_a_token_opens_no_page_of_the_administrator() -> None:
    verifier = JwtVerifier(settings_of(secret=SECRET))
    tokens = Authenticator(verifier=verifier, is_admin=lambda path: path == "/fleet")
    assert tokens.caller("/v1/models", bearer(token_of())).tenant == "search"
    for path, given in (("/fleet", bearer(token_of())), ("/fleet", {}), ("/v1/models", {})):
        with pytest.raises(ApiError) as caught:
            tokens.caller(path, given)
        assert caught.value.status == 401


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[tenants.a]\nkeys = ['short']", "tenants.a.keys: each key must have at least 8"),
        (
            "[tenants.a]\nkeys = ['12345678']\n[tenants.b]\nkeys = ['12345678']",
            "tenants.b.keys: has a key of a",
        ),
        ("[tenants.a]\nshare = 0", "tenants.a.share: must be a positive number"),
        ("[tenants.a]\nrequests_per_minute = 0", "requests_per_minute: must be at least 1"),
        ("[tenants.a]\nrequests = 1", "unknown field `requests`"),
        ("[tenants.a]\nkeys = ['secret-key-1", "auth_file: is not valid TOML"),
        ("storage = 'memcached://a'", "storage: must be redis://"),
        ("[jwt]\nissuer = 'a'\naudience = 'b'\nsecret = 'c'", "jwt.secret: unknown; use secret_file"),
        ("[jwt]\nissuer = 'a'\naudience = 'b'\nsecret_file = '/nowhere'", "jwt.secret_file"),
    ],
)
def test_a_file_that_cannot_work_is_refused_without_showing_a_key(
    tmp_path: Path, text: str, complaint: str
) -> None:
    (tmp_path / "auth.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_auth(str(tmp_path / "auth.toml"))
    assert complaint in str(caught.value)
    assert "secret-key-1" not in str(caught.value)


def test_files_of_a_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text(pem_of(RSA_KEY))
    (tmp_path / "auth.toml").write_text("[jwt]\nissuer = 'a'\naudience = 'b'\nkey_file = 'key.pem'")
    auth = read_auth(str(tmp_path / "auth.toml"))
    assert auth.jwt is not None
    assert JwtVerifier(auth.jwt)
