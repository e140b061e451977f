"""`baton top` against a proxy over real sockets."""

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from common.config import ProxyConfig
from control_plane.top import command, screen
from proxy.served_model import ServedModel
from tests.proxy.conftest import System, model, system, system_of
from tests.proxy.scripted import speaks

__all__ = ["model", "system"]


async def top(url: object, *options: str) -> int:
    return await asyncio.to_thread(command.main, ["--url", str(url), "--once", *options])


async def test_it_shows_workers_figures_and_requests(
    system: System, capsys: pytest.CaptureFixture[str]
) -> None:
    await system.worker("decode", speaks(b"hello"), name="decode-0")
    for _ in range(2):
        await system.client.post("/v1/completions", json={"prompt": "say", "max_tokens": 5})
    assert await top(system.client.base_url) == 0
    shown = capsys.readouterr().out
    assert "tiny" in shown and " ready " in shown
    assert any("decode-0" in line and "ready" in line and "0%" in line for line in shown.splitlines())
    assert shown.count("3 → 5") == 2


async def test_without_a_server_it_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert await top("http://127.0.0.1:9") == 1
    assert "http://127.0.0.1:9" in (said := capsys.readouterr().err) and "baton serve" in said


async def test_a_key_that_is_wanted_is_asked_for(
    model: ServedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    async with system_of(model, ProxyConfig(api_key=("secret",))) as system:
        assert await top(system.client.base_url) == 1
        assert "--api-key" in capsys.readouterr().err
        assert await top(system.client.base_url, "--api-key", "secret") == 0
        assert "no worker has announced itself yet" in capsys.readouterr().out


def test_a_waterfall_has_its_segments_in_proportion() -> None:
    segments: list[dict[str, Any]] = [
        {"name": "prefill", "start_s": 0.0, "seconds": 0.5},
        {"name": "decode", "start_s": 0.5, "seconds": 0.25},
    ]
    bar = screen.waterfall(segments, 1.0, 40)
    assert bar.plain == "█" * 30 + " " * 10
    assert [str(span.style) for span in bar.spans].count("dark_orange") == 20


def test_a_lost_worker_stands_out() -> None:
    load = dict.fromkeys(("num_parked_blocks", "num_receiving", "num_running", "num_waiting"), 0)
    worker = {
        "name": "decode-0", "role": "decode", "state": "lost", "reason": "its connection ended", "load": load,
        "kv_use": 0.25, "rates": {"generation_tokens": None, "cpu_seconds": None}, "memory_bytes": None,
    }  # fmt: skip
    window: dict[str, Any] = dict.fromkeys(
        ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "output_tokens_per_s", "prompt_tokens_per_s",
         "requests_per_s", "errors_per_s", "good_per_s")
    )  # fmt: skip
    snapshot = {
        "model": "tiny", "ready": False, "in_flight": 0, "slo": {"ttft_s": 0.5, "itl_s": 0},
        "workers": [worker], "links": [], "recent": [], "windows": {"10": window},
    }  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=160, force_terminal=True, color_system="standard").print(
        screen.draw(snapshot, "10", 160)
    )
    assert "\x1b[1;31mlost: its connection ended" in out.getvalue()
    assert " not ready " in out.getvalue() and "< 500 ms, any" in out.getvalue()
