"""Updates of weights, engine by engine: all engines serve, and neither KV nor streams cross versions."""

import asyncio
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.core.engine_card import EngineCard
from baton.core.identity import KVIdentity
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.notes import Introduces
from baton.router.fleet.pairs import FAILURES_TO_STOP
from baton.router.fleet.policies import RoutedRequest
from baton.router.fleet.turns import Turn, TurnTable
from baton.router.values.identity import Introduced, weights_of
from baton.router.values.settings import RouterSettings
from tests.event_loop import until
from tests.router.baton_fakes import Speaker, baton, introduced_system, speaker, stream
from tests.router.fakes import TICKET, Call, FakeEngine, System
from tests.router.test_pairs import KV_IDENTITY, engine
from tests.router.test_replica import Router
from tests.router.vllm_fakes import refuses_tickets

KV = KVIdentity(**{**KV_IDENTITY, "version": "1"})  # type: ignore[arg-type]


def version_of(fake: FakeEngine) -> str:
    kv = fake.card["kv_identity"]
    return f"{kv['weights']} {kv.get('version', '')}"


async def lends(call: Call) -> None:
    ticket = {**TICKET, "version": version_of(call.engine)}
    await call.answer(200, {"choices": [{"text": "x"}], "kv_transfer_params": ticket})


async def decodes(call: Call) -> None:
    """Load KV of the engine's own weights only, and report it."""
    params = call.received.body.get("kv_transfer_params") or {}
    num_loaded = 96 if params.get("version") == version_of(call.engine) else 0
    await call.answer(
        200, {"choices": [{"text": "a"}]}, x_baton_prompt=f"total=100; local=0; transferred={num_loaded}"
    )


def fakes(num_producers: int, num_consumers: int) -> tuple[list[FakeEngine], list[FakeEngine]]:
    p = [engine(lends, f"p{number}") for number in range(num_producers)]
    return p, [engine(decodes, f"d{number}") for number in range(num_consumers)]


def known(s: System, fake: FakeEngine) -> Engine:
    return next(one for one in s.router.fleet.engines if one.url == fake.url)


async def update(s: System, fake: FakeEngine, *, is_known: bool = True, **kv: str) -> None:
    fake.card = {**fake.card, "kv_identity": {**fake.card["kv_identity"], **kv}}
    if is_known:
        assert s.router.control is not None
        await s.router.control.prober.probe(known(s, fake))


async def counted(s: System, name: str) -> dict[str, float]:
    """Samples of a metric, by its labels."""
    lines = (await s.client.get("/metrics")).text.splitlines()
    found = [
        line.removeprefix(f"baton:router_{name}_total{{").split("} ")
        for line in lines
        if f"_{name}_total{{" in line
    ]
    return {labels: float(value) for labels, value in found}


def pairs_of(d: list[FakeEngine]) -> list[tuple[str | None, str]]:
    return [
        ((call.body.get("kv_transfer_params") or {}).get("version"), version_of(one))
        for one in d
        for call in one.calls
    ]


@pytest.mark.parametrize("order", list(permutations(range(4)))[::5])
@pytest.mark.parametrize("how", ["named", "digests", "unnamed", "rolled back"])
async def test_in_a_rolling_update_prompts_go_to_pairs_of_one_version(
    how: str, order: tuple[int, ...]
) -> None:
    p, d = fakes(2, 2)
    steps = [(number, "2") for number in order]
    if how == "rolled back":
        steps = [*steps[:2], *((number, "1") for number in order[:2])]
    async with introduced_system(p, d, policy="round_robin", on_prefill_failure="fail") as s:
        for number, version in steps:
            kv = {"version": version if version != "1" else ""}
            if how == "digests":
                kv = {"weights": f"weights {version}"}
            elif how == "unnamed":
                kv = {"version": f"unnamed {number}"}
            await update(s, [*p, *d][number], **kv)
            for one in d:
                one.calls.clear()
            for _ in range(4):
                assert (await s.complete()).status_code == 200
            assert all(given in (None, own) for given, own in pairs_of(d)), "KV of other weights"
            assert all(one.calls for one in d), "each decode engine serves"
            shared = {version_of(one) for one in p} & {version_of(one) for one in d}
            are_handed_over = [given is not None for given, _ in pairs_of(d)]
            assert any(are_handed_over) == bool(shared)
            assert all(one.is_eligible for one in s.router.fleet.engines)
        handoffs = await counted(s, "handoffs")
        assert all('outcome="handed_over"' in labels for labels in handoffs)
        reasons = {labels for labels in await counted(s, "prefills") if 'where="local"' in labels}
        assert all('reason="other_weights"' in labels for labels in reasons)
        versions = {version_of(one) for one in (*p, *d)}
        (*updates,) = (await s.client.get("/status")).json()["updates"]
        assert len(updates) == (len(versions) > 1)


