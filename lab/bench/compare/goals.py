"""Goals of the comparison and their verdicts: ratios or differences within one session. Pure.

The median over rounds decides; the range shows how certain that is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from lab.bench.compare.figures import Spread, difference, ratio
from lab.bench.compare.journal import Findings
from lab.bench.compare.raw import RAW_PEERS
from lab.bench.compare.reasons import why
from lab.bench.compare.systems import PEERS, SINGLES

LOADED_SHARE_MAX = 1.03  # (a) of TTFT and ITL without a connector
LEG_MAX_S = {129: 0.010, 513: 0.010, 1921: 0.010, 3841: 0.020}  # (b) over the same prompt, cached
TTFT_SHARE_MAX, TTFT_EXTRA_S = 1.03, 0.005  # (c) of the single engine's TTFT, plus
EMBEDDED_SHARE_MIN = 1.2  # (d) of vLLM's throughput
WORSE_SHARE = 1.03  # (e) a smaller factor is not worse, in any rounds


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on one goal. `is_met` None: a peer's figure for comparison, not a goal. `why`: reason for a
    miss.
    """

    goal: str
    what: str
    measured: str
    limit: str
    is_met: bool | None
    why: str = ""


def verdicts_of(findings: Findings) -> list[Verdict]:
    return [
        *_loaded(findings),
        *_legs(findings),
        *_handed(findings),
        *_embedded(findings),
        *_never_worse(findings),
    ]


def _loaded(findings: Findings) -> Iterator[Verdict]:
    for setting in findings.settings("a"):
        for system in findings.systems("a", setting):
            if system == "vllm":
                continue
            for metric in ("ttft_s", "itl_s"):
                spread = ratio(
                    findings.rounds("a", setting, system, metric),
                    findings.rounds("a", setting, "vllm", metric),
                )
                if spread is not None:
                    is_met = spread.median <= LOADED_SHARE_MAX if is_ours(system) else None
                    what = f"{system}, asked directly, {setting}: {_shown(metric)} of vLLM's without"
                    because = _why("a", system, setting, is_met, is_close=spread.low <= LOADED_SHARE_MAX)
                    yield Verdict("a", what, _times(spread), f"≤ {LOADED_SHARE_MAX}", is_met, because)


def _legs(findings: Findings) -> Iterator[Verdict]:
    for setting in findings.settings("b"):
        limit_s = LEG_MAX_S.get(int(setting.split()[0]))
        for system in findings.systems("b", setting):
            spread = difference(
                findings.rounds("b", setting, system, "leg_s"),
                findings.rounds("b", setting, system, "cached_s"),
            )
            if spread is None or limit_s is None:
                continue
            is_met = spread.median <= limit_s if is_ours(system) else None
            what = f"{system}, {setting}: second leg over the same prompt cached on D"
            because = _why("b", system, setting, is_met, is_close=spread.low <= limit_s)
            yield Verdict("b", what, _milliseconds(spread), f"≤ {limit_s * 1e3:.0f} ms", is_met, because)


def _handed(findings: Findings) -> Iterator[Verdict]:
    for setting in findings.settings("c"):
        if not setting.endswith(" 1 at once"):
            continue  # A pair has two cores and a single engine one, so loads are not comparable.
        for system in findings.systems("c", setting):
            single = single_of(system)
            ours = findings.rounds("c", setting, system, "ttft_s")
            theirs = findings.rounds("c", setting, single, "ttft_s")
            if system == single or (spread := ratio(ours, theirs, extra=TTFT_EXTRA_S)) is None:
                continue
            is_met = spread.median <= TTFT_SHARE_MAX if is_ours(system) else None
            what = f"{system}, {setting}: TTFT less 5 ms, of {single}'s"
            because = _why("c", system, setting, is_met, is_close=spread.low <= TTFT_SHARE_MAX)
            yield Verdict("c", what, _times(spread), f"≤ {TTFT_SHARE_MAX}", is_met, because)


def _embedded(findings: Findings) -> Iterator[Verdict]:
    for setting, (theirs, ours) in product(findings.settings("d"), SINGLES):
        spread = ratio(
            findings.rounds("d", setting, ours, "tokens_per_s"),
            findings.rounds("d", setting, theirs, "tokens_per_s"),
        )
        if spread is not None:
            what = f"{ours}, {setting}: throughput of {theirs}'s"
            is_met = spread.median >= EMBEDDED_SHARE_MIN
            because = _why("d", ours, setting, is_met, is_close=spread.high >= EMBEDDED_SHARE_MIN)
            yield Verdict("d", what, _times(spread), f"≥ {EMBEDDED_SHARE_MIN}", is_met, because)


