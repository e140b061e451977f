"""A browser without a window, to see pages as people see them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from selenium import webdriver

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--window-size=1400,1500",
)


class Installed(NamedTuple):
    browser: str
    driver: str


def installed() -> Installed | None:
    """None where the machine has no Chromium with its chromedriver."""
    browser = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    return Installed(browser, driver) if browser and driver else None


@contextmanager
def running(programs: Installed) -> Iterator[webdriver.Chrome]:
    """The browser, whose console can be asked for; ended afterwards."""
    options = webdriver.ChromeOptions()
    options.binary_location = programs.browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for option in OPTIONS:
        options.add_argument(option)
    chrome = webdriver.Chrome(options, webdriver.ChromeService(programs.driver))
    try:
        yield chrome
    finally:
        chrome.quit()
