"""Chromium of Debian without a window, driven by chromedriver; what its pages log and ask for is kept."""

import io
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
WAIT_S = 60.0


class Browser:
    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def show(self, url: str, *, width: int, height: int, scheme: str = "light") -> None:
        """`scheme`: what the system prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait_for(self, script: str, *arguments: Any) -> Any:
        """Wait until the script returns something true. Raises TimeoutException."""
        return WebDriverWait(self.driver, WAIT_S, 0.1).until(lambda _: self.run(script, *arguments))

    def screenshot(self, path: Path) -> None:
        self.driver.get_screenshot_as_file(str(path))

    def complaints(self) -> list[str]:
        """Errors of pages and breaches of their policy, since the last call."""
        return [one["message"] for one in self.driver.get_log("browser") if one["level"] != "INFO"]

    def requests(self) -> list[str]:
        """URLs that pages have asked for, since the last call."""
        messages = (json.loads(one["message"])["message"] for one in self.driver.get_log("performance"))
        return [
            one["params"]["request"]["url"]
            for one in messages
            if one["method"] == "Network.requestWillBeSent"
        ]


class Recording:
    """The fleet's page as an animation: a frame each second, and SPEED seconds in one."""

    SIZE, EVERY_S, SPEED = (1100, 640), 1.0, 4

    def __init__(self, browser: Browser, url: str, key: str) -> None:
        self._browser, self._frames = browser, list[bytes]()
        width, height = self.SIZE
        browser.show(url, width=width, height=height)
        browser.run("sessionStorage.setItem('baton-key', arguments[0])", key)
        browser.show(url, width=width, height=height)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(self.EVERY_S):
            self._frames.append(self._browser.driver.get_screenshot_as_png())

    def save(self, path: Path) -> None:
        """Save the recording as an animated WebP."""
        self._is_over.set()
        self._thread.join()
        first, *rest = (Image.open(io.BytesIO(frame)).convert("RGB") for frame in self._frames)
        shown_ms = round(1000 * self.EVERY_S / self.SPEED)
        first.save(path, save_all=True, append_images=rest, duration=shown_ms, loop=0, quality=50, method=2)


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """`profile`: an empty folder."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    options = Options()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
