"""The load generator against a proxy over real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks.serve import command, generator, report
from benchmarks.serve.client import Target
from benchmarks.serve.generator import Due
from benchmarks.serve.results import Results, ResultsError
from benchmarks.serve.workload import Planned
from common.messages import Generate
from tests.proxy.conftest import System
from tests.proxy.scripted import ScriptedWorker, speaks

TEXT = b"a worker says the same to everybody " * 4


async def bench(url: object, *options: str) -> int:
    """As from the command line, in a thread: it has an event loop of its own."""
    return await asyncio.to_thread(command.main, ["--url", str(url), *options])


def short(prompt_tokens: int = 20, output_tokens: int = 6) -> list[str]:
    return ["--prompt-tokens", str(prompt_tokens), "--output-tokens", str(output_tokens)]


async def test_open_loop_runs_are_measured_and_written_down(
    system: System, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = await system.worker("decode", speaks(TEXT))
    figures, drawing, page = (tmp_path / name for name in ("figures.json", "drawing.png", "page.html"))
    files = ["--json", str(figures), "--png", str(drawing), "--html", str(page)]
    load = ["--content", "text", "--rate", "200,400", "--num-requests", "12"]
    more = ["--slo-ttft-s", "60", "--seed", "5", "--label", "here"]
    assert await bench(system.client.base_url, *short(), *load, *more, *files) == 0
    assert len(worker.generates) == 2 + 2 * 12  # two to warm up
    results = Results.read(figures)
    assert [(point.label, point.amount) for point in results.points] == [("200/s", 200.0), ("400/s", 400.0)]
    for point in results.points:
        found = point.figures
        assert (found.num_sent, found.num_failed, found.num_lost, found.attainment) == (12, 0, 0, 1.0)
        assert 0 < found.ttft_s["p50"] <= found.ttft_s["p99"] <= found.e2e_s["max"]
        assert found.output_tokens_per_s == pytest.approx(12 * 6 / found.wall_s)
        assert all(len(one["gaps_s"]) <= 5 and one["output_tokens"] == 6 for one in point.requests)
    assert drawing.read_bytes().startswith(b"\x89PNG")
    assert "Bears 400.00 requests per second" in page.read_text()
    assert "200/s" in capsys.readouterr().out


async def test_no_two_runs_send_the_same_prompt(system: System) -> None:
    worker = await system.worker("decode", speaks(TEXT))
    load = ["--concurrency", "1,3", "--num-requests", "5", "--content", "text"]
    assert await bench(system.client.base_url, *short(), *load) == 0
    prompts = {generate.token_ids for generate in worker.generates}
    assert len(prompts) == len(worker.generates) == 2 + 2 * 5


async def test_a_closed_loop_never_has_more_under_way_than_asked_for(system: System) -> None:
    under_way, most, all_four = 0, 0, asyncio.Event()

    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if most == 4:
            all_four.set()
        await all_four.wait()
        under_way -= 1  # before the client can know
        worker.say(generate, 0, (65,), "length")

    await system.worker("decode", script)
    load = ["--concurrency", "4", "--num-requests", "20", "--endpoint", "chat", "--warmup", "0"]
    assert await bench(system.client.base_url, *short(), *load) == 0
    assert most == 4


async def test_a_trace_is_replayed_with_its_lengths(system: System, tmp_path: Path) -> None:
    worker = await system.worker("decode", speaks(TEXT))
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 100 * number,
            "input_length": 800 + number,
            "output_length": 40,
            "hash_ids": [0, number],
        }
        for number in range(1, 6)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = tmp_path / "figures.json"
    load = ["--trace", str(trace), "--trace-speed", "20", "--trace-divisor", "8", "--json", str(figures)]
    assert await bench(system.client.base_url, *load, "--warmup", "0", "--content", "text") == 0
    point = Results.read(figures).points[0]
    assert point.figures.num_sent == 5 and all(one["output_tokens"] == 5 for one in point.requests)
    beginnings = {generate.token_ids[:64] for generate in worker.generates}
    assert len(beginnings) == 1  # the block that all share
    assert len({generate.token_ids for generate in worker.generates}) == 5


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    """A server of the OpenAI API that answers completions as the test says."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "any"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def stream(request: web.Request, *parts: bytes) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    for part in parts:
        await reply.write(part)
    return reply


