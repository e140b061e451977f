"""What the live page costs: the proxy's CPU time with the page open and closed by turns, the browser's own,
and how soon something is to be seen.

A system is started and given requests, so that the page has a full list of them; then Chromium opens and
closes the page for some seconds each, several times. Needs Chromium and its chromedriver, and selenium.

    python -m benchmarks.page [--rounds 5] [--phase-s 20] [--rate 2]
"""

import argparse
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median

import httpx
import psutil
from selenium import webdriver

from benchmarks import chromium
from benchmarks.server import Server, serving
from proxy.live import NUM_RECENT

SETTLE_S = 5.0
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 16
PAINTS = "return performance.getEntriesByType('paint').map((entry) => [entry.name, entry.startTime])"
BYTES = """return performance.getEntries()
  .filter((entry) => entry.encodedBodySize && !entry.name.includes('events'))
  .reduce((sum, entry) => sum + entry.encodedBodySize, 0)"""


@dataclass(slots=True)
class Shares:
    """Of a core, one for each phase."""

    proxy: list[float] = field(default_factory=list)
    browser: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Found:
    open: Shares = field(default_factory=Shares)
    closed: Shares = field(default_factory=Shares)
    first_paint_ms: list[float] = field(default_factory=list)
    page_bytes: int = 0

    def text(self) -> str:
        lines = ["| | page open | page closed | difference |", "|---|--:|--:|--:|"]
        for name in ("proxy", "browser"):
            shown, hidden = 100 * median(getattr(self.open, name)), 100 * median(getattr(self.closed, name))
            lines.append(f"| {name}, % of a core | {shown:.2f} | {hidden:.2f} | {shown - hidden:+.2f} |")
        paint = (
            f"First paint after {median(self.first_paint_ms):.0f} ms (longest {max(self.first_paint_ms):.0f})"
        )
        return "\n".join([*lines, "", f"{paint}; {self.page_bytes / 1000:.0f} kB."])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.page", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--phase-s", type=float, default=20.0, help="how long the page is open, and closed")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second meanwhile")
    options = parser.parse_args(argv)
    programs = chromium.installed()
    if programs is None:
        raise SystemExit("no Chromium with its chromedriver here")
    with serving() as server, chromium.running(programs) as chrome:
        for _ in range(NUM_RECENT):
            request(server)
        with load(server, options.rate):
            print(measure(server, chrome, options.rounds, options.phase_s).text())
    return 0


def measure(server: Server, chrome: webdriver.Chrome, rounds: int, phase_s: float) -> Found:
    found = Found()
    for _ in range(rounds):
        chrome.get("about:blank")
        phase(server, chrome, phase_s, found.closed)
        chrome.get(server.url)
        phase(server, chrome, phase_s, found.open)
        found.first_paint_ms += [at for name, at in chrome.execute_script(PAINTS) if name == "first-paint"]
        found.page_bytes = max(found.page_bytes, chrome.execute_script(BYTES))
    return found


def phase(server: Server, chrome: webdriver.Chrome, phase_s: float, shares: Shares) -> None:
    time.sleep(SETTLE_S)  # what opening takes is not what being open takes
    began, proxy, browsing = time.monotonic(), proxy_cpu_s(server), browser_cpu_s(chrome)
    time.sleep(phase_s)
    shares.proxy.append((proxy_cpu_s(server) - proxy) / (time.monotonic() - began))
    browsed = sum(cpu_s - browsing.get(pid, 0.0) for pid, cpu_s in browser_cpu_s(chrome).items())
    shares.browser.append(browsed / (time.monotonic() - began))


def proxy_cpu_s(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=30.0).text
    found = re.search(r"^process_cpu_seconds_total ([\d.e+]+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def browser_cpu_s(chrome: webdriver.Chrome) -> dict[int, float]:
    """Of each process of the browser, without the driver: some end while a page is being left."""
    used = {}
    for process in psutil.Process(chrome.service.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used[process.pid] = times.user + times.system
    return used


@contextmanager
def load(server: Server, rate: float) -> Iterator[None]:
    over = threading.Event()

    def ask() -> None:
        while not over.wait(1 / rate):
            request(server)

    thread = threading.Thread(target=ask)
    if rate:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if rate:
            thread.join()


def request(server: Server) -> None:
    server.complete([1000 + index for index in range(PROMPT_TOKENS)], OUTPUT_TOKENS)


if __name__ == "__main__":
    sys.exit(main())
