"""A real browser, where the machine has one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from benchmarks import chromium
from tests.proxy.conftest import System

WAIT_S = 60.0


@pytest.fixture(scope="session")
def chrome() -> Iterator[webdriver.Chrome]:
    programs = chromium.installed()
    if programs is None:
        pytest.skip(
            "no Chromium with its chromedriver here (Debian: apt-get install chromium chromium-driver)"
        )
    with chromium.running(programs) as chrome:
        yield chrome


class Page:
    """The live page of a system in a browser; the calls wait in threads, so that the system goes on."""

    def __init__(self, chrome: webdriver.Chrome, url: str) -> None:
        self._chrome = chrome
        self._url = url

    async def open(self) -> None:
        await asyncio.to_thread(self._chrome.get, self._url)

    async def until(self, condition: Callable[["Page"], object]) -> None:
        """Of what the page shows; whatever goes wrong on the way, as for an element that is not there yet, is
        tried again."""
        wait = WebDriverWait(self._chrome, WAIT_S, 0.1, ignored_exceptions=[Exception])
        await asyncio.to_thread(wait.until, lambda _: condition(self))

    async def press(self, *keys: str) -> None:
        await asyncio.to_thread(self._chrome.switch_to.active_element.send_keys, *keys)

    async def click(self, css: str) -> None:
        await asyncio.to_thread(lambda: self.find(css).click())

    def find(self, css: str) -> WebElement:
        return self._chrome.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[WebElement]:
        return self._chrome.find_elements(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        return self.find(css).text

    def state(self, worker: str) -> str | None:
        return self.find(f'[data-worker="{worker}"]').get_attribute("data-state")

    def script(self, text: str) -> Any:
        return self._chrome.execute_script(text)

    def complaints(self) -> list[str]:
        """What the browser's console has had to say since the last call."""
        return [entry["message"] for entry in self._chrome.get_log("browser")]  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        await asyncio.to_thread(self._chrome.get, "about:blank")


@pytest.fixture
async def page(chrome: webdriver.Chrome, system: System) -> AsyncIterator[Page]:
    page = Page(chrome, str(system.client.base_url))
    page.complaints()
    await page.open()
    yield page
    system.frontend.stopping.set()
    await page.close()


__all__ = ["Keys", "Page", "page"]
