"""Tenants, tokens and rate limits at a router, and the administrator's keys."""

import asyncio
import json
import logging
import signal
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.http.auth import AuthSettings, KeyFiles, Rate, Tenant
from baton.http.jwt_tokens import JwtVerifier
from baton.http.settings import HttpSettings
from baton.http.watched_files import LOOK_EVERY_S
from baton.router.operator.client_auth import ClientAuth
from baton.router.shell.engine_keys import EngineKeys, split_engine_keys
from baton.router.values.settings import AdmissionSettings, RouterSettings
from tests.event_loop import pass_time
from tests.http.test_auth import KEYS, SECRET, bearer, jwks_of, settings_of, token_of
from tests.router.fakes import Call, FakeEngine, Servers, System, answers, lends, responds, system
from tests.router.test_workers import WAIT_S, two_workers

SEARCH = Tenant(keys=("key-of-search",), requests_per_minute=1000)


def doors(auth: AuthSettings, **given: Any) -> HttpSettings:
    return HttpSettings(idle_s=1e4, header_s=1e4, auth=auth, **given)


async def complete(s: System, key: str) -> Any:
    return await s.client.post("/v1/completions", json={"prompt": "hello"}, headers=bearer(key))


async def test_a_tenants_key_and_token_are_accepted_and_not_passed_on() -> None:
    decode = FakeEngine(answers)
    auth = AuthSettings(tenants={"search": SEARCH}, jwt=settings_of(secret=SECRET))
    async with system([FakeEngine(lends)], [decode], doors=doors(auth), engine_api_key="key-of-engine") as s:
        for key, status in (("key-of-search", 200), (token_of(), 200), (token_of(aud="x"), 401), ("x", 401)):
            answer = await complete(s, key)
            assert answer.status_code == status
            assert answer.headers.get("www-authenticate", "")[:6] == ("" if status == 200 else "Bearer")
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert [call.headers["authorization"] for call in decode.calls] == ["Bearer key-of-engine"] * 2
        assert (await s.client.get("/fleet", headers=bearer("key-of-search"))).status_code == 401


async def test_engines_hear_the_tenant_and_what_the_client_asks_of_their_tiers() -> None:
    prefill, decode = FakeEngine(lends), FakeEngine(answers)
    auth = AuthSettings(tenants={"search": SEARCH})
    kept = {"baton_retention": {"priority": 5, "ends_session": True}}
    async with system([prefill], [decode], doors=doors(auth, api_keys=("key-of-others",))) as s:

        async def ask(key: str, session: str, params: Any) -> Any:
            body = {"prompt": "hello", "kv_transfer_params": params}
            return await s.client.post(
                "/v1/completions", json=body, headers={**bearer(key), "X-Session-Id": session}
            )

        assert (await ask("key-of-search", "s", kept)).status_code == 200
        assert (await ask("key-of-others", "s", None)).status_code == 200
        for params, session, field in (
            ({"baton_retention": {"priority": 101}}, "s", "baton_retention.priority"),
            (kept, "", "baton_retention.ends_session"),
            ({**kept, "baton_tenant": "other"}, "s", ""),
        ):
            answer = await ask("key-of-search", session, params)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == f"kv_transfer_params.{field}".rstrip(".")
    for engine, flag in ((prefill, "do_remote_decode"), (decode, "do_remote_prefill")):
        named, unnamed = (call.body["kv_transfer_params"] for call in engine.calls)
        assert named[flag] is unnamed[flag] is True
        assert named | {"baton_tenant": "search", **kept} == named
        assert not unnamed.keys() & {"baton_tenant", "baton_retention"}
        assert {call.headers["x-session-id"] for call in engine.calls} == {"s"}


async def test_a_tenant_over_its_limit_gets_429_with_openais_headers() -> None:
    auth = AuthSettings(tenants={"search": SEARCH}, default=Rate(requests_per_minute=1))
    http = doors(auth, api_keys=("key-of-others",))
    async with system([FakeEngine(lends)], [FakeEngine(answers)], doors=http) as s:
        found = [await complete(s, "key-of-others") for _ in range(3)]
        assert {answer.status_code for answer in found} == {200, 429}
        (first, *_), last = found, next(one for one in found if one.status_code == 429)
        assert first.headers["x-ratelimit-limit-requests"] == "1"
        assert int(last.headers["retry-after"]) >= 1
        assert last.json()["error"]["type"] == "rate_limit_error"
        assert last.headers["x-request-id"]
        assert (await complete(s, "key-of-search")).status_code == 200
        assert (await s.client.get("/v1/models", headers=bearer("key-of-others"))).status_code == 200
        text = (await s.client.get("/metrics", headers=bearer("key-of-others"))).text
        assert 'baton:router_rate_limits_total{outcome="refused"}' in text
        assert "key-of" not in text
        assert s.router.in_flight.num_requests == 0