def _never_worse(findings: Findings) -> Iterator[Verdict]:
    """Yield each comparison that is clearly worse in every round; the others in one line."""
    found = list(_comparisons(findings))
    worse = [(one, spread) for one, spread in found if is_worse(spread)]
    for one, spread in worse:
        measured = f"worse by a factor of {_times(spread)}"
        because = _why("e", one.ours, one.what, False)  # The result holds in every round, so it is not noise.
        yield Verdict("e", one.row, measured, "not worse in every round", False, because)
    if found:
        what = f"{len(found) - len(worse)} of {len(found)} comparisons with a peer"
        because = "see above" if worse else ""
        yield Verdict("e", what, "not worse by more than noise", "all", not worse, because)


def _why(goal: str, system: str, setting: str, is_met: bool | None, *, is_close: bool = False) -> str:
    """Return the reason for a missed goal. `is_close`: at least one round met it."""
    return why(goal, system, setting, is_on_both_sides=is_close) if is_met is False else ""


def is_worse(spread: Spread) -> bool:
    """Return whether a ratio, in which less is better, is worse in every round."""
    return spread.low > 1 and spread.median > WORSE_SHARE


@dataclass(frozen=True, slots=True)
class _Comparison:
    """One comparison with a peer. `what`: part, setting and figure."""

    ours: str
    theirs: str
    what: str

    @property
    def row(self) -> str:
        return f"{self.ours} beside {self.theirs}, {self.what}"


def _comparisons(findings: Findings) -> Iterator[tuple[_Comparison, Spread]]:
    """Yield ratios of ours to theirs, inverted where necessary so that less is better."""
    for ours, theirs in PEERS.items():
        for part, metrics in (
            ("a", ("ttft_s", "itl_s")),
            ("c", ("ttft_s", "tpot_s", "tokens_per_s", "cpu_s")),
            ("b", ("leg_s", "more_cpu_s")),
            ("trace", ("ttft_s", "tpot_s", "cpu_s")),
        ):
            for setting in findings.settings(part):
                for metric in metrics:
                    spread = _compared(findings, part, setting, ours, theirs, metric)
                    if spread is not None:
                        yield _Comparison(ours, theirs, f"{part}: {setting}, {_shown(metric)}"), spread
    for ours, peers in RAW_PEERS.items():
        for setting in findings.settings("raw"):
            for theirs in peers:
                for metric in ("gb_per_s", "cpu_s_per_gb"):
                    spread = _compared(findings, "raw", setting, ours, theirs, metric)
                    if spread is not None:
                        yield _Comparison(ours, theirs, f"raw: {setting}, {_shown(metric)}"), spread


def _compared(
    findings: Findings, part: str, setting: str, ours: str, theirs: str, metric: str
) -> Spread | None:
    a = findings.rounds(part, setting, ours, metric)
    b = findings.rounds(part, setting, theirs, metric)
    return ratio(b, a) if metric in ("tokens_per_s", "gb_per_s") else ratio(a, b)


def is_ours(system: str) -> bool:
    return "baton" in system


def single_of(system: str) -> str:
    """Return the engine without a connector that a system is compared with."""
    return system.split()[0]


def _shown(metric: str) -> str:
    names = {
        "ttft_s": "TTFT",
        "itl_s": "ITL",
        "tpot_s": "TPOT",
        "tokens_per_s": "throughput",
        "cpu_s": "processor time",
        "leg_s": "second leg",
        "more_cpu_s": "processor time of a leg over a cached one",
        "gb_per_s": "GB/s",
        "cpu_s_per_gb": "processor time per GB",
    }
    return names[metric]


def _times(spread: Spread) -> str:
    return f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f}, {_rounds(spread)})"


def _milliseconds(spread: Spread) -> str:
    low, high = spread.low * 1e3, spread.high * 1e3
    return f"{spread.median * 1e3:.1f} ms ({low:.1f} to {high:.1f}, {_rounds(spread)})"


def _rounds(spread: Spread) -> str:
    return f"{spread.num_rounds} round{'s' if spread.num_rounds > 1 else ''}"


def verdict_word(is_met: bool | None) -> str:
    return {None: "beside it", True: "met", False: "missed"}[is_met]


def num_missed(verdicts: Sequence[Verdict]) -> int:
    return sum(verdict.is_met is False for verdict in verdicts)
