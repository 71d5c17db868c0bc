"""Arithmetic, tables and plots of the handoff benchmark; only `make bench` starts engines."""

import io
import json
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import cast

import httpx
import pytest
from rich.console import Console

from baton.cli.processes import Child
from lab.bench.handoff import command as handoff
from lab.bench.handoff.asking import Answer, AskingError, ask, lend
from lab.bench.handoff.command import ResultRecorder, main, print_goals
from lab.bench.handoff.goals import Lengthwise, Overheads, Results, Trial
from lab.bench.handoff.measures import OnResult, _Bench, _metric, phases_of
from lab.bench.handoff.plots import plot
from lab.bench.handoff.system import Neighbours, Prompts, System


def row(
    mode: str = "push-off",
    *,
    handoff_s: float = 1.03,
    second_gap_s: float = 0.05,
    late_s: float = 1.05,
    num_tokens: int = 512,
    copy_s: float = 0.02,
) -> Lengthwise:
    """Results of a machine whose speed drifts: comparisons are within a trial."""
    turns = tuple(
        Trial(speed, 0.045, speed + handoff_s - 1, second_gap_s, speed + late_s - 1, 0.3)
        for speed in (0.5, 1.0, 2.0)
    )
    return Lengthwise(mode, num_tokens, turns, copy_s, 0, "2026-11-20T12:00:00+00:00")


OVERHEADS = Overheads("push-off", 0.012, 0.001, 0.03, 1.01, 0.0, "2026-11-20T12:00:00+00:00")


def test_the_goals_are_shares_of_the_single_engine_plus_a_little() -> None:
    assert row(handoff_s=1.034).first_goal.is_met
    assert not row(handoff_s=1.036).first_goal.is_met
    assert row(second_gap_s=0.054).second_goal.is_met
    assert not row(second_gap_s=0.056).second_goal.is_met
    assert row(late_s=1.089).late_goal.is_met
    assert not row(late_s=1.091).late_goal.is_met


def test_a_long_prompt_may_take_20_ms_over_a_step() -> None:
    assert row("pull", second_gap_s=0.064, num_tokens=4_000).second_goal.is_met
    assert not row("pull", second_gap_s=0.066, num_tokens=4_000).second_goal.is_met


def test_only_tcp_is_given_the_time_of_the_copy() -> None:
    assert row("pull-tcp", second_gap_s=0.074).second_goal.is_met
    assert not row("pull-tcp", second_gap_s=0.076).second_goal.is_met
    assert not row("pull", second_gap_s=0.074).second_goal.is_met


FETCH = {
    "claimed_s": 0.003,
    "ready_s": 0.003,
    "allocated_s": 0.004,
    "started_s": 0.005,
    "read_s": 0.011,
    "ended_s": None,
}


def test_the_phases_of_the_gap_add_up_to_it() -> None:
    timeline = {"arrived_at_s": 100.0, "admitted_s": 0.002, "scheduled_s": 0.012, "fetch": FETCH}
    phases = phases_of(timeline, first_at_s=99.999, second_at_s=100.05)
    expected = {"to D": 1, "admission": 2, "claim": 1, "handshake": 0, "blocks": 1, "order": 1}
    expected |= {"read": 6, "lease": 0, "schedule": 1, "step": 38}
    assert {name: round(s * 1e3) for name, s in phases.items()} == expected
    assert sum(phases.values()) == pytest.approx(0.051)


def test_what_ended_before_the_first_token_is_no_part_of_the_gap() -> None:
    timeline = {"arrived_at_s": 100.0, "admitted_s": 0.002, "scheduled_s": 0.02, "fetch": FETCH}
    phases = phases_of(timeline, first_at_s=100.01, second_at_s=100.05)
    assert {name for name, s in phases.items() if s} == {"read", "schedule", "step"}
    assert sum(phases.values()) == pytest.approx(0.04)
    assert set(phases_of({**timeline, "fetch": None}, 100.01, 100.05)) == set(phases)


def test_the_table_shows_met_goals_and_the_load_of_others() -> None:
    console = Console(record=True, width=150, file=io.StringIO())
    results = Results()
    for result in (row(), row(handoff_s=2.0, num_tokens=64), OVERHEADS):
        results.add(result)
    print_goals(results, console)
    text = console.export_text()
    assert text.count("missed") == 2
    assert "8 of 10 goals are met" in text
    assert text.index("64 tokens") < text.index("512 tokens")
    for shown in ("12.0 ms", "3.0%", "1.010", "0.3"):
        assert shown in text


