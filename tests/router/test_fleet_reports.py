"""Events, errors and snapshots of a fleet, and its members, failures and models, without servers."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from baton.core.engine_card import EngineCard
from baton.core.errors import ConfigError
from baton.core.identity import KVIdentity
from baton.router.fleet.breaker import Probe
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.health import LATE_S
from baton.router.fleet.notes import EngineLoad, Erred, LegFailed
from baton.router.fleet.policies import RoutedRequest
from baton.router.values.errors import LegFailure, RouterError
from baton.router.values.identity import Identity, Introduced, ModelCard
from baton.router.values.members import Member
from baton.router.values.settings import OutlierDetection, ProbeSettings
from tests.router.fleets import UNIX_S, decoders, fleet_of

KV = KVIdentity(model="x", weights="1", dtype="bf16", num_layers=2, num_kv_heads=2, head_dim=8, hash_seed="0")


def events(fleet: Fleet) -> list[tuple[str, str | None, str]]:
    return [(one["kind"], one["engine"], one["why"]) for one in fleet.roster.log.last()]


def serve(fleet: Fleet, engine: Engine, name: str, model: str = "x", *names: str) -> None:
    """A Baton engine of this name and architecture reports its names."""
    cards = tuple(
        ModelCard(one, parent=name if number else None) for number, one in enumerate((name, *names))
    )
    fleet.models.note_identity(engine, Identity("baton", name, replace(KV, model=model)), cards)


@dataclass(eq=False)
class Leg:
    """A `Wait`."""

    has_begun: bool = False
    ends: list[str] = field(default_factory=list)

    def give_up(self) -> None:
        self.ends.append("given up")

    def hand_over(self) -> None:
        self.ends.append("handed over")


def wait(engine: Engine, *, has_begun: bool = False) -> Leg:
    leg = Leg(has_begun)
    engine.waits[leg] = None
    return leg


# --- Members ----------------------------------------------------------------------------------------


def test_an_engine_that_is_there_cannot_be_added() -> None:
    fleet = fleet_of()
    with pytest.raises(
        ConfigError, match="http://d0:1 is a decode engine already; remove it first"
    ) as caught:
        fleet.add(Member("decode", "http://d0:1"), 0.0)
    assert caught.value.field == "instance"
    with pytest.raises(ConfigError) as caught:
        fleet.add(Member("decode", "d0:1"), 0.0)
    assert caught.value.field == "instance"


def test_an_added_engine_is_down_and_is_probed_by_the_settings_of_the_fleet() -> None:
    fleet = fleet_of(probe=ProbeSettings(down_every_s=7.0))
    added: list[Engine] = []
    fleet.on_added.append(added.append)
    engine = fleet.add(Member("decode", "http://d9:1", "m", 0.5), 3.0)
    assert added == [engine]
    assert (engine.status, engine.model, engine.weight, engine.names) == ("down", "m", 0.5, ("m",))
    assert fleet.find(engine.key) is engine
    fleet.health.note_probe(engine, Probe("refused"), 3.0)
    assert engine.health.probe_at_s == 10.0
    assert events(fleet)[0] == ("added", engine.url, "")


def test_an_engine_that_drains_may_return() -> None:
    fleet = fleet_of()
    engine = decoders(fleet)[0]
    engine.is_introduced = True
    fleet.note_start(engine)
    fleet.drain(engine, 9.0, is_leaving=True)
    assert fleet.add(Member("decode", "http://user@d0:1", "n"), 4.0) is engine
    assert (engine.drain_until_s, engine.is_leaving, engine.is_introduced) == (None, False, False)
    assert (engine.health.probe_at_s, engine.address, engine.names) == (4.0, "http://user@d0:1", ("n",))
    fleet.note_end(engine)
    fleet.end_drain(engine, 9.0)
    assert not engine.is_removed
    assert events(fleet) == [
        ("draining", engine.url, "then it is removed"),
        ("added", engine.url, "again, while it drained"),
    ]


@pytest.mark.parametrize("is_leaving", [False, True])
def test_a_drain_ends_with_its_last_request_or_with_its_time(is_leaving: bool) -> None:
    fleet, removed = fleet_of(), list[Engine]()
    fleet.on_removed.append(removed.append)
    engine, other = decoders(fleet)
    leg, begun = wait(engine), wait(engine, has_begun=True)
    fleet.note_start(engine)
    fleet.end_drain(engine, 100.0)
    assert leg.ends == [], "it does not drain"
    fleet.drain(engine, 9.0, is_leaving=is_leaving)
    assert (engine.state, other.state) == ("draining", "unknown")
    fleet.hand_over(engine, 8.0)
    assert begun.ends == [], "of an earlier drain"
    fleet.hand_over(engine, 9.0)
    assert (leg.ends, begun.ends) == ([], ["handed over"])
    fleet.end_drain(engine, 8.9)
    assert leg.ends == []
    fleet.end_drain(engine, 9.0)
    assert (leg.ends, begun.ends) == (["given up"], ["handed over", "given up"])
    assert removed == ([engine] if is_leaving else [])
    assert (engine in fleet.engines) is not is_leaving
    fleet.end_drain(engine, 9.0)
    assert len(leg.ends) == (1 if is_leaving else 2)
    fleet.note_end(engine)
    assert removed == ([engine] if is_leaving else []), "it is removed once"


def test_a_drain_is_over_when_the_other_processes_have_no_request_either() -> None:
    fleet = fleet_of()
    engine = decoders(fleet)[0]
    fleet.note_elsewhere(engine, EngineLoad(engine.key, in_flight=1))
    fleet.note_start(engine)
    fleet.drain(engine, 9.0, is_leaving=True)
    fleet.note_end(engine)
    assert not engine.is_removed
    fleet.note_elsewhere(engine, EngineLoad(engine.key))
    assert engine.is_removed
    assert [kind for kind, _, _ in events(fleet)] == ["draining", "drained", "removed"]


def test_an_engine_without_requests_is_drained_at_once() -> None:
    fleet = fleet_of()
    engine = decoders(fleet)[0]
    fleet.drain(engine, 9.0, is_leaving=False)
    assert (events(fleet), engine.state) == ([("drained", engine.url, "")], "drained")
    fleet.drain(engine, 9.0, is_leaving=True)
    assert engine.is_removed


def test_tokens_to_compute_are_counted_by_priority() -> None:
    fleet, loads = fleet_of(), list[int]()
    engine = decoders(fleet)[0]
    fleet.on_load = lambda: loads.append(engine.load)
    fleet.note_start(engine, 100, priority=2)
    fleet.note_start(engine, 10)
    engine.elsewhere = EngineLoad(engine.key, num_queued_tokens=5)
    assert [engine.num_queued_before(priority) for priority in (0, 1, 2)] == [15, 15, 115]
    fleet.note_computed(engine, 60, priority=2)
    assert (engine.queued_tokens, dict(engine.num_queued_at)) == (55, {2: 40, 0: 10})
    fleet.note_computed(engine, 40, priority=2)
    fleet.note_computed(engine, 10)
    fleet.note_end(engine)
    assert (engine.num_queued_tokens, dict(engine.num_queued_at)) == (0, {})
    assert (loads, engine.num_requests) == ([1, 2, 2, 2, 2, 1], 2)


def test_an_answer_in_another_process_is_a_sign_of_life() -> None:
    fleet = fleet_of()
    engine = decoders(fleet)[0]
    fleet.note_elsewhere(engine, EngineLoad(engine.key, num_heard=0))
    assert engine.status == "unknown"
    fleet.note_elsewhere(engine, EngineLoad(engine.key, num_heard=1))
    assert engine.status == "up"


def test_the_error_without_an_engine_counts_why() -> None:
    fleet = fleet_of(num_decode=5)
    begin = "no decode engine can take the request"
    assert fleet.why_none("decode") == f"{begin} (0 of 5 are down)"
    down, refused, other_refused, draining, _ = decoders(fleet)
    fleet.health.note_probe(down, Probe("refused"), 0.0)
    assert fleet.why_none("decode") == f"{begin} (1 of 5 are down)"
    down.refused = refused.refused = other_refused.refused = "serves another model"
    assert fleet.why_none("decode") == f"{begin} (1 of 5 are down, 2 are refused)"
    down.drain_until_s = draining.drain_until_s = 1.0
    assert fleet.why_none("decode") == f"{begin} (1 of 5 are down, 2 are refused, 1 are draining)"
    assert fleet.why_none("prefill") == "no prefill engine can take the request (0 of 1 are down)"


def test_a_fleet_can_serve_once_a_decode_engine_has_answered() -> None:
    fleet = fleet_of()
    fleet.health.note_answer(fleet.engines[0], 200, 0.0)
    assert not fleet.can_serve
    engine = decoders(fleet)[0]
    fleet.health.note_answer(engine, 200, 0.0)
    assert fleet.can_serve
    engine.refused = "serves another model"
    assert not fleet.can_serve


def test_a_snapshot_shows_each_engine() -> None:
    fleet = fleet_of(num_decode=1)
    known, unknown = decoders(fleet)[0], fleet.engines[0]
    lost = EngineCard("d", None, lost_links={"p": 2}, kv_identity=replace(KV, version="v1"))
    identity = Identity("baton", "m", lost.kv_identity)
    fleet.models.note_introduced(known, Introduced("baton", lost, 4096, identity, (ModelCard("m"),)))
    assert known.max_model_len == 4096
    fleet.note_start(known)
    known.elsewhere = EngineLoad(known.key, in_flight=2, num_requests=5, num_failures=3)
    fleet.health.note_answer(known, 500, 0.0)
    fleet.health.note_probe(known, Probe("broken", "reset"), 0.0)
    empty = {
        "status": "unknown",
        "state": "unknown",
        "kind": None,
        "introduced": False,
        "model": None,
        "weights": None,
        "names": None,
        "refused": None,
        "engine_id": None,
        "lost_links": {},
        "in_flight": 0,
        "requests": 0,
        "failures": 0,
        "failures_in_row": 0,
        "last_error": None,
        "last_error_unix_s": None,
    }
    shown = {
        "url": known.url,
        "status": "up",
        "state": "up",
        "kind": "baton",
        "introduced": True,
        "model": "m",
        "weights": "v1",
        "names": ("m",),
        "engine_id": "d",
        "lost_links": {"p": 2},
        "in_flight": 3,
        "requests": 6,
        "failures": 4,
        "failures_in_row": 1,
        "last_error": "reset",
        "last_error_unix_s": UNIX_S,
    }
    assert fleet.snapshot() == {
        "prefill": [{**empty, "url": unknown.url}],
        "decode": [{**empty, **shown}],
    }


def test_what_only_this_process_has_seen_is_reported_with_its_request() -> None:
    fleet = fleet_of()
    engine = decoders(fleet)[0]
    fleet.roster.report_event("hedge", engine, "late", "r1")
    fleet.roster.report_event("refusal", None)
    hedge, refusal = fleet.roster.log.last()
    assert (hedge["role"], hedge["engine"], hedge["why"]) == ("decode", engine.url, "late")
    assert (hedge["request_id"], hedge["unix_s"]) == ("r1", UNIX_S)
    assert (refusal["engine"], refusal["why"], refusal["request_id"]) == (None, "", None)
    assert [one.kind for one in fleet.roster.log.take_untold(UNIX_S)] == ["hedge", "refusal"]


# --- Failures, and answers that are errors ----------------------------------------------------------


def told(fleet: Fleet) -> list[Any]:
    notes: list[Any] = []
    fleet.tell = notes.append
    return notes


def test_a_failure_is_noted_and_told_once() -> None:
    fleet = fleet_of()
    notes, engine = told(fleet), decoders(fleet)[0]
    engine.is_introduced = True
    failure = LegFailure("broken", engine.url, "reset", was_sent=True)
    for _ in range(3):
        fleet.health.note_failure(engine, failure, 0.0)
    assert (engine.num_failures, engine.health.failures_in_row, engine.is_introduced) == (1, 1, False)
    assert engine.last_error == f"{engine.url}: reset"
    assert notes == [LegFailed(engine.key, f"{engine.url}: reset", False)]
    fleet.health.note_failure(engine, LegFailure("unreachable", engine.url, "no", was_sent=False), 0.0)
    assert notes[1:] == [LegFailed(engine.key, f"{engine.url}: no", True)]
    assert events(fleet) == [("down", engine.url, f"{engine.url}: no")]


def test_an_ejected_engine_is_announced_and_its_unbegun_legs_are_given_up() -> None:
    fleet, ejected = fleet_of(), list[Engine]()
    fleet.health.on_ejected.append(ejected.append)
    engine, other = decoders(fleet)
    leg, begun = wait(engine), wait(engine, has_begun=True)
    fleet.health.note_leg_failed(engine, "why", 0.0, is_decisive=True)
    assert (ejected, leg.ends, begun.ends) == ([engine], ["given up"], [])
    last = wait(other)
    fleet.health.note_probe(other, Probe("refused", "gone"), 0.0)
    assert (ejected, last.ends) == ([engine, other], []), "no other engine could take it over"


def test_a_silent_engine_gives_up_all_its_legs() -> None:
    fleet = fleet_of(probe=ProbeSettings(silences_to_eject=2))
    engine = decoders(fleet)[0]
    leg, begun = wait(engine), wait(engine, has_begun=True)
    fleet.health.note_probe(engine, Probe("silent", "no answer"), 0.0)
    assert (leg.ends, engine.last_error) == ([], "no answer")
    fleet.health.note_probe(engine, Probe("silent", "no answer"), 1.0)
    assert begun.ends == ["given up"]
    assert engine.status == "down"
    before = len(begun.ends)
    fleet.health.note_probe(engine, Probe("silent", "no answer"), 2.0)
    assert len(begun.ends) == before, "once"


def test_an_engine_that_is_back_does_not_rest_any_longer() -> None:
    fleet = fleet_of()
    engine = decoders(fleet)[0]
    fleet.health.note_answer(engine, 429, 0.0, retry_after_s=60.0)
    assert (engine.rests_until_s, engine.late_until_s, engine.num_failures) == (60.0, LATE_S, 0)
    fleet.health.note_answer(engine, 503, 1.0)
    assert (engine.rests_until_s, engine.late_until_s, engine.num_failures) == (60.0, 1.0 + LATE_S, 1)
    fleet.health.note_probe(engine, Probe("healthy"), 2.0)
    assert engine.rests_until_s == 60.0, "it was not down"
    fleet.health.note_answer(engine, 200, 3.0)
    assert engine.late_until_s == 0.0
    fleet.health.note_probe(engine, Probe("refused"), 4.0)
    fleet.health.note_probe(engine, Probe("healthy"), 5.0)
    assert engine.rests_until_s == 0.0


@pytest.mark.parametrize(("status", "is_told"), [(200, False), (404, False), (429, False), (500, True)])
def test_other_processes_hear_of_answers_of_500_and_more(status: int, is_told: bool) -> None:
    fleet = fleet_of()
    notes, engine = told(fleet), decoders(fleet)[0]
    fleet.health.note_answer(engine, status, 0.0)
    assert notes == ([Erred(engine.key, f"answered with status {status}")] if is_told else [])


DETECTION = OutlierDetection(consecutive_5xx=3, base_ejection_time_s=2.0)


@pytest.mark.parametrize("outcome", ["500", "429", "broken", "timeout"])
def test_an_engine_that_fails_more_than_its_peers_is_ejected(outcome: str) -> None:
    fleet = fleet_of(num_decode=3, outlier_detection=DETECTION)
    engine, *others = decoders(fleet)
    for other in others:
        fleet.health.note_outcome(other, "200", 0.0)
    for _ in range(2):
        fleet.health.note_outcome(engine, outcome, 0.0)
    assert engine.is_up
    assert engine.late_until_s == LATE_S
    fleet.health.note_outcome(engine, outcome, 0.0)
    assert engine.status == "down"
    why = "3 of 3 answers were errors; ejected for 2 s"
    assert (events(fleet), engine.last_error) == ([("down", engine.url, why)], why)
    fleet.health.note_probe(engine, Probe("healthy"), 1.9)
    assert engine.status == "down"
    fleet.health.note_probe(engine, Probe("healthy"), 2.0)
    assert engine.status == "up"
    fleet.health.note_outcome(engine, outcome, 2.0)
    assert engine.status == "down", "on trial one failure is enough"
    assert events(fleet)[-1][2] == "1 of 1 answers were errors; ejected for 4 s"


@pytest.mark.parametrize("outcome", ["unreachable", "client_gone"])
def test_outcomes_that_are_no_answers_count_for_nothing(outcome: str) -> None:
    fleet = fleet_of(num_decode=3, outlier_detection=DETECTION)
    engine = decoders(fleet)[0]
    for _ in range(9):
        fleet.health.note_outcome(engine, outcome, 0.0)
    assert (engine.is_up, engine.late_until_s, engine.answers[None].num_failed_in_row) == (True, 0.0, 0)


@pytest.mark.parametrize("num_failing", [2, 3])
def test_errors_of_the_whole_fleet_eject_no_engine(num_failing: int) -> None:
    fleet = fleet_of(num_decode=3, outlier_detection=DETECTION)
    for engine in decoders(fleet)[:num_failing] * 6:
        fleet.health.note_outcome(engine, "500", 0.0)
    assert sum(not engine.is_up for engine in decoders(fleet)) == 0


def test_a_good_answer_ejects_no_engine() -> None:
    settings = OutlierDetection(
        consecutive_5xx=99, failure_percentage_request_volume=10, failure_percentage_threshold=50
    )
    fleet = fleet_of(num_decode=3, outlier_detection=settings)
    engine, *others = decoders(fleet)
    for other in others:
        fleet.health.note_outcome(other, "200", 0.0)
    for _ in range(5):
        fleet.health.note_outcome(engine, "500", 0.0)
        fleet.health.note_outcome(engine, "200", 0.0)
    assert engine.is_up
    fleet.health.note_outcome(engine, "500", 0.0)
    assert not engine.is_up


def test_an_engine_is_compared_with_the_members_that_serve_its_models() -> None:
    fleet = fleet_of(num_decode=4, outlier_detection=replace(DETECTION, max_ejection_percent=100))
    engine, same, leaving, other = decoders(fleet)
    for one in (engine, same, leaving):
        serve(fleet, one, "m")
    serve(fleet, other, "n")
    for one in (same, other):
        fleet.health.note_outcome(one, "200", 0.0)
    fleet.drain(leaving, 9.0, is_leaving=False)
    for _ in range(20):
        fleet.health.note_outcome(leaving, "500", 0.0)
    for _ in range(3):
        fleet.health.note_outcome(engine, "500", 0.0)
    assert not engine.is_up
    for _ in range(3):
        fleet.health.note_outcome(same, "500", 0.0)
    assert same.is_up, "it is the last one of its model"


def test_an_engine_may_be_ejected_for_one_of_its_models() -> None:
    fleet = fleet_of(num_decode=3, outlier_detection=DETECTION)
    engine, *others = decoders(fleet)
    for one in (engine, *others):
        serve(fleet, one, "m", "x", "adapter")
    for other in others:
        for model in ("m", "adapter"):
            fleet.health.note_outcome(other, "200", 0.0, model)
    for _ in range(3):
        fleet.health.note_outcome(engine, "200", 0.0, "m")
        fleet.health.note_outcome(engine, "500", 0.0, "adapter")
    assert engine.is_up
    assert not engine.may_be_asked(1.9, "adapter", is_again=False)
    assert engine.may_be_asked(1.9, "m", is_again=False)
    assert engine.may_be_asked(2.0, "adapter", is_again=False)
    why = "3 of 3 answers were errors; ejected for 2 s"
    assert events(fleet)[-1] == ("model_down", engine.url, f"adapter: {why}")
    assert engine.last_error == f"model adapter: {why}"
    assert engine.answers[None].tally(0.0, 10.0) == (6, 3)
    fleet.health.note_outcome(engine, "500", 2.0, "adapter")
    assert events(fleet)[-1][2] == "adapter: 1 of 1 answers were errors; ejected for 4 s", "on trial"


@pytest.mark.parametrize("model", ["unknown", None, 7])
def test_errors_for_other_models_count_for_the_engine(model: object) -> None:
    fleet = fleet_of(num_decode=3, outlier_detection=DETECTION)
    engine, *others = decoders(fleet)
    for one in (engine, *others):
        serve(fleet, one, "m", "x", "adapter")
    for other in others:
        fleet.health.note_outcome(other, "200", 0.0, model)
    for _ in range(3):
        fleet.health.note_outcome(engine, "500", 0.0, model)
    assert not engine.is_up


# --- Models -----------------------------------------------------------------------------------------


def error_of(fleet: Fleet, model: object) -> tuple[int, str, Any, Any]:
    with pytest.raises(RouterError) as caught:
        fleet.models.check_model(RoutedRequest(0, model=model))
    error = caught.value
    return error.status, str(error), error.param, error.code


def test_a_request_has_to_name_a_model_that_is_served() -> None:
    fleet = fleet_of()
    for model in (None, "", "any", 7):
        fleet.models.check_model(RoutedRequest(0, model=model))
    first, second = decoders(fleet)
    serve(fleet, first, "a", "x", "adapter")
    fleet.models.check_model(RoutedRequest(0, model="any"))
    serve(fleet, second, "b")
    for served in ("a", "adapter", "b"):
        fleet.models.check_model(RoutedRequest(0, model=served))
    for missing in (None, ""):
        status, text, param, _ = error_of(fleet, missing)
        assert (status, param) == (400, "model")
        assert text.endswith("is needed here; one of a, b")
    for unknown in ("c", 7, ["a"]):
        status, text, param, code = error_of(fleet, unknown)
        assert (status, param, code) == (404, "model", "model_not_found")
        assert text.endswith(f"the model {unknown!r} does not exist")


def test_an_engine_of_another_model_than_most_is_refused_until_it_fits() -> None:
    fleet = fleet_of(num_decode=3)
    first, second, third = decoders(fleet)
    serve(fleet, first, "m", "a" * 20)
    serve(fleet, second, "m", "b" * 20)
    assert (first.refused, second.refused is not None) == (None, True), "the first one stays"
    serve(fleet, third, "m", "b" * 20)
    refused = "serves 'm' (weights 1, aaaaaaaaaaaa), but the fleet serves bbbbbbbbbbbb"
    assert (first.refused, second.refused, third.refused) == (refused, None, None)
    assert not first.is_eligible
    serve(fleet, first, "m", "b" * 20)
    assert first.refused is None
    logged = [one for one in events(fleet) if one[1] == first.url]
    assert logged == [
        ("refused", first.url, refused),
        ("accepted", first.url, "serves 'm' (weights 1, bbbbbbbbbbbb)"),
    ]


def test_among_equals_the_model_that_was_served_before_stays() -> None:
    fleet = fleet_of()
    first, second = decoders(fleet)
    serve(fleet, second, "m", "y")
    serve(fleet, first, "m", "x")
    assert (first.refused is not None, second.refused) == (True, None)


def test_a_prefill_engine_of_a_model_that_is_not_decoded_is_refused() -> None:
    fleet = fleet_of(2, 2)
    p, other = fleet.engines[:2]
    serve(fleet, p, "b")
    assert p.refused is None, "decode engines may serve it"
    for engine in decoders(fleet):
        serve(fleet, engine, "a")
    serve(fleet, other, "a")
    assert (p.refused, other.refused) == (f"serves {p.identity}, which no decode engine serves", None)
    serve(fleet, decoders(fleet)[0], "b")
    assert p.refused is None


def test_a_pool_is_named_by_the_model_of_its_engines() -> None:
    fleet = fleet_of(1, 3)
    first, second, unknown = decoders(fleet)
    serve(fleet, first, "a", "x", "adapter")
    assert fleet.models.pool_of(RoutedRequest(0, model="a")) == "", "one model is known"
    serve(fleet, second, "b")
    pools = [fleet.models.pool_of(RoutedRequest(0, model=model)) for model in ("adapter", "b", "c")]
    assert pools == ["a", "b", ""]
    assert unknown.names is None
    adapters = [fleet.models.adapter_of(RoutedRequest(0, model=model)) for model in ("adapter", "a", None)]
    assert adapters == ["adapter", None, None]


def test_the_models_of_the_router_have_their_aliases() -> None:
    fleet = fleet_of(1, 2, model_aliases={"gpt": "a", "lost": "c"})
    assert fleet.models.model_cards() is None, "no engine has reported its names"
    first, second = decoders(fleet)
    serve(fleet, first, "a")
    assert fleet.models.model_cards() == [ModelCard("a"), ModelCard("gpt")]
    serve(fleet, second, "b")
    assert fleet.models.model_cards() == [ModelCard("a"), ModelCard("b"), ModelCard("gpt")]
    plain = fleet_of(1, 2)
    serve(plain, decoders(plain)[0], "a")
    assert plain.models.model_cards() is None, "any decode engine knows the names"
    serve(plain, decoders(plain)[1], "b")
    assert plain.models.model_cards() == [ModelCard("a"), ModelCard("b")]


def test_a_model_with_unlike_weights_is_in_an_update() -> None:
    fleet, heard = fleet_of(1, 3), list[Engine]()
    fleet.models.on_updated.append(heard.append)
    first, second, down = decoders(fleet)

    def introduce(engine: Engine, version: str) -> bool:
        introduction = EngineCard("d", None, kv_identity=replace(KV, version=version))
        identity = Identity("baton", "m", introduction.kv_identity)
        found = Introduced("baton", introduction, None, identity, (ModelCard("m"),))
        return fleet.models.note_introduced(engine, found)

    assert [introduce(engine, "v1") for engine in (first, second, down)] == [False] * 3
    assert fleet.models.updates() == []
    assert introduce(down, "v2")
    assert fleet.models.updates() == [{"model": "m", "weights": {"v1": 2, "v2": 1}}]
    fleet.health.note_probe(down, Probe("refused"), 0.0)
    assert fleet.models.updates() == []
    assert introduce(first, "v2")
    assert not introduce(first, "v2")
    second.refused = "serves another model"
    assert fleet.models.updates() == []
    assert heard == [down, first]
    change = ("updated", first.url, "weights v1 before, v2 now")
    assert change in events(fleet)
    assert not fleet.models.note_introduced(first, None)
    assert not first.is_introduced
    nameless = Introduced("baton", EngineCard("d", None), None, Identity("baton", "m"), None)
    assert fleet.models.note_introduced(first, nameless)
    assert ("updated", first.url, "weights v2 before, unknown now") in events(fleet)
