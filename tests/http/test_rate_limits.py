"""Requests and prompt tokens per minute of a tenant, counted in this process and in a real Redis."""

import random
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest
from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from baton.cli.processes import free_ports
from baton.http.auth import AuthFile, AuthSettings, Rate, Tenant
from baton.http.rate_limits import LocalCounts, RateLimits

MINUTE = 29_000_000 * 60.0  # A minute begins.


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    port = free_ports(1)[0]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "ready to accept connections" in line.lower():
                break
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [MINUTE]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def auth_of(storage: str | None = None) -> AuthFile:
    search = Tenant(requests_per_minute=3, prompt_tokens_per_minute=100)
    auth = AuthSettings(tenants={"search": search}, default=Rate(requests_per_minute=1), storage=storage)
    return AuthFile(auth)


async def test_requests_over_the_limit_are_refused_until_the_window_has_moved(wall: list[float]) -> None:
    limits = RateLimits(auth_of())
    for left in ("2", "1", "0"):
        verdict = await limits.charge("search", 10)
        assert (verdict.refused, verdict.headers["x-ratelimit-remaining-requests"]) == (None, left)
    assert verdict.headers["x-ratelimit-limit-requests"] == "3"
    assert verdict.headers["x-ratelimit-remaining-tokens"] == "70"
    verdict = await limits.charge("search", 10)
    error = verdict.error
    assert error is not None
    assert (error.status, str(error).startswith("this tenant has sent its 3 requests")) == (429, True)
    assert error.headers() == {**verdict.headers, "Retry-After": "20"}
    wall[0] += 120
    assert (await limits.charge("search", 10)).refused is None
    await limits.close()


async def test_prompt_tokens_over_the_limit_are_refused_and_cost_none(wall: list[float]) -> None:
    limits = RateLimits(auth_of())
    assert (await limits.charge("search", 80)).refused is None
    verdict = await limits.charge("search", 30)
    assert "more than what is left of 100" in (verdict.refused or "")
    assert (verdict.retry_after_s, verdict.headers["x-ratelimit-remaining-tokens"]) == (6, "20")
    assert (await limits.charge("search", 20)).refused is None
    await limits.close()
    limits = RateLimits(auth_of())
    assert "is over this tenant's limit" in ((await limits.charge("search", 101)).refused or "")
    await limits.close()


async def test_tenants_do_not_share_their_limits(wall: list[float]) -> None:
    limits = RateLimits(auth_of())
    for tenant in ("a", "b"):
        assert (await limits.charge(tenant, 10)).refused is None
        assert (await limits.charge(tenant, 10)).refused is not None
    await limits.close()


@pytest.mark.parametrize("seed", range(5))
async def test_counts_of_this_process_are_those_of_the_library(wall: list[float], seed: int) -> None:
    rng = random.Random(seed)
    limit = rng.choice((3, 10, 100))
    item, theirs = RateLimitItemPerMinute(limit), SlidingWindowCounterRateLimiter(MemoryStorage())
    ours = LocalCounts()
    for _ in range(200):
        wall[0] += rng.random() * rng.choice((0.1, 1, 10, 90))
        cost = rng.randint(1, limit)
        is_in = await theirs.hit(item, "a", cost=cost)
        reset_at_s, remaining = await theirs.get_window_stats(item, "a")
        found, left, reset_s = ours.hit("a", "tokens", limit, cost)
        assert (found, left) == (is_in, remaining)
        assert reset_s == pytest.approx(max(0.0, reset_at_s - wall[0]), abs=1e-3)


def test_a_tenant_that_sends_no_more_is_forgotten(wall: list[float]) -> None:
    counts = LocalCounts()
    counts.hit("a", "requests", 3, 1)
    wall[0] += 120
    counts.hit("b", "requests", 3, 1)
    assert list(counts._counters) == [("b", "requests")]


async def test_two_processes_share_the_counts_of_a_redis(redis_url: str) -> None:
    """Four times the limit, so that the end of a minute between the requests changes nothing."""
    first, second = (RateLimits(auth_of(redis_url)) for _ in range(2))
    let_in = 0
    for _ in range(6):
        for limits in (first, second):
            let_in += (await limits.charge("search", 1)).refused is None
    await first.close()
    await second.close()
    assert 3 <= let_in <= 6  # 6: a minute has ended between them. Apart they would let in six in any case.


async def test_a_redis_that_is_gone_is_an_error_at_once() -> None:
    limits = RateLimits(auth_of(f"redis://127.0.0.1:{free_ports(1)[0]}/0"))
    with pytest.raises(Exception, match="connect"):
        await limits.charge("search", 1)
    await limits.close()
