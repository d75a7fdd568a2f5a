"""Chromium without a window, driven by Selenium: for tests and for the pictures of the documentation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

AXE = Path(__file__).parent / "viewer" / "axe.min.js"
"""axe-core 4.14.1 as its authors publish it (Mozilla Public License 2.0)."""

SECONDS = 120
"""How long a page may take; a test waits for what it looks for and not for a time."""


class Browser:
    """One window."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        self.driver.get(address)

    def press(self, *keys: str) -> None:
        """Type keys into what has the focus."""
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def wait_for(self, selector: str) -> Any:
        """The first element that fits, when it is there."""
        return WebDriverWait(self.driver, SECONDS).until(lambda driver: driver.find_element(By.CSS_SELECTOR, selector))

    def wait_until(self, script: str) -> None:
        """Return when an expression is true."""
        WebDriverWait(self.driver, SECONDS).until(lambda driver: driver.execute_script(f"return {script}"))

    def value(self, script: str) -> Any:
        return self.driver.execute_script(f"return {script}")

    def emulate(self, *, width: int = 1280, height: int = 860, dark: bool = False) -> None:
        """Show all further pages in a window of this size, for a system with light or with dark windows."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def violations(self) -> list[str]:
        """Rules of accessibility that the page breaks, as axe-core finds them, each with the first element."""
        self.driver.execute_script(AXE.read_text(encoding="utf-8"))
        script = "axe.run().then(found => arguments[0](found.violations.map(v => `${v.id}: ${v.nodes[0].html}`)))"
        violations: list[str] = self.driver.execute_async_script(script)
        return violations

    def save(self, file: Path, *, height: int) -> None:
        """A picture of the top of the page."""
        self.driver.set_window_size(self.driver.get_window_size()["width"], height)
        self.driver.save_screenshot(str(file))

    def complaints(self) -> list[str]:
        """Lines of the console since the last call: errors, warnings, and what the content security policy refused."""
        return [line["message"] for line in self._log("browser")]

    def hosts(self) -> set[str]:
        """Hosts that requests went to since the last call; that of the page itself and data in it included."""
        messages = [json.loads(line["message"])["message"] for line in self._log("performance")]
        urls = [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]
        return {urlsplit(url).hostname or urlsplit(url).scheme for url in urls}

    def _log(self, kind: str) -> list[dict[str, Any]]:
        driver: Any = self.driver  # this method of Selenium has no annotations
        lines: list[dict[str, Any]] = driver.get_log(kind)
        return lines


@contextmanager
def browser(folder: Path, *, width: int = 1280, height: int = 860) -> Iterator[Browser]:
    """A window whose profile is in `folder`."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    options.add_argument(f"--window-size={width},{height}")
    options.add_argument(f"--user-data-dir={folder}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver") or "chromedriver")
    driver = webdriver.Chrome(options, service)
    try:
        driver.set_page_load_timeout(SECONDS)
        driver.set_script_timeout(SECONDS)
        yield Browser(driver)
    finally:
        driver.quit()


END, ENTER = Keys.END, Keys.ENTER
