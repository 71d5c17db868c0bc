"""TLS at the router's ports and to its engines, with real certificates."""

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest

from baton.http import tls
from baton.http.tls import TlsFiles
from baton.http.watched_files import LOOK_EVERY_S
from tests.certificates import Authority, client, context_of
from tests.event_loop import pass_time, until
from tests.router.fakes import FakeEngine, answers, lends, system


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


async def test_clients_are_served_over_tls_and_in_plain_http_not(
    authority: Authority, tmp_path: Path
) -> None:
    files, other = authority.issue("127.0.0.1"), Authority(tmp_path, "other")
    async with system([FakeEngine(lends)], [FakeEngine(answers)], tls=files) as s:
        plain = str(s.client.base_url)
        url = plain.replace("http://", "https://")
        async with client(authority.ca) as good, client(other.ca) as stranger:
            body = {"prompt": "hello", "stream": True}
            answer = await good.post(f"{url}/v1/completions", json=body)
            assert answer.content.endswith(b"data: [DONE]\n\n")
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(f"{url}/health")
            with pytest.raises(httpx.TransportError):
                await good.get(f"{plain}/health")
            assert (await good.get(f"{url}/version")).status_code == 200


async def test_a_handshake_that_does_not_end_is_ended(authority: Authority) -> None:
    files = authority.issue("127.0.0.1")
    async with system([FakeEngine(lends)], [FakeEngine(answers)], tls=files) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.client.base_url.port)
        writer.write(b"\x16\x03\x01\x02\x00")  # A hello begins.
        url = str(s.client.base_url).replace("http://", "https://")
        async with client(authority.ca) as other:
            await other.get(f"{url}/health")  # The router has then accepted the first connection.
        pass_time(2e4)  # Longer than `header_s` of the test's settings.
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("fault", ["none", "expired", "another host", "unknown authority"])
async def test_an_https_engine_is_verified(authority: Authority, tmp_path: Path, fault: str) -> None:
    """The engine is a router with TLS: only that it answers /health and completions matters."""
    name = "elsewhere.example" if fault == "another host" else "127.0.0.1"
    files = authority.issue(name, days=-1 if fault == "expired" else 1, file=f"engine{len(fault)}")
    ca = Authority(tmp_path, "other").ca if fault == "unknown authority" else authority.ca
    async with system([FakeEngine(lends)], [FakeEngine(answers)], tls=files) as engine:
        url = str(engine.client.base_url).replace("http://", "https://")
        await until(lambda: engine.router.fleet.can_serve)
        async with system([FakeEngine(lends)], [url], engine_ca=ca) as s:
            status = (await s.complete()).status_code
            assert (status == 200) is (fault == "none"), status


@pytest.mark.parametrize("has_certificate", [True, False])
async def test_the_routers_certificate_is_for_engines_that_ask_for_one(
    authority: Authority, has_certificate: bool
) -> None:
    files, own = authority.issue("127.0.0.1", file="asks"), authority.issue("router", file="own")
    asks = TlsFiles(cert=files.cert, key=files.key, client_ca=authority.ca)
    async with system([FakeEngine(lends)], [FakeEngine(answers)], tls=asks) as engine:
        url = str(engine.client.base_url).replace("http://", "https://")
        await until(lambda: engine.router.fleet.can_serve)
        given = {"tls": own} if has_certificate else {}
        async with system([FakeEngine(lends)], [url], engine_ca=authority.ca, **given) as s:
            router = str(s.client.base_url)
            if has_certificate:
                router = router.replace("http://", "https://")
            body = {"prompt": "hello"}
            context = context_of(authority.ca)
            context.check_hostname = False  # The certificate is not for this address.
            async with httpx.AsyncClient(verify=context, trust_env=False, timeout=None) as asker:
                status = (await asker.post(f"{router}/v1/completions", json=body)).status_code
            assert (status == 200) is has_certificate, status


async def test_changed_files_are_for_the_next_connection_and_bad_ones_are_not(
    authority: Authority, tmp_path: Path
) -> None:
    """The certificate, its key, and the authorities of clients; nothing is resumed."""
    files, new = authority.issue("127.0.0.1", file="changed"), Authority(tmp_path, "new")
    asks = TlsFiles(cert=files.cert, key=files.key, client_ca=str(tmp_path / "clients.pem"))
    shutil.copy(authority.ca, tmp_path / "clients.pem")
    old_client, new_client = authority.issue("me", file="me"), new.issue("me", file="me")
    async with system([FakeEngine(lends)], [FakeEngine(answers)], tls=asks) as s:
        url = str(s.client.base_url).replace("http://", "https://")

        async def is_served(ca: str, own: TlsFiles) -> bool:
            pass_time(LOOK_EVERY_S)
            async with client(ca, own) as one:
                try:
                    return (await one.get(f"{url}/version")).status_code == 200
                except httpx.TransportError:
                    return False

        assert [await is_served(authority.ca, one) for one in (old_client, new_client)] == [True, False]
        shutil.copy(authority.ca, files.cert)  # This certificate has another key.
        assert await is_served(authority.ca, old_client)
        made = new.issue("127.0.0.1", file="server")
        shutil.copy(made.cert, files.cert)
        shutil.copy(made.key, files.key)
        shutil.copy(new.ca, asks.client_ca or "")
        assert [await is_served(new.ca, one) for one in (old_client, new_client)] == [False, True]


async def test_of_too_many_open_handshakes_the_oldest_is_ended(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "HANDSHAKES_MAX", 3)
    files = authority.issue("127.0.0.1")
    async with system([FakeEngine(lends)], [FakeEngine(answers)], tls=files) as s:
        port = s.client.base_url.port
        waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        assert await waiting[0][0].read() == b""
        url = str(s.client.base_url).replace("http://", "https://")
        async with client(authority.ca) as good:  # This handshake ends the second open one.
            assert (await good.get(f"{url}/version")).status_code == 200
        assert await waiting[1][0].read() == b""
        assert not any(reader.at_eof() for reader, _ in waiting[2:])
        for _, writer in waiting:
            writer.close()
