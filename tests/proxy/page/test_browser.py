"""The live page as people see it: Chromium, a proxy over real sockets, workers that follow a script."""

import asyncio
import re

from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from common.config import ProxyConfig
from common.messages import Generate
from proxy.served_model import ServedModel
from tests.proxy.conftest import System, system_of
from tests.proxy.page.conftest import Page
from tests.proxy.scripted import Script, ScriptedWorker, running, speaks

TEXT = b"the quick brown fox jumps over the lazy dog " * 4


def hands_over(to: ScriptedWorker) -> Script:
    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(generate, 0, (TEXT[0],))
        to.take_over(generate)

    return script


async def pair(system: System) -> None:
    decode = await system.worker("decode", speaks(TEXT), name="decode-0")
    await system.worker("prefill", hands_over(decode), name="prefill-0")


async def test_it_shows_the_cluster_and_what_goes_on(system: System, page: Page) -> None:
    await pair(system)
    await page.until(lambda p: p.state("prefill-0") == p.state("decode-0") == "ready")
    await page.until(lambda p: p.text("#state") == "ready" and p.text("#model") == "tiny")
    assert [wire.get_attribute("data-pair") for wire in page.all("#wires path")] == ["prefill-0>decode-0"]
    assert page.text("#ttft-p50") == page.text("#itl-p50") == "–"
    for _ in range(3):
        body = {"prompt": "say", "max_tokens": 20}
        assert (await system.client.post("/v1/completions", json=body)).status_code == 200
    await page.until(lambda p: re.fullmatch(r"[\d.]+ m?s", p.text("#ttft-p50")))
    await page.until(lambda p: re.fullmatch(r"[\d.]+ m?s", p.text("#itl-p99")))
    await page.until(lambda p: float(p.text("#output")) > 0)
    await page.until(lambda p: len(p.all("#recent .request")) == 3)
    row = page.find("#recent .request")
    assert "prefill-0 → decode-0" in row.text and "3 → 20" in row.text
    assert page.all("#recent .request .waterfall span")
    await page.until(lambda p: p.script("return document.querySelectorAll('.uplot canvas').length") == 4)
    assert page.complaints() == []


async def test_a_worker_that_dies_turns_red_and_comes_back(system: System, page: Page) -> None:
    async with running(ScriptedWorker(system.control, "decode", speaks(TEXT), name="decode-0")):
        await page.until(lambda p: p.state("decode-0") == "ready")
        green = page.find('[data-worker="decode-0"] .dot').value_of_css_property("background-color")
    await page.until(lambda p: p.state("decode-0") == "lost")
    await page.until(lambda p: p.text("#state") == "not ready")
    red = page.find('[data-worker="decode-0"] .dot').value_of_css_property("background-color")
    assert red != green
    assert "connection" in page.text('[data-worker="decode-0"] .state')
    async with running(ScriptedWorker(system.control, "decode", speaks(TEXT), name="decode-0")):
        await page.until(lambda p: p.state("decode-0") == "ready")
        await page.until(lambda p: p.text("#state") == "ready")
        assert len(page.all(".worker")) == 1
        assert page.find('[data-worker="decode-0"] .dot').value_of_css_property("background-color") == green
    assert page.complaints() == []


async def test_tokens_of_a_prompt_have_the_colours_of_their_workers(system: System, page: Page) -> None:
    await pair(system)
    await page.until(lambda p: p.state("prefill-0") == p.state("decode-0") == "ready")
    await page.press("/")
    await page.press(Keys.CONTROL + "a" + Keys.NULL, "to be or not to be", Keys.CONTROL + Keys.ENTER)
    await page.until(
        lambda p: p.text("#ask-send") == "Send" and p.text("#answer") == TEXT[:96].decode().strip()
    )
    workers = {token.get_attribute("data-worker") for token in page.all("#answer .token")}
    assert "decode-0" in workers and workers <= {"prefill-0", "decode-0"}
    assert "96 tokens" in page.text("#ask-result")
    assert page.complaints() == []


async def test_an_answer_can_be_stopped(system: System, page: Page) -> None:
    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(generate, 0, (65,))
        await asyncio.Event().wait()

    worker = await system.worker("decode", script, name="decode-0")
    await page.until(lambda p: p.state("decode-0") == "ready")
    await page.click("#ask-send")
    await page.until(lambda p: p.text("#answer") == "A")
    await page.press(Keys.ESCAPE)
    await page.until(lambda p: p.text("#ask-send") == "Send")
    await worker.until(lambda: len(worker.aborts) == 1)


async def test_an_error_is_shown_where_the_answer_would_be(system: System, page: Page) -> None:
    await system.worker("decode", speaks(TEXT), name="decode-0")
    await page.until(lambda p: p.state("decode-0") == "ready")
    page.script("document.getElementById('ask-text').value = 'many words '.repeat(500)")
    await page.click("#ask-send")
    await page.until(lambda p: "4096" in p.text("#answer .bad"))


async def test_it_works_with_the_keyboard_alone(system: System, page: Page) -> None:
    await system.worker("decode", speaks(TEXT), name="decode-0")
    for _ in range(2):
        await system.client.post("/v1/completions", json={"prompt": "say", "max_tokens": 2})
    await page.until(lambda p: len(p.all("#recent .request")) == 2)
    await page.press("w")
    assert page.find("#span-60").get_attribute("aria-pressed") == "true"
    before = page.find("body").value_of_css_property("background-color")
    await page.press("t")
    await page.until(lambda p: p.find("body").value_of_css_property("background-color") != before)
    await page.press("p")
    assert page.find("#pause").get_attribute("aria-pressed") == "true"
    page.script("document.getElementById('recent').focus()")
    await page.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    chosen = page.all("#recent .request[aria-selected='true']")
    assert len(chosen) == 1 and chosen[0].id == page.all("#recent .request")[1].id
    assert "attempt 1" in page.text("#detail") and "prompt" in page.text("#detail")
    await page.press("?")
    await page.until(lambda p: p.find("#help-dialog").is_displayed())
    await page.press(Keys.ESCAPE)
    await page.until(lambda p: not p.find("#help-dialog").is_displayed())
    assert page.complaints() == []


async def test_it_asks_for_the_key_that_the_server_wants(
    chrome: webdriver.Chrome, model: ServedModel
) -> None:
    async with system_of(model, ProxyConfig(api_key=("secret",))) as system:
        await system.worker("decode", speaks(TEXT), name="decode-0")
        page = Page(chrome, str(system.client.base_url))
        await page.open()
        await page.until(lambda p: p.find("#key-dialog").is_displayed())
        await page.press("wrong", Keys.ENTER)
        await page.until(lambda p: p.find("#key-wrong").is_displayed())
        await page.press("secret", Keys.ENTER)
        await page.until(lambda p: p.state("decode-0") == "ready")
        await page.click("#ask-send")
        await page.until(lambda p: "quick brown fox" in p.text("#answer"))
        system.frontend.stopping.set()
        await page.close()