@pytest.mark.parametrize("policy", ["least_in_flight", "cost"])
async def test_a_version_without_prefill_engines_is_computed_where_it_is_decoded(policy: str) -> None:
    p, d = fakes(1, 1)
    async with introduced_system(p, d, policy=policy, on_prefill_failure="fail") as s:
        await update(s, d[0], version="2")
        for _ in range(FAILURES_TO_STOP + 1):
            assert (await s.complete()).headers["x-baton-prefill"] == "local"
        assert await counted(s, "prefills") == {'reason="other_weights",where="local"': FAILURES_TO_STOP + 1}
        (pair,) = (await s.client.get("/fleet")).json()["pairs"]
        assert (pair["usable"], pair["computed"]) == (False, 0)
        assert pair["reason"].startswith("other weights: version: ours '2'")
        assert not p[0].calls
        await update(s, p[0], version="2")
        assert (await s.complete()).status_code == 200
    assert len(p[0].calls) == (policy != "cost")


@pytest.mark.parametrize("whose", ["prefill", "decode"])
async def test_an_update_that_the_router_has_not_heard_of_is_no_fault(whose: str) -> None:
    p, d = fakes(1, 1)
    async with introduced_system(p, d) as s:
        for number in range(FAILURES_TO_STOP + 1):
            one, other = (p[0], d[0]) if whose == "prefill" else (d[0], p[0])
            await update(s, one, is_known=False, version=f"{number}")
            assert (await s.complete()).headers["x-baton-prefill"] == "remote"
            while known(s, one).weights != f"{number}":  # D's answer makes the router ask at once.
                await s.client.get("/fleet")
            while not any("other" in one and n > number for one, n in (await counted(s, "handoffs")).items()):
                pass
            assert (await s.complete()).headers["x-baton-prefill"] == "local"
            await update(s, other, version=f"{number}")
            assert (await s.complete()).headers["x-baton-prefill"] == "remote"
        handoffs = await counted(s, "handoffs")
        outcomes = {labels.split('outcome="')[1].split('"')[0]: value for labels, value in handoffs.items()}
        assert outcomes == {"other_weights": FAILURES_TO_STOP + 1, "handed_over": FAILURES_TO_STOP + 1}
        (pair,) = (await s.client.get("/fleet")).json()["pairs"]
        assert (pair["usable"], pair["computed"]) == (True, 0)
        engines = (await s.client.get("/fleet")).json()["engines"]
        assert [engines[role][0]["failures"] for role in ("prefill", "decode")] == [0, 0]


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_refusal_because_of_other_weights_is_no_fault(mode: str) -> None:
    """A D whose policy is to fail is asked anew, and nothing is offered to it again."""
    p, d = fakes(1, 1)
    d[0].respond = refuses_tickets(decodes)
    async with introduced_system(p, d, mode=mode) as s:
        await update(s, d[0], is_known=False, version="2")
        for _ in range(FAILURES_TO_STOP + 1):
            assert (await s.complete()).status_code == 200
            while known(s, d[0]).weights != "2":
                await s.client.get("/fleet")
        while not (handoffs := await counted(s, "handoffs")):
            pass
        assert len(p[0].calls) == 1
        assert ['outcome="other_weights"' in labels for labels in handoffs] == [True]
        assert (await s.client.get("/fleet")).json()["pairs"][0]["computed"] == 0


# --- Streams --------------------------------------------------------------------------------------


def speaking(name: str, version: str, **fields: Any) -> FakeEngine:
    fake = baton(name, **fields)
    fake.card = {"served_model_name": "m", "kv_identity": {**KV_IDENTITY, "version": version}}
    return fake


async def test_a_stream_whose_engine_was_updated_meanwhile_is_not_continued() -> None:
    """The stream's tokens may be of two versions, and no other engine has both."""
    gate = asyncio.Event()
    slow, others = (
        speaking("d0", "1", rest_gate=gate, dies_after=2),
        [speaking("d1", "1"), speaking("d2", "2")],
    )
    async with introduced_system([speaking("p", "9")], [slow, *others], policy="round_robin") as s:
        asking: list[asyncio.Task[Any]] = []
        while not slow.calls:
            asking.append(asyncio.create_task(stream(s)))
            await asyncio.wait([asking[-1]], timeout=0) if slow.calls else await s.client.get("/fleet")
        await until(lambda: any(wait.has_begun for wait in known(s, slow).waits))
        await update(s, slow, version="2")
        gate.set()
        answers = [await one for one in asking]
    assert [got.text for got in answers if got.error] == ["Hi"]
    assert not any(leg.get("baton_output_token_ids") for one in others for leg in speaker(one).legs)