def test_a_result_is_stored_at_once_and_replaces_an_older_one(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    recorder = ResultRecorder(console, tmp_path, "a machine")
    recorder.record(row())
    recorder.record(OVERHEADS)
    later = ResultRecorder(console, tmp_path, "another")
    later.record(row(handoff_s=1.01))
    later.record(row("pull"))
    stored = json.loads((tmp_path / "handoff.json").read_text())
    assert stored["machine"] == "another"
    assert Results.of_json(stored).to_json() == later.results.to_json()
    assert [row.mode for row in later.results.lengths] == ["push-off", "pull"]
    assert later.results.lengths[0].first_more_s == pytest.approx(0.01)
    assert list(later.results.overheads) == [OVERHEADS]
    assert [path.name for path in tmp_path.iterdir()] == ["handoff.json"]


def test_a_failed_mode_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(mode: str, tokens: object, repeats: int, on_result: OnResult, *, patience_s: float) -> None:
        on_result(row(mode))
        if mode == "pull":
            raise AskingError("no [room]")

    monkeypatch.setattr(handoff, "measure", measure)
    assert main(["--modes", "pull,push-off", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "no [room]" in printed
    assert "could not be measured: pull" in printed
    assert [row.mode for row in ResultRecorder(Console(), tmp_path, "").results.lengths] == [
        "pull",
        "push-off",
    ]


def test_plots_are_drawn_in_the_given_folder(tmp_path: Path) -> None:
    pictures = plot([row(), row("pull", num_tokens=64)], tmp_path / "benchmarks")
    assert [picture.name for picture in pictures] == [
        "handoff-first-token.png",
        "handoff-second-token.png",
        "handoff-late-token.png",
    ]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_a_metric_is_summed_over_its_labels() -> None:
    ours = 'baton:x_sum{model="a"} 0.5\nbaton:x_sum{model="b"} 1.5e-1\n'
    text = f"# HELP baton:x_sum 7\n{ours}baton:x_sum_more 9\n"
    assert _metric(text, "x_sum") == 0.65


def test_our_own_load_is_not_counted_as_others() -> None:
    """Bounded by the machine, and never negative, however short the time."""
    assert 0.0 <= Neighbours().cores() < 4096


def test_no_prompt_begins_like_another() -> None:
    prompts = Prompts()
    assert len({tuple(prompts.of(64)[:4]) for _ in range(100)}) == 100


def test_an_unknown_mode_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--modes", "pull,pigeon"])
    assert "pigeon" in capsys.readouterr().err


def test_gaps_are_counted_from_the_second_token_on() -> None:
    answer = Answer((5, 6, 7, 8), (1.0, 1.5, 1.75, 2.0))
    assert (answer.first_token_s, answer.second_gap_s) == (1.0, 0.5)
    assert answer.later_gaps_s == (0.25, 0.25)


class Handler(BaseHTTPRequestHandler):
    answer = b""
    status = 200

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_tokens_are_noted_as_they_come(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events = b"".join(
        b'data: {"choices": [{"token_ids": %s}]}\n\n' % tokens for tokens in (b"[4]", b"[5, 6]")
    )
    monkeypatch.setattr(Handler, "answer", events + b"data: [DONE]\n")
    with httpx.Client(trust_env=False) as client:
        answer = ask(client, server, [1, 2], max_tokens=3)
        assert answer.token_ids == (4, 5, 6)
        assert answer.arrived_s == tuple(sorted(answer.arrived_s))
        with pytest.raises(AskingError, match="3 tokens instead of 4"):
            ask(client, server, [1, 2], max_tokens=4)


def test_a_refusal_is_no_measurement(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "answer", b"no room")
    monkeypatch.setattr(Handler, "status", 503)
    with httpx.Client(trust_env=False) as client:
        with pytest.raises(AskingError, match="503"):
            ask(client, server, [1], max_tokens=1)
        with pytest.raises(AskingError, match="has lent no blocks"):
            lend(client, server, [1], "t")


def test_an_answer_that_lends_nothing_is_no_measurement(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "answer", b"{}")
    with httpx.Client(trust_env=False) as client, pytest.raises(AskingError, match="has lent no blocks"):
        lend(client, server, [1], "t")


class Scripted(_Bench):
    """Trials with a given load of others, which slows each of them down."""

    def __init__(self, others_cores: list[float], *, repeats: int, patience_s: float) -> None:
        self._repeats, self._patience_s = repeats, patience_s
        self._others_cores = others_cores

    def _trial(self, num_tokens: int) -> Trial:
        others_cores = self._others_cores.pop(0)
        return Trial(1 + others_cores, 0.03, 1.0, 0.04, 1.1, others_cores)


def test_a_disturbed_trial_is_repeated() -> None:
    bench = Scripted([0.0, 1.5, 0.9, 0.05, 0.02, 1.0], repeats=3, patience_s=3600)
    trials, num_disturbed = bench._trials(64)
    assert [trial.others_cores for trial in trials] == [0.0, 0.02, 0.05]
    assert num_disturbed == 2


def test_a_machine_that_is_never_quiet_is_still_measured() -> None:
    trials, num_disturbed = Scripted([1.5, 0.9, 0.4], repeats=3, patience_s=0)._trials(64)
    assert [trial.others_cores for trial in trials] == [0.4, 0.9, 1.5]
    assert num_disturbed == 0


class Cached(_Bench):
    """Records the requests."""

    def __init__(self) -> None:
        self._system = System("P", "D", "single", "router", "late", cast(Child, None))
        self._prompts = Prompts()
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def ask(
        self, url: str, prompt: int | Sequence[int], max_tokens: int = 8, *, request_id: str | None = None
    ) -> Answer:
        assert not isinstance(prompt, int)
        self.asked.append((url, tuple(prompt)))
        return Answer((1, 2), (1.0, 1.25))


def test_a_new_pair_is_measured_with_a_prompt_that_the_producer_has() -> None:
    bench = Cached()
    assert bench.second_token_s(64) == bench.second_token_s(64) == 1.25
    assert [url for url, _ in bench.asked] == ["P", "router"] * 2
    prompts = [prompt for _, prompt in bench.asked]
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[3]
    assert prompts[0] != prompts[2]
