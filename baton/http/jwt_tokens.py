"""Checks of JSON Web Tokens (RFC 7519, RFC 8725) with PyJWT: signature, algorithm, times, issuer, audience.

A token with the key id of no known key may mean that the issuer has a new key. If the keys come from a URL,
they are fetched, and the token gets 503 meanwhile. Such fetches are at least `REFRESH_GAP_S` apart, so tokens
with invented key ids cost the issuer little.
"""

import hashlib
import time
from collections.abc import Callable
from math import inf
from typing import Any
from urllib.parse import urlsplit

import msgspec

from baton.core import hosts
from baton.core.errors import ConfigError
from baton.http.errors import ApiError

HMAC_ALGORITHMS = frozenset({"HS256", "HS384", "HS512"})
PUBLIC_KEY_ALGORITHMS = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)
DEFAULT_ALGORITHMS = ("RS256", "ES256", "EdDSA")
SECRET_BYTES_MIN = 32  # RFC 7518, 3.2: as long as the hash of HS256.
TOKEN_CHARS_MAX = 8192
TENANT_CHARS_MAX = 256
LEEWAY_MAX_S = 300.0
REFRESH_GAP_S = 10.0  # Minimum time between two fetches of the keys.
CACHED_TOKENS = 4096  # Tokens whose signatures are not computed again.


class JwtSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for the tokens that open the router. Raises ConfigError that names the field."""

    issuer: str  # The claim `iss`.
    audience: str  # One of the claim `aud`.
    algorithms: tuple[str, ...] = ()  # Empty: HS256 for a secret, else DEFAULT_ALGORITHMS.
    secret: str | None = None  # Key for HMAC.
    keys: str | None = None  # A public key in PEM, or a JWKS.
    jwks_url: str | None = None
    refresh_s: float = 300.0  # Time between two fetches of the JWKS, besides those for new keys.
    tenant_claim: str = "sub"
    leeway_s: float = 30.0  # Accepted difference of two clocks.

    def __post_init__(self) -> None:
        sources = [name for name in ("secret", "keys", "jwks_url") if getattr(self, name) is not None]
        if len(sources) != 1:
            raise ConfigError("needs one of secret_file, key_file and jwks_url", field="jwt")
        allowed = HMAC_ALGORITHMS if self.secret is not None else PUBLIC_KEY_ALGORITHMS
        for algorithm in self.algorithms:
            if algorithm not in allowed:
                raise ConfigError(
                    f"{algorithm!r} does not fit the key; allowed are {', '.join(sorted(allowed))}",
                    field="jwt.algorithms",
                )
        if self.secret is not None and len(self.secret.encode()) < SECRET_BYTES_MIN:
            raise ConfigError(
                f"needs at least {SECRET_BYTES_MIN} bytes; for example: openssl rand -hex 32",
                field="jwt.secret_file",
            )
        for name in ("issuer", "audience", "tenant_claim"):
            if not getattr(self, name):
                raise ConfigError("must not be empty", field=f"jwt.{name}")
        if not 0 <= self.leeway_s <= LEEWAY_MAX_S:
            raise ConfigError(f"must be in [0, {LEEWAY_MAX_S:g}]", field="jwt.leeway_s")
        if not REFRESH_GAP_S <= self.refresh_s < inf:
            raise ConfigError(f"must be at least {REFRESH_GAP_S:g}", field="jwt.refresh_s")
        if self.jwks_url is not None:
            parts = urlsplit(self.jwks_url)
            is_local = parts.scheme == "http" and hosts.is_loopback(parts.hostname or "")
            if not parts.hostname or not (parts.scheme == "https" or is_local):
                raise ConfigError("must be an https URL (http on loopback only)", field="jwt.jwks_url")

    @property
    def allowed_algorithms(self) -> tuple[str, ...]:
        if self.algorithms:
            return self.algorithms
        return ("HS256",) if self.secret is not None else DEFAULT_ALGORITHMS


class JwtVerifier:
    """Verifies the tokens that one process gets. Raises ConfigError for keys that cannot be used."""

    def __init__(
        self,
        settings: JwtSettings,
        *,
        on_due: Callable[[], None] = lambda: None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """`on_due`: `next_fetch_s` is now. `wall_s`: since the epoch, to check known tokens again."""
        try:
            import jwt
        except ImportError as error:
            raise ConfigError("needs PyJWT: pip install 'kv-baton[auth]'", field="jwt") from error
        self._jwt: Any = jwt  # The library is an optional dependency.
        self._settings, self._on_due, self._wall_s = settings, on_due, wall_s
        self._verified: dict[bytes, tuple[str, float]] = {}  # Tenant and end, by the token's digest.
        self._one_key: Any = settings.secret
        self._keys: dict[str | None, Any] = {}  # Keys, by key id.
        self.next_fetch_s = 0.0 if settings.jwks_url is not None else inf
        self._last_fetch_s, self._is_fetching = -inf, False
        if settings.keys is not None and settings.keys.lstrip().startswith("{"):
            self.use_jwks(settings.keys)
        elif settings.keys is not None:
            self._one_key = _pem_key(settings.keys)

    def use_jwks(self, text: str) -> None:
        """Replace the keys. Raises ConfigError if there is none that can be used."""
        try:
            found = self._jwt.PyJWKSet.from_json(text).keys
        except (self._jwt.PyJWTError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"is no JWKS: {type(error).__name__}", field="jwt.key_file") from error
        allowed = self._settings.allowed_algorithms
        keys = {
            key.key_id: key
            for key in found
            if key.algorithm_name in allowed and key.public_key_use in (None, "sig") and key.key_type != "oct"
        }
        if not keys:
            raise ConfigError(f"has no key for {', '.join(allowed)}", field="jwt.key_file")
        self._keys, self._is_fetching = keys, False
        self._verified.clear()  # A key that is gone verifies nothing any more.

    # --- Fetches of the JWKS

    def note_fetch(self, now_s: float) -> None:
        """A fetch begins; it ends with `use_jwks` or `note_failed_fetch`. `now_s`: on the loop's clock."""
        self._last_fetch_s, self._is_fetching = now_s, True
        self.next_fetch_s = now_s + self._settings.refresh_s

    def note_failed_fetch(self, now_s: float) -> None:
        self._is_fetching = False
        self.next_fetch_s = now_s + REFRESH_GAP_S

    def _ask_for_fetch(self, now_s: float) -> bool:
        """Whether keys that are not known yet may come soon."""
        if self._settings.jwks_url is None:
            return False
        if self._is_fetching:
            return True
        if self.next_fetch_s <= now_s or now_s - self._last_fetch_s >= REFRESH_GAP_S:
            self.next_fetch_s = min(self.next_fetch_s, now_s)
            self._on_due()
            return True
        return not self._keys

    # --- Tokens

    def tenant_of(self, token: str, now_s: float) -> str:
        """Return the tenant that a valid token names. Raises ApiError 401, or 503 while keys are fetched."""
        digest = hashlib.sha256(token.encode()).digest()
        known = self._verified.get(digest)
        if known is not None and self._wall_s() < known[1]:
            return known[0]
        if len(token) > TOKEN_CHARS_MAX:
            raise invalid_token(f"has more than {TOKEN_CHARS_MAX} characters")
        try:
            claims = self._claims(token, now_s)
        except self._jwt.PyJWTError as error:
            raise invalid_token(_reason(error)) from error
        tenant = claims.get(self._settings.tenant_claim)
        if not isinstance(tenant, str) or not 0 < len(tenant) <= TENANT_CHARS_MAX:
            raise invalid_token(f"has no claim {self._settings.tenant_claim!r} that names a tenant")
        if len(self._verified) >= CACHED_TOKENS:
            del self._verified[next(iter(self._verified))]
        self._verified[digest] = tenant, float(claims["exp"]) + self._settings.leeway_s
        return tenant

    def _claims(self, token: str, now_s: float) -> dict[str, Any]:
        """Raises ApiError, PyJWTError."""
        settings = self._settings
        claims: dict[str, Any] = self._jwt.decode(
            token,
            self._one_key if self._one_key is not None else self._key_of(token, now_s),
            algorithms=list(settings.allowed_algorithms),
            issuer=settings.issuer,
            audience=settings.audience,
            leeway=settings.leeway_s,
            options={"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True},
        )
        return claims

    def _key_of(self, token: str, now_s: float) -> Any:
        header = self._jwt.get_unverified_header(token)
        if header.get("alg") not in self._settings.allowed_algorithms:
            raise invalid_token("has an algorithm that is not allowed")
        key = self._keys.get(header.get("kid"))
        if key is None and "kid" not in header and len(self._keys) == 1:
            key = next(iter(self._keys.values()))
        if key is not None:
            return key
        if self._ask_for_fetch(now_s):
            raise ApiError(
                503,
                "the key of this token is not known yet; the issuer's keys are being fetched",
                code="jwks_refresh",
                retry_after_s=1,
            )
        raise invalid_token("is signed with an unknown key")


def invalid_token(why: str) -> ApiError:
    return ApiError(401, f"the token {why}", code="invalid_token")


def _pem_key(text: str) -> str:
    """Raises ConfigError."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        load_pem_public_key(text.encode())
    except ValueError as error:
        raise ConfigError(
            "is neither a public key in PEM (BEGIN PUBLIC KEY) nor a JWKS", field="jwt.key_file"
        ) from error
    return text


_REASONS = {
    "ExpiredSignatureError": "has expired",
    "ImmatureSignatureError": "is not valid yet",
    "InvalidAudienceError": "is for another audience",
    "InvalidIssuerError": "is from another issuer",
    "InvalidSignatureError": "has a wrong signature",
    "InvalidAlgorithmError": "has an algorithm that is not allowed",
}


def _reason(error: Exception) -> str:
    """Why a token is refused, without the library's texts: these may quote the token."""
    claim = getattr(error, "claim", None)
    if type(error).__name__ == "MissingRequiredClaimError":
        return f"has no claim {claim!r}"
    return _REASONS.get(type(error).__name__, "is not valid")
