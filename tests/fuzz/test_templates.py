"""Chat templates of random fragments in a server's worker process end in a text or a clear error."""

import asyncio
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from baton.core.errors import UserError
from baton.http.workers import Job, WorkerOutOfMemory, WorkerPool, WorkerTimeout

pytestmark = pytest.mark.processes

SCALE = int(os.environ.get("FUZZ_SCALE", "1"))
JOB = Job("baton.engine.text.chat_template:render_job", 0.3)
MAX_CHARS = 10_000
FRAGMENTS = (
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if tools %}",
    "{% else %}",
    "{% endif %}",
    "{{ m.content }}",
    "{{ messages[0]['content'] * 3 }}",
    "{{ 'a' * 10**9 }}",
    "{{ 9**9**9 }}",
    "{{ raise_exception('no') }}",
    "{{ messages | tojson }}",
    "{% set x = x ~ x %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}",
    "{{ f(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{% for i in range(99999) %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{{ strftime_now('%Y') }}",
    "{{ undefined.attribute }}",
    "{{ self }}",
    "{% break %}",
    "{{ lipsum(n=99) }}",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(1)
    yield pool
    pool.close()


@settings(max_examples=40 * SCALE, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fragments=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=8))
@example(fragments=["{{ 9**9**9 }}"])
@example(fragments=["{{ 'a' * 10**9 }}"])
@example(fragments=["{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}"])
@example(fragments=["{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}"])
def test_any_template_ends_in_a_text_or_a_clear_error(pool: WorkerPool, fragments: list[str]) -> None:
    messages = [{"role": "user", "content": "Hi"}]

    async def render() -> str:
        text: str = await pool.run(JOB, "".join(fragments), {}, messages, True, None, None, MAX_CHARS)
        return text

    try:
        text = asyncio.run(render())
    except (UserError, WorkerTimeout, WorkerOutOfMemory):
        return
    assert len(text) <= MAX_CHARS + 1
