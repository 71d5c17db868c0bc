"""TLS and the administrator's keys at both ports of `baton serve`, with real certificates."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.core.errors import ConfigError
from baton.http.registration import Registration
from baton.http.settings import HttpSettings
from baton.http.tls import ClientTls, TlsFiles
from baton.server.registration import NotRegistered, place_of
from baton.server.run import EXIT_STOPPED
from tests.certificates import Authority, client
from tests.router.fakes import FakeEngine, answers, lends, system
from tests.server.fakes import ScriptedEngine
from tests.server.test_run import Process, stop_this_process


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[str]:
    """The URL of the main port."""
    process = Process(ScriptedEngine(), **options)
    url = await process.url
    try:
        yield url
    finally:
        stop_this_process()
        assert await process.exit == EXIT_STOPPED


async def test_both_ports_have_tls_and_no_plain_http(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    async with serving(tls=authority.issue("127.0.0.1"), admin_port=0) as url:
        assert url.startswith("https://127.0.0.1:")
        async with client(authority.ca) as good, client(other.ca) as stranger:
            answer = await good.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True})
            assert answer.content.endswith(b"data: [DONE]\n\n")
            admin_port = (await good.get(f"{url}/health")).json()["admin_port"]
            admin = f"https://127.0.0.1:{admin_port}"
            assert (await good.get(f"{admin}/metrics")).status_code == 200
            for one, path in ((url, "/health"), (admin, "/metrics")):
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await stranger.get(one + path)
                with pytest.raises(httpx.TransportError):
                    await good.get(one.replace("https://", "http://") + path)


async def test_a_client_needs_a_certificate_where_it_is_asked_for(
    authority: Authority, tmp_path: Path
) -> None:
    files, own = authority.issue("127.0.0.1"), authority.issue("router", file="client")
    foreign = Authority(tmp_path, "other").issue("router")
    asks = TlsFiles(cert=files.cert, key=files.key, client_ca=authority.ca)
    async with serving(tls=asks) as url:
        async with client(authority.ca, own) as known:
            assert (await known.get(f"{url}/health")).status_code == 200
        for given in (None, foreign):
            async with client(authority.ca, given) as unknown:
                with pytest.raises(httpx.TransportError):
                    await unknown.get(f"{url}/health")


async def test_files_that_do_not_fit_are_refused_before_the_engine_starts(authority: Authority) -> None:
    one, two = authority.issue("a", file="one"), authority.issue("a", file="two")
    engine = ScriptedEngine()
    with pytest.raises(ConfigError, match="tls_cert"):
        await Process(engine, tls=TlsFiles(cert=one.cert, key=two.key)).exit
    assert engine.events == []


@pytest.mark.parametrize("admin_port", [None, 0])
async def test_keys_of_the_administrator_alone_open_metrics_and_recent_requests(
    admin_port: int | None,
) -> None:
    http = HttpSettings(api_keys=("key-of-router",), admin_keys=("key-of-admin",))
    async with serving(http=http, admin_port=admin_port) as url, httpx.AsyncClient(trust_env=False) as asker:
        admin = url
        if admin_port is not None:
            admin = f"http://127.0.0.1:{(await asker.get(f'{url}/health')).json()['admin_port']}"

        async def status(page: str, key: str) -> int:
            return (await asker.get(page, headers={"authorization": f"Bearer {key}"})).status_code

        for page in (f"{admin}/metrics", f"{admin}/baton/requests/some"):
            assert await status(page, "key-of-admin") == 200
            assert await status(page, "key-of-router") == 401
        # The last one is for routers. This engine has no connector.
        for page, found in ((f"{url}/v1/models", 200), (f"{admin}/baton/introduction", 404)):
            assert await status(page, "key-of-router") == found
            assert await status(page, "key-of-admin") == 401


@pytest.mark.parametrize("fault", ["none", "unknown authority", "no certificate"])
async def test_an_engine_registers_at_an_https_router(
    authority: Authority, tmp_path: Path, fault: str
) -> None:
    files, own = authority.issue("127.0.0.1", file="router"), authority.issue("engine", file="engine")
    asks = TlsFiles(cert=files.cert, key=files.key, client_ca=authority.ca)
    ca = Authority(tmp_path, "other").ca if fault == "unknown authority" else authority.ca
    doors = HttpSettings(api_keys=("key-of-admin",))
    async with system([FakeEngine(lends)], [FakeEngine(answers)], tls=asks, doors=doors) as s:
        url = str(s.client.base_url).replace("http://", "https://")
        tls = ClientTls(ca, None if fault == "no certificate" else own, field="register_ca")
        place = place_of(url, "key-of-admin", tls)
        new = Registration("https://127.0.0.1:9", "decode", "m")
        if fault == "none":
            await place.put(new)
        else:
            with pytest.raises(NotRegistered):
                await place.put(new)
        members = {engine.url for engine in s.router.fleet.engines}
        assert (new.instance in members) is (fault == "none")
        await place.close()
        await asyncio.sleep(0)
