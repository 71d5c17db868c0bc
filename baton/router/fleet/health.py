"""Health of the fleet: answers, failures and probes, and which engine they eject."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable

from baton.router.fleet.breaker import Probe
from baton.router.fleet.engine import Engine, Wait
from baton.router.fleet.notes import Erred, LegFailed, Note
from baton.router.fleet.outlier_detection import Answers, is_error, is_outlier, may_eject
from baton.router.fleet.roster import Roster
from baton.router.values.errors import LegFailure
from baton.router.values.settings import OutlierDetection

logger = logging.getLogger(__name__)

LATE_S = 4.0  # Then probes have found an engine that is stopped.


def give_up(waits: Iterable[Wait]) -> None:
    for wait in list(waits):  # Each one leaves the set of its engine.
        wait.give_up()


class FleetHealth:
    """An answer with an error status is not a failure of the engine: one request that every engine refuses
    must not eject them one by one.
    """

    def __init__(
        self, roster: Roster, outlier_detection: OutlierDetection, tell: Callable[[Note], None]
    ) -> None:
        self._roster = roster
        self._outlier_detection = outlier_detection
        self._tell = tell
        self.on_ejected: list[Callable[[Engine], None]] = []

    def note_answer(self, engine: Engine, status: int, now_s: float, retry_after_s: float = 0.0) -> None:
        """The head of an answer has come. How the answer ends is noted with `note_outcome`."""
        engine.health.on_answer()
        if is_error(status):
            self.note_late(engine, now_s)
            engine.rests_until_s = max(engine.rests_until_s, now_s + retry_after_s)
        else:
            engine.late_until_s = 0.0
        if status >= 500:
            engine.num_failures += 1
            self._roster.note_error(engine, why := f"answered with status {status}")
            self._tell(Erred(engine.key, why))

    def note_outcome(self, engine: Engine, outcome: str, now_s: float, model: object = None) -> None:
        """A leg has ended, with a whole answer of this status, or with a failure of this kind.

        `model`: that the request names. An engine may fail for one of its models only.
        """
        is_failed = is_error(int(outcome)) if outcome.isdigit() else outcome in ("broken", "timeout")
        if not is_failed and not outcome.isdigit():
            return  # The client has left, or the engine was not reached, which its breaker counts.
        if is_failed and engine.is_up:
            self.note_late(engine, now_s)
        names = engine.names or ()
        if (
            isinstance(model, str)
            and model in names
            and len(names) > 1
            and (why := self._eject_outlier(engine, model, now_s, is_failed=is_failed))
        ):
            engine.answers[None].note(now_s, is_failed=is_failed)
            logger.warning("%s engine %s, model %s: %s", engine.role, engine.url, model, why)
            self._roster.note_error(engine, f"model {model}: {why}")
            self._roster.note_event("model_down", engine, f"{model}: {why}")
        elif why := self._eject_outlier(engine, None, now_s, is_failed=is_failed):
            engine.health.eject(now_s, engine.answers[None].ejection_s)
            engine.answers = defaultdict(Answers, {None: engine.answers[None]})
            self._count_against(engine, why, is_ejected=True)

    def _eject_outlier(
        self, engine: Engine, model: str | None, now_s: float, *, is_failed: bool
    ) -> str | None:
        """Note an answer for `model` (None: for any). Returns why the engine is ejected for it, if it is."""
        settings, answers = self._outlier_detection, engine.answers[model]
        answers.note(now_s, is_failed=is_failed)
        own = answers.tally(now_s, settings.interval_s)
        on_trial = bool(answers.ejection_s) and own.num_answers == 1
        if model is None:
            on_trial = engine.health.breaker(now_s) == "half_open"
        if not own.num_failed and not on_trial:
            answers.ejection_s = 0.0
        if not is_failed or not engine.is_up:
            return None
        pool = [one for one in self._roster.of(engine.role) if one.is_member and one.names == engine.names]
        peers = [
            one
            for one in pool
            if one.is_up and one is not engine and (model is None or not one.answers[model].is_ejected(now_s))
        ]
        tallies = [one.answers[model].tally(now_s, settings.interval_s) for one in peers]
        if not may_eject(settings, len(pool), len(peers) + 1) or not is_outlier(
            settings, own, answers.num_failed_in_row, tallies, on_trial=on_trial
        ):
            return None
        answers.eject(settings, now_s)
        return (
            f"{own.num_failed} of {own.num_answers} answers were errors; ejected for {answers.ejection_s:g} s"
        )

    def note_late(self, engine: Engine, now_s: float) -> None:
        """A prompt is late there. Prompts that leave it must not make it look idle."""
        engine.late_until_s = now_s + LATE_S

    def note_failure(self, engine: Engine, failure: LegFailure, now_s: float) -> None:
        """Note a failure once, though several parts of the router report it."""
        if failure.is_noted:
            return
        failure.is_noted = True
        engine.num_failures += 1
        is_decisive = failure.kind == "unreachable"
        self.note_leg_failed(engine, str(failure), now_s, is_decisive=is_decisive)
        self._tell(LegFailed(engine.key, str(failure), is_decisive))

    def note_leg_failed(self, engine: Engine, why: str, now_s: float, *, is_decisive: bool) -> None:
        """A leg has failed, in this process or in another one of this router."""
        is_ejected = engine.health.on_failure(now_s, is_decisive=is_decisive)
        self._count_against(engine, why, is_ejected=is_ejected)

    def note_probe(self, engine: Engine, probe: Probe, now_s: float) -> None:
        was_silent, was = engine.health.is_silent, engine.status
        is_changed = engine.health.on_probe(probe, now_s)
        if engine.status == "up" != was:
            self._roster.note_event("up", engine, "answers again" if was == "down" else "")
        if probe.kind not in ("healthy", "slow"):
            self._count_against(
                engine, probe.why, is_ejected=is_changed, is_graceful=probe.kind == "unhealthy"
            )
        elif is_changed:
            engine.rests_until_s = 0.0
            logger.info("%s engine %s is back", engine.role, engine.url)
        if engine.health.is_silent and not was_silent:
            # The engine is stopped, or hangs, with its connections open. Legs would wait as long.
            give_up(engine.waits)

    def _count_against(
        self, engine: Engine, error: str, *, is_ejected: bool, is_graceful: bool = False
    ) -> None:
        """`is_graceful`: the engine reports that it takes no requests. It may finish its own.

        Legs that another engine can take over are given up when their engine is ejected otherwise.
        """
        engine.is_introduced = False  # Perhaps it is another process when it is back.
        self._roster.note_error(engine, error)
        if not is_ejected:
            return
        logger.warning("%s engine %s is down: %s", engine.role, engine.url, error)
        self._roster.note_event("down", engine, error)
        for hear in self.on_ejected:
            hear(engine)
        if not is_graceful and any(other.is_eligible for other in self._roster.of(engine.role)):
            give_up(wait for wait in engine.waits if not wait.has_begun)