async def test_the_queue_shares_by_the_tenant_of_a_key() -> None:
    auth = AuthSettings(tenants={"search": SEARCH})
    admission = AdmissionSettings(max_running=1, tenant_header="x-tenant")
    async with system(
        [FakeEngine(lends)], [FakeEngine(answers)], doors=doors(auth), admission=admission
    ) as s:
        headers = {**bearer("key-of-search"), "x-tenant": "another"}
        asked = await s.client.post("/v1/completions", json={"prompt": "hello"}, headers=headers)
        assert asked.status_code == 200
        view = s.router._parts.view
        assert view.admission is not None
        assert [list(pool.served) for pool in view.admission._pools.values()] == [["search"]]


async def test_a_request_is_let_in_if_the_counts_cannot_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    auth = AuthSettings(tenants={"search": SEARCH}, storage="redis://127.0.0.1:1/0")
    async with system(
        [FakeEngine(lends)], [FakeEngine(answers)], doors=doors(auth, admin_keys=("adm",))
    ) as s:
        with caplog.at_level(logging.ERROR):
            assert (await complete(s, "key-of-search")).status_code == 200
        assert "rate limits cannot be counted" in caplog.text
        text = (await s.client.get("/metrics", headers=bearer("adm"))).text
        assert 'baton:router_rate_limits_total{outcome="unavailable"} 1.0' in text


async def test_keys_of_tokens_are_fetched_and_fetched_again_for_a_new_one() -> None:
    issuer, known, fetched = Servers(), [jwks_of(k1="RS256")], asyncio.Event()

    async def gives(call: Call) -> None:
        await call.answer(200, json.loads(known[0]))
        fetched.set()

    url = await issuer.start(FakeEngine(gives))
    auth = AuthSettings(jwt=settings_of(jwks_url=f"{url}/jwks"))
    async with system([FakeEngine(lends)], [FakeEngine(answers)], doors=doors(auth)) as s:

        async def status_of(token: str) -> int:
            """Status of a completion, once the router has fetched the keys."""
            while (answer := await complete(s, token)).status_code == 503:
                assert answer.headers["retry-after"] == "1"
            return int(answer.status_code)

        assert await status_of(token_of(KEYS["RS256"], "RS256", kid="k1")) == 200
        known[0] = jwks_of(k1="RS256", k2="EdDSA")
        new = token_of(KEYS["EdDSA"], "EdDSA", kid="k2")
        assert await status_of(new) == 401
        pass_time(11.0)
        assert await status_of(new) == 200
    await issuer.stop()


async def test_an_issuer_that_fails_costs_no_key_that_is_known() -> None:
    issuer, engine = Servers(), FakeEngine(responds(500, {}))
    url = await issuer.start(engine)
    settings = doors(AuthSettings(jwt=settings_of(jwks_url=url)))
    async with system([FakeEngine(lends)], [FakeEngine(answers)], doors=settings) as s:
        auth: ClientAuth = s.router._ports._client_auth
        assert auth._verifier is not None
        await engine.was_called.wait()
        auth._verifier.use_jwks(jwks_of(k1="RS256"))
        engine.was_called.clear()
        pass_time(11.0)
        token = token_of(KEYS["RS256"], "RS256", kid="k2")
        assert (await complete(s, token)).status_code == 503
        await engine.was_called.wait()
        assert (await complete(s, token_of(KEYS["RS256"], "RS256", kid="k1"))).status_code == 200
    await issuer.stop()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
async def test_a_limit_holds_for_all_workers_together(tmp_path: Path) -> None:
    """Twenty connections, so both workers get some. Each alone would let in as many as the limit."""
    (tmp_path / "auth.toml").write_text(
        '[tenants.search]\nkeys = ["key-of-search"]\nrequests_per_minute = 4\n'
    )
    (tmp_path / "auth.toml").chmod(0o600)
    servers = Servers()
    options = ("--auth-file", str(tmp_path / "auth.toml"))
    async with two_workers(servers, FakeEngine(lends), FakeEngine(answers), *options) as workers:

        async def ask() -> int:
            async with workers.client() as client:
                answer = await client.post(
                    "/v1/completions", json={"prompt": "hello"}, headers=bearer("key-of-search")
                )
            return answer.status_code

        statuses = await asyncio.gather(*(ask() for _ in range(20)))
        assert set(statuses) == {200, 429}
        # Eight: a minute has ended between them.
        assert statuses.count(200) in (4, 5, 6, 7, 8)
    await servers.stop()


