"""The fleet's page in a real Chromium, with a real router under a small load."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.fleet import HOSTILE, RunningFleet, running_fleet

pytest.importorskip("selenium", reason="selenium is not installed")

from tests.page.browser import CHROMIUM, DRIVER, Browser, chromium

pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed"
    ),
    pytest.mark.slow,
    pytest.mark.processes,
]

CONTRASTS = Path(__file__).with_name("contrast.js").read_text()
LEAST_CONTRAST = 4.5  # AA, of small text.


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    with running_fleet() as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def open_page(browser: Browser, fleet: RunningFleet, width: int = 1400, scheme: str = "light") -> None:
    """Open the page, and wait until the engines have been read twice and a request is listed."""
    for _ in range(3):
        fleet.complete()
    browser.show(fleet.url, width=width, height=900, scheme=scheme)
    browser.wait_for("return document.querySelectorAll('#map .flow').length === 4")
    browser.wait_for("return document.querySelectorAll('#recent tbody tr').length > 0")


def test_flows_latencies_and_engines_appear(browser: Browser, fleet: RunningFleet) -> None:
    open_page(browser, fleet)
    rows = browser.run("return [...document.querySelectorAll('#pairs tbody tr')].map((row) => row.innerText)")
    assert len(rows) == 4
    assert all("MB/s" in row and "6.0 ms" in row for row in rows)
    engines = browser.run("return document.querySelector('#fleet tbody').innerText")
    assert all(one.url.removeprefix("http://") in engines for one in fleet.engines)
    assert engines.count("62 %") == 4
    assert browser.run("return document.querySelectorAll('#ttft canvas').length") == 1
    assert browser.run("return document.querySelector('#ttft').getAttribute('aria-label')").startswith(
        "Of the"
    )


def test_the_waterfall_of_a_request_has_its_legs_and_what_the_engines_report(
    browser: Browser, fleet: RunningFleet
) -> None:
    open_page(browser, fleet)
    browser.run("document.querySelector('#recent tbody button').click()")
    browser.wait_for("return document.querySelectorAll('#fall .bar').length > 8")
    text = browser.run("return document.querySelector('#fall').innerText")
    for part in (
        "prefill leg",
        "decode leg",
        "handshake",
        "wire, 1.0 MB",
        "verify",
        "install",
        "lends 4 blocks",
    ):
        assert part in text
    widths = browser.run(
        "return [...document.querySelectorAll('#fall .bar')].map((bar) => [bar.offsetLeft, bar.offsetWidth,"
        " bar.parentElement.offsetWidth])"
    )
    assert all(left >= 0 and left + width <= whole + 3 for left, width, whole in widths)


def test_a_request_that_runs_is_listed_alone_and_shown_until_now(
    browser: Browser, fleet: RunningFleet
) -> None:
    open_page(browser, fleet)
    rows = "[...document.querySelectorAll('#recent tbody tr')].map((row) => row.innerText)"
    choose = "const s = document.querySelector('#order'); s.value = arguments[0]; s.onchange();"
    with fleet.running_request("it-runs"):
        browser.wait_for(f"return {rows}.some((text) => text.includes('it-runs'))")
        browser.run(choose, "running")
        [row] = browser.run(f"return {rows}")
        assert "runs" in row.replace("it-runs", "")
        browser.run("document.querySelector('#recent tbody button').click()")
        browser.wait_for("return document.querySelectorAll('#fall .bar').length > 0")
        title = browser.run("return document.querySelector('#fall-title').innerText")
        assert title.startswith("it-runs: runs, first token")
        assert "until now" in title
        assert "decode leg, its answer" in browser.run("return document.querySelector('#fall').innerText")
    browser.wait_for(f"return {rows}.length === 0")
    browser.run(choose, "")
    [row] = [text for text in browser.run(f"return {rows}") if "it-runs" in text]
    assert "200" in row


def test_an_engine_is_drained_and_returns_from_the_page(browser: Browser, fleet: RunningFleet) -> None:
    open_page(browser, fleet)
    engine = fleet.engines[-1]
    for label, wanted in (("Drain", "drained"), ("Return", "up")):
        name = f"{label}: decode {engine.url.removeprefix('http://')}"
        browser.wait_for("return document.querySelector(`button[aria-label='${arguments[0]}']`)", name)
        browser.run("document.querySelector(`button[aria-label='${arguments[0]}']`).click()", name)
        assert browser.run("return document.querySelector('#confirm').open")
        browser.run("document.querySelector('#confirm-ok').click()")
        browser.wait_for(
            "return document.querySelector('#fleet tbody tr:last-child').innerText.includes(arguments[0])",
            wanted,
        )
        assert fleet.state_of(engine) == wanted
    events = browser.wait_for(
        "const text = document.querySelector('#log').innerText; return text.includes('drained') && text"
    )
    assert engine.url.removeprefix("http://") in events


def test_what_engines_report_is_text(browser: Browser, fleet: RunningFleet) -> None:
    open_page(browser, fleet)
    browser.run("document.querySelector('#recent tbody button').click()")
    browser.wait_for("return document.querySelectorAll('#fall .bar').length > 8")
    assert HOSTILE in browser.run("return document.querySelector('#about').textContent")
    assert HOSTILE in browser.run("return document.querySelector('#fall').textContent")
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert browser.run("return document.title") == "Baton router"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_the_contrast_of_wcag_aa(browser: Browser, fleet: RunningFleet, scheme: str) -> None:
    open_page(browser, fleet, scheme=scheme)
    found = browser.run(CONTRASTS)
    assert len(found) > 60
    assert not [one for one in found if one[0] < LEAST_CONTRAST]


def test_the_switch_of_colours_overrides_the_system(browser: Browser, fleet: RunningFleet) -> None:
    open_page(browser, fleet)
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = browser.run(ground)
    change = "const s = document.querySelector('#theme'); s.value = arguments[0]; s.onchange();"
    browser.run(change, "dark")
    assert browser.run(ground) != light
    assert not [one for one in browser.run(CONTRASTS) if one[0] < LEAST_CONTRAST]
    browser.run(change, "")
    assert browser.run(ground) == light


@pytest.mark.parametrize("width", [400, 700, 1000])
def test_no_width_scrolls_to_the_side(browser: Browser, fleet: RunningFleet, width: int) -> None:
    open_page(browser, fleet, width=width)
    assert browser.run("return document.documentElement.scrollWidth") <= width


def test_every_control_has_a_name_and_is_reached_by_the_keyboard(
    browser: Browser, fleet: RunningFleet
) -> None:
    open_page(browser, fleet)
    controls = browser.run(
        "return [...document.querySelectorAll('main button, main select, main input, header button,"
        " header select')].filter((one) => one.offsetParent).map((one) => [one.tabIndex, (one.ariaLabel ||"
        " one.labels?.[0]?.textContent || one.textContent).trim()])"
    )
    assert len(controls) > 12
    assert all(tab_index == 0 and name for tab_index, name in controls)
    browser.run("document.querySelector('#fleet tbody button').focus()")
    numbers = "return document.querySelector('#tiles').innerText"
    before = browser.run(numbers)
    fleet.complete()
    browser.wait_for(f"{numbers} !== arguments[0]", before)
    # The focus stays while the page updates.
    assert browser.run("return document.activeElement.closest('#fleet') !== null")


def test_the_page_logs_no_errors_and_asks_the_router_only(browser: Browser, fleet: RunningFleet) -> None:
    browser.requests()
    open_page(browser, fleet)
    browser.run("document.querySelector('#recent tbody button').click()")
    browser.wait_for("return document.querySelectorAll('#fall .bar').length > 8")
    assert browser.complaints() == []
    asked = browser.requests()
    assert len(asked) >= 5
    assert all(url.startswith((fleet.url, "data:")) for url in asked)


def test_the_page_asks_for_a_key_and_says_when_the_router_stops(browser: Browser) -> None:
    with running_fleet("a-key-of-the-router") as fleet:
        browser.show(fleet.url, width=1400, height=900)
        browser.wait_for("return document.querySelector('#ask-key').open")
        assert browser.run("return document.querySelector('#tiles').innerText.trim()") == ""
        browser.run("document.querySelector('#ask-key input').value = arguments[0]", "a-key-of-the-router")
        browser.run("document.querySelector('#ask-key .main').click()")
        browser.wait_for("return document.querySelector('#link').textContent === 'live'")
        fleet.complete()
        browser.wait_for("return document.querySelectorAll('#recent tbody tr').length > 0")
    browser.wait_for("return document.querySelector('#link').textContent === 'reconnecting'")
    browser.complaints()