async def test_a_second_prefill_of_other_weights_does_not_end_an_answer() -> None:
    """The first D has other weights than P had. Meanwhile P, too, has them, and another first token."""
    p, updated, right = speaking("p", "1"), speaking("d0", "1"), speaking("d1", "1")
    other = Speaker(tokens=(88, 89, 33))

    async def answers_while_p_is_updated(call: Call) -> None:
        p.respond, p.card = other, {**p.card, "kv_identity": {**KV_IDENTITY, "version": "2"}}
        await other(call)

    updated.respond = answers_while_p_is_updated
    async with introduced_system([p], [updated, right], policy="round_robin") as s:
        await update(s, updated, is_known=False, version="2")
        while not updated.calls:
            got = await stream(s)
    assert (got.text, got.error) == ("Hi!", None)
    assert other.legs[-1].get("do_remote_decode"), "the second prefill was asked for"


# --- Turns ----------------------------------------------------------------------------------------


def test_turns_of_old_weights_are_forgotten_and_others_stay() -> None:
    taken_back: list[Any] = []
    d, other = (Engine(f"http://d:{number}", "decode") for number in (1, 2))
    for one in (d, other):
        one.introduction = EngineCard(one.url, None, kv_identity=KV)
    table = TurnTable(lambda engine, params: taken_back.append(params))
    for name, keeper in (("a", d), ("b", d), ("c", other)):
        table.put(name, Turn(keeper, {"of": name}, KV), 0.0)
    newer = replace(KV, version="2")
    assert table.take("a", 1.0, newer) is None, "it stays for an engine of its weights"
    assert table.take("a", 1.0, KV) is not None
    d.introduction = EngineCard(d.url, None, kv_identity=newer)
    assert table.take("b", 1.0, newer) is None, "of weights that are gone"
    table.put("a", Turn(d, {"of": "a"}, KV), 2.0)
    table.forget(d)
    assert taken_back == [{"of": "b"}, {"of": "a"}]
    assert [session for session, _ in table.kept()] == ["c"]


# --- Pure parts -----------------------------------------------------------------------------------

versions = st.lists(st.sampled_from(["1", "2", None]), min_size=5, max_size=5)


@given(versions=versions, turn=st.integers(0, 9))
def test_by_cost_engines_of_unlike_versions_are_no_placement(versions: list[str | None], turn: int) -> None:
    urls = ("http://p:1", "http://p:2"), ("http://d:1", "http://d:2", "http://d:3")
    fleet = Fleet(RouterSettings(prefill_urls=urls[0], decode_urls=urls[1], policy="cost"))
    for one, version in zip(fleet.engines, versions, strict=True):
        kv = None if version is None else replace(KV, version=version)
        fleet.models.note_introduced(
            one, Introduced("baton", EngineCard(one.url, None, kv_identity=kv), None, None, None)
        )
    by_url = {one.url: one for one in fleet.engines}
    found = fleet.choice.explain(RoutedRequest(turn, b"", num_tokens=1000), lambda *_: 0.0)
    assert {one["decode"] for one in found} == set(urls[1]), "each decode engine may compute the prompt"
    for one in found:
        if one["prefill"] is not None:
            ours, theirs = by_url[one["decode"]].kv_identity, by_url[one["prefill"]].kv_identity
            assert None in (ours, theirs) or ours == theirs


def test_every_process_of_a_router_learns_an_update() -> None:
    router = Router()
    one, two, three = router.workers.values()
    keeper = one.fleet.engines[2]
    for version in ("1", "2"):
        found = Introduced(
            "baton", EngineCard("d", None, kv_identity=replace(KV, version=version)), None, None, None
        )
        is_updated = one.fleet.models.note_introduced(keeper, found)
        one.fleet.tell(Introduces(keeper.key, found))
        assert is_updated == (version == "2")
        if is_updated:
            one.view.turns.forget(keeper)
        router.settle()
        for process in (router.hub, one, two, three):
            assert process.fleet.engines[2].weights == version
        if version == "1":
            two.view.turns.put(
                "s", Turn(two.fleet.engines[2], {"n": 1}, two.fleet.engines[2].kv_identity), 0.0
            )
            router.settle()
            assert three.view.turns.kept()[0][1].kv_identity == replace(KV, version="1")
    assert [process.view.turns.kept() for process in (router.hub, one, two, three)] == [[], [], [], []]
    assert [process.taken_back for process in (router.hub, one, two, three)] == [[], [{"n": 1}], [], []]
    router.restart(0)
    assert router.workers[0].fleet.engines[2].kv_identity == replace(KV, version="2")


@pytest.mark.parametrize(
    ("weights", "version", "shown"),
    [("ab" * 32, "", "abababababab"), ("mine", "", "mine"), ("ab" * 32, "step-7", "step-7")],
)
def test_weights_are_shown_by_name_or_digits(weights: str, version: str, shown: str) -> None:
    assert weights_of(replace(KV, weights=weights, version=version)) == shown


def test_unnamed_weights_are_told_apart() -> None:
    one, two = (weights_of(KV.updated(None, None)) for _ in range(2))
    assert one != two
    assert len(one) == len("unnamed ") + 12