async def test_each_engine_gets_its_own_key_and_no_other() -> None:
    servers, own, other = Servers(), FakeEngine(answers), FakeEngine(answers)
    own.url = await servers.start(own)
    given = {"engine_api_keys": ((own.url, "key-of-own"),), "engine_api_key": "key-of-others"}
    async with system([FakeEngine(lends)], [own.url, other], policy="round_robin", **given) as s:
        for _ in range(4):
            assert (await complete(s, "key-of-client")).status_code == 200
        for engine, key in ((own, "key-of-own"), (other, "key-of-others")):
            assert {call.headers["authorization"] for call in engine.calls} == {f"Bearer {key}"}
    await servers.stop()


def test_lines_of_engine_keys_may_name_an_engine() -> None:
    words = ("https://a:1/", "key-of-a-engine", "key-of-others")
    assert split_engine_keys(words) == ("key-of-others", (("https://a:1", "key-of-a-engine"),))
    with pytest.raises(ConfigError, match="https://a:1 has no key"):
        split_engine_keys(("https://a:1",))


def test_the_first_line_that_fits_a_url_has_its_key() -> None:
    """A line for /metrics lets the router read metrics that only the administrator's keys open."""
    words = ("https://a:1/metrics", "key-of-admin", "https://a:1", "key-of-a-engine", "key-of-others")
    default, by_url = split_engine_keys(words)
    urls = ("https://a:1",)
    settings = RouterSettings(
        prefill_urls=urls, decode_urls=urls, engine_api_key=default, engine_api_keys=by_url
    )
    keys = {
        url: EngineKeys(settings).key_for(url)
        for url in ("https://a:1/metrics", "https://a:1/v1/x", "https://b:1")
    }
    assert list(keys.values()) == ["key-of-admin", "key-of-a-engine", "key-of-others"]


@pytest.mark.parametrize("has_file", [True, False])
def test_changed_keys_for_engines_are_read_again_and_bad_ones_are_not(tmp_path: Path, has_file: bool) -> None:
    """Engines without a file of their own get the first of the router's own keys."""
    file, now_s = tmp_path / "keys", [0.0]
    file.write_text("the-first-key")
    doors = HttpSettings(key_files=KeyFiles(api_keys=None if has_file else str(file)))
    own: dict[str, Any] = {"engine_key_file": str(file)} if has_file else {"engines_have_own_key": True}
    settings = RouterSettings(
        prefill_urls=("http://a:1",),
        decode_urls=("http://a:1",),
        engine_api_key="the-first-key",
        doors=doors,
        **own,
    )
    keys = EngineKeys(settings, lambda: now_s[0])

    def sent(url: str = "http://a:1") -> bytes | None:
        now_s[0] += LOOK_EVERY_S
        return keys.authorization_for(url)

    assert sent() == b"Bearer the-first-key"
    for bad in ("short", ""):
        file.write_text(bad)
        assert sent() == b"Bearer the-first-key"
    file.write_text("the-second-key the-third-key")
    assert sent() == b"Bearer the-second-key"
    if has_file:
        file.write_text("http://a:1 key-of-a-engine\nkey-of-others")
        assert [sent(), sent("http://b:1")] == [b"Bearer key-of-a-engine", b"Bearer key-of-others"]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
async def test_workers_read_changed_keys_again_at_sighup(tmp_path: Path) -> None:
    tenants, engine_keys = tmp_path / "auth.toml", tmp_path / "engine-keys"

    def write(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o600)

    write(tenants, '[tenants.search]\nkeys = ["the-first-key"]\n')
    write(engine_keys, "engines-first-key")
    servers, decode = Servers(), FakeEngine(answers)
    options = ("--auth-file", str(tenants), "--engine-api-key-file", str(engine_keys))
    async with two_workers(servers, FakeEngine(lends), decode, *options) as workers:

        async def ask(key: str) -> int:
            async with workers.client() as client:
                body = {"prompt": "hello"}
                return (await client.post("/v1/completions", json=body, headers=bearer(key))).status_code

        assert await ask("the-first-key") == 200
        write(tenants, '[tenants.search]\nkeys = ["the-second-key"]\n')
        write(engine_keys, "engines-second-key")
        workers.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(WAIT_S):
            in_a_row = 0
            while in_a_row < 20:  # Both workers have answered by then.
                in_a_row = in_a_row + 1 if await ask("the-second-key") == 200 else 0
        assert await ask("the-first-key") == 401
        assert decode.calls[-1].headers["authorization"] == "Bearer engines-second-key"
    await servers.stop()


async def test_health_reports_that_keys_of_tokens_are_not_fetched_any_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(verifier: JwtVerifier, text: str) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(JwtVerifier, "use_jwks", fails)
    issuer = Servers()
    url = await issuer.start(FakeEngine(responds(200, {})))
    auth = AuthSettings(jwt=settings_of(jwks_url=f"{url}/jwks"))
    async with system([FakeEngine(lends)], [FakeEngine(answers)], doors=doors(auth)) as s:
        while (answer := await s.client.get("/health")).status_code != 500:
            pass
        assert "not fetched any more" in answer.json()["reason"]
    await issuer.stop()
