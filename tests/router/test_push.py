"""Push through the router: both legs at once, and what an introduction is good for."""

import asyncio
import re
from typing import Any

import pytest

from baton.router.fleet.breaker import Probe
from tests.router.baton_fakes import baton, introduced_system, speaker, stream
from tests.router.fakes import FakeEngine, after, answers, hangs, lends, responds, system


async def test_both_legs_leave_at_once_under_one_transfer_id() -> None:
    gate = asyncio.Event()
    p, d = baton("p", gate=gate), baton("d", gate=gate)
    async with introduced_system([p], [d], mode="push", first_token=False) as s:
        asking = asyncio.create_task(s.complete(max_tokens=9))
        await p.was_called.wait()
        await d.was_called.wait()
        gate.set()
        answer = await asking
    assert answer.json() == {"choices": [{"text": "Hi!", "finish_reason": "length"}]}
    assert answer.headers["x-baton-prefill"] == "remote"
    p_leg, d_leg = p.calls[0].body, d.calls[0].body
    assert p_leg["max_tokens"] == 1
    transfer_id = p_leg["kv_transfer_params"]["transfer_id"]
    assert re.fullmatch("[0-9a-f]{32}", transfer_id)
    assert d_leg["max_tokens"] == 9
    assert d_leg["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": "p",
        "baton_introduction": "signed 1",
    }


@pytest.mark.parametrize("name", [None, "p"])
async def test_an_engine_that_cannot_push_is_pulled_from(name: str | None) -> None:
    p, d = FakeEngine(lends, introduces_as=name, can_push=False), FakeEngine(answers)
    async with system([p], [d], mode="push") as s:
        answer = await s.complete()
    assert answer.status_code == 200
    assert "baton_ticket" in d.calls[0].body["kv_transfer_params"]


@pytest.mark.parametrize("num_refused", [1, 2])
async def test_a_refused_introduction_is_asked_for_again_and_then_done_without(num_refused: int) -> None:
    p, d = baton("p"), baton("d")
    refusal = {"error": {"message": "no", "param": "kv_transfer_params.baton_introduction"}}
    speaking = d.respond

    async def refuses(call: Any) -> None:
        await (responds(400, refusal) if len(d.calls) <= num_refused else speaking)(call)

    d.respond = refuses
    speaker_of_p = speaker(p)
    speaker_of_p.gate = asyncio.Event()  # D says no before P says anything.
    if num_refused == 1:

        async def opens(call: Any) -> None:
            if len(d.calls) == 2:
                speaker_of_p.gate = None
            await speaker_of_p(call)

        p.respond = opens
    async with introduced_system([p], [d], mode="push") as s:
        got = await stream(s)
    assert (got.text, got.error) == ("Hi!", None)
    offered = [(call.body.get("kv_transfer_params") or {}).get("baton_introduction") for call in d.calls]
    assert offered == ["signed 1", "signed 2", None][: num_refused + 1]
    assert got.headers["x-baton-prefill"] == ("remote" if num_refused == 1 else "local")


async def test_a_decode_engine_that_computes_the_prompt_itself_is_not_kept_waiting_for_p() -> None:
    p, d = baton("p", gate=asyncio.Event()), baton("d")
    async with introduced_system([p], [d], mode="push") as s:
        got = await stream(s)
        await p.saw_disconnect.wait()
    assert got.text == "Hi!"
    assert got.headers["x-engine"] == "d"


async def test_a_prefill_engine_that_is_back_is_asked_who_it_is_now() -> None:
    p, d = baton("p"), baton("d")
    async with introduced_system([p], [d], mode="push") as s:
        engine = s.router.fleet.engines[0]
        s.router.fleet.health.note_probe(engine, Probe("broken", "it did not answer"), 0.0)
        assert not engine.is_introduced
        await s.complete()
    assert d.calls[-1].body["kv_transfer_params"]["baton_introduction"] == "signed 2"


async def test_the_request_fails_with_its_prefill_if_the_operator_wants_so() -> None:
    p, d = baton("p"), baton("d")
    p.respond = after(d.was_called, responds(500, {}))
    d.respond = hangs
    async with system([p], [d], mode="push", on_prefill_failure="fail") as s:
        answer = await s.complete()
        await d.saw_disconnect.wait()
    assert answer.status_code == 502


async def test_the_fleets_state_says_how_requests_go() -> None:
    async with introduced_system([baton("p")], [FakeEngine(answers)], mode="push") as s:
        state = (await s.client.get("/fleet")).json()
    assert (state["mode"], state["first_token"]) == ("push", True)
    assert [state["engines"][role][0]["introduced"] for role in ("prefill", "decode")] == [True, False]