TOKEN = event({"choices": [{"index": 0, "text": "x"}]})
DONE = b"data: [DONE]\n\n"


async def test_every_kind_of_failure_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal seen
        seen += 1
        match seen % 5:
            case 1:
                return web.json_response({"error": {"message": "too many"}}, status=429)
            case 2:
                return await stream(request, TOKEN)
            case 3:
                return await stream(request, TOKEN, event({"error": {"message": "it went wrong"}}))
            case 4:
                await asyncio.sleep(60)
        return await stream(request, TOKEN, TOKEN, DONE)

    figures = tmp_path / "figures.json"
    async with server(handler) as url:
        load = ["--concurrency", "1", "--num-requests", "5", "--warmup", "0", "--timeout-s", "5"]
        assert await bench(url, *load, "--json", str(figures)) == 0
    found = Results.read(figures).points[0].figures
    kinds = ("HTTP 429: too many", "the stream broke off", "in the stream: it went wrong", "time is up")
    assert found.errors == dict.fromkeys(kinds, 1)
    assert (found.num_failed, found.attainment) == (4, 0.2)
    assert "1 × time is up" in capsys.readouterr().err


async def test_requests_beyond_the_number_that_may_be_under_way_are_lost_and_counted() -> None:
    all_due = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        await all_due.wait()
        return await stream(request, TOKEN, DONE)

    def dues() -> Iterator[Due]:
        yield from [Due(0.0, Planned("word", 1, 1))] * 10
        all_due.set()

    async with server(handler) as url:
        run = await generator.open_loop(Target(url, "any"), dues(), 3, lambda _: None)
    assert ([outcome.error for outcome in run.outcomes], run.num_lost) == (["", "", ""], 7)


async def test_a_server_without_token_ids_or_usage_is_measured_by_its_chunks(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await stream(request, TOKEN, TOKEN, TOKEN, DONE)

    figures = tmp_path / "figures.json"
    async with server(handler) as url:
        load = ["--concurrency", "1", "--num-requests", "1", "--warmup", "0", "--body", '{"top_p": 0.5}']
        assert await bench(url, *load, *short(), "--json", str(figures)) == 0
    assert Results.read(figures).points[0].requests[0]["output_tokens"] == 3
    assert bodies[0]["model"] == "any" and bodies[0]["top_p"] == 0.5 and "ignore_eos" not in bodies[0]
    assert bodies[0]["max_tokens"] == 6 and len(bodies[0]["prompt"]) == 20


async def test_what_a_server_says_against_the_first_request_is_said(
    system: System, capsys: pytest.CaptureFixture[str]
) -> None:
    await system.worker("decode", speaks(TEXT))
    assert await bench(system.client.base_url, "--model", "nobody") == 1
    assert "/v1/completions: HTTP 404: " in (said := capsys.readouterr().err) and "nobody" in said


async def test_no_server_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench("http://127.0.0.1:9", "--num-requests", "1") == 1
    captured = capsys.readouterr()
    assert "no server at http://127.0.0.1:9" in captured.err and "baton serve" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--rate", "0"], "--rate: 0 is not above 0"),
        (["--rate", "1", "--concurrency", "2"], "choose one of"),
        (["--endpoint", "chat", "--content", "ids"], "the chat endpoint takes text"),
        (["--body", "[]"], "--body: not a JSON object"),
    ],
)
def test_options_that_cannot_work_are_named(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(options)
    assert refused.value.code == 2
    assert complaint in capsys.readouterr().err


async def test_several_runs_are_compared_in_one_page(system: System, tmp_path: Path) -> None:
    await system.worker("decode", speaks(TEXT))
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        load = [
            "--content",
            "text",
            "--rate",
            "300",
            "--num-requests",
            "3",
            "--label",
            f"system {file.stem}",
            "--json",
            str(file),
        ]
        assert await bench(system.client.base_url, *short(), *load) == 0
    page = tmp_path / "page.html"
    assert report.main([*map(str, files), "--html", str(page)]) == 0
    text = page.read_text()
    assert "system one" in text and "system two" in text and text.count("<td>300/s<td>") == 2


def test_a_file_that_is_no_result_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"format": "another"}')
    with pytest.raises(ResultsError, match=r"other\.json"):
        Results.read(file)
    assert report.main([str(file), "--png", str(tmp_path / "x.png")]) == 1
    assert "other.json" in capsys.readouterr().err
