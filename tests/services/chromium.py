"""A real browser for tests: Debian's Chromium, driven by Selenium and its own chromedriver.

By hand: ``python tests/services/chromium.py URL FILE [WIDTH] [dark]`` writes a picture of a page;
``--install`` only installs.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import apt
from keeper import CannotInstall

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

PACKAGES: Final = {"chromium": "chromium", "chromedriver": "chromium-driver"}
_FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def programs() -> tuple[str, str]:
    """Return browser and driver, installed before or now. Raises ``CannotInstall``."""
    apt.install(PACKAGES)
    browser, driver = map(shutil.which, PACKAGES)
    if not browser or not driver:
        raise CannotInstall("the packages do not bring chromium and chromedriver")
    return browser, driver


@contextlib.contextmanager
def browser(*, width: int = 1320, height: int = 1000, dark: bool = False) -> Iterator[Chrome]:
    """Run a browser with a profile of its own; what its console says is kept."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    chromium, driver = programs()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = chromium
        flags = [*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        for flag in flags:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        found = Chrome(options=options, service=Service(driver))
        try:
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            found.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            resize(found, width, height)
            yield found
        finally:
            found.quit()


def resize(found: Chrome, width: int, height: int) -> None:
    """Give the page a size, also one that is narrower than a window can be."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    found.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def main() -> None:
    """Install, or take a picture of a whole page."""
    if sys.argv[1:2] == ["--install"]:
        programs()
        return
    url, file, *rest = sys.argv[1:]
    width = next((int(each) for each in rest if each.isdecimal()), 1320)
    with browser(width=width, dark="dark" in rest) as found:
        found.get(url)
        time.sleep(3)  # for a person who looks, there is no condition to wait for
        height = found.execute_script("return document.documentElement.scrollHeight")
        resize(found, width, min(height, 4500))
        time.sleep(1)
        Path(file).write_bytes(found.get_screenshot_as_png())
        for entry in found.get_log("browser"):
            print(entry)


if __name__ == "__main__":
    main()
