"""`baton doctor`: what it finds, on this machine and in servers."""

import asyncio
import socket
from pathlib import Path

import pytest

from common import cores
from common.config import ProxyConfig
from control_plane.child import Command
from control_plane.doctor import command, links, plan, server
from control_plane.doctor.findings import Finding, Level
from proxy.served_model import ServedModel
from tests.proxy.conftest import System, model, system, system_of
from tests.proxy.scripted import speaks

__all__ = ["model", "system"]


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def levels(findings: list[Finding], subject: str) -> list[Level]:
    return [finding.level for finding in findings if finding.subject == subject]


def worker(name: str, *own: int) -> Command:
    return Command(name, ("true",), {}, own)


def test_it_tells_of_everything_that_serving_here_needs(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--no-measure", "--port", free_port(), "--control-port", free_port()]
    code = command.main(options)
    shown = capsys.readouterr().out
    for subject in (
        "processor",
        "kernels",
        "cores",
        "other work",
        "memory",
        "GPU",
        "model",
        "ports",
        "threads",
    ):
        assert f" {subject}" in shown
    assert "prefill-0: " in shown and "decode-0: " in shown
    assert code == 0 and "0 will not work" in shown


def test_a_taken_port_a_missing_model_and_a_bad_option_will_not_work(tmp_path: Path) -> None:
    def failure(*options: str) -> tuple[str, str]:
        found = command.planned(options, measured=False)
        (only,) = [(one.subject, one.text) for one in found if one.level == "failure"]
        return only

    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        subject, text = failure("--port", taken, "--control-port", free_port())
        assert subject == "ports" and f"{taken} is taken" in text
    subject, text = failure(str(tmp_path / "nowhere"), "--port", free_port(), "--control-port", free_port())
    assert subject == "model" and "nowhere" in text
    subject, text = failure("--block-size", "0")
    assert subject == "options" and "--block-size" in text


async def test_a_port_on_which_a_baton_runs_is_worth_a_note(system: System) -> None:
    options = ["--port", str(system.client.base_url.port), "--control-port", free_port()]
    found = await asyncio.to_thread(command.planned, options, False)
    (note,) = [one for one in found if one.subject == "ports" and one.level == "note"]
    assert "is a Baton that runs" in note.text and "baton doctor --server http://127.0.0.1:" in note.advice


def test_workers_that_share_cores_are_told() -> None:
    apart = plan.sharing([worker("prefill-0", 0), worker("decode-0", 1)])
    assert levels(apart, "threads") == ["good", "good"]
    shared = plan.sharing([worker("prefill-0", 0), worker("decode-0", 0, 1), worker("decode-1", 2)])
    assert shared[-1].level == "warning"
    assert shared[-1].text.startswith("prefill-0, decode-0 share cores 0 ")


def test_every_transport_is_measured_between_each_pair_of_workers() -> None:
    core = cores.allowed()[0]
    (found,) = links.check([worker("prefill-0", core)], [worker("decode-0", core)])
    assert found.text.startswith("prefill-0 → decode-0: zmq+tcp ")
    assert found.text.count(" GB/s, ") >= 2 and "zmq+ipc" in found.text
    assert links.check([], [worker("decode-0", core)])[0].level == "note"


def test_cores_that_do_not_exist_are_a_failure_and_no_crash() -> None:
    (found,) = links.check([worker("prefill-0", 100_000)], [worker("decode-0", 0)])
    assert found.level == "failure"


async def check(system: System, key: str = "") -> list[Finding]:
    return await asyncio.to_thread(server.check, str(system.client.base_url), key)


async def test_a_server_is_looked_at_with_its_workers_and_its_clock(system: System) -> None:
    assert levels(await check(system), "server") == ["failure"]
    await system.worker("decode", speaks(b"hi"), name="decode-0")
    found = await check(system)
    assert [finding.level for finding in found if finding.subject != "server"] == ["good", "good"]
    assert "decode-0: ready" in found[-1].text
    await system.worker("decode", speaks(b"hi"), name="decode-1", draining=True)
    assert sorted(levels(await check(system), "workers")) == ["good", "warning"]


async def test_a_key_that_is_wanted_is_said(model: ServedModel) -> None:
    async with system_of(model, ProxyConfig(api_key=("secret",))) as system:
        assert "wants a key" in (await check(system))[-1].text
        assert "wants a key" not in "".join(finding.text for finding in await check(system, "secret"))


def test_where_nothing_answers_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--server", "http://127.0.0.1:9"]) == 1
    assert "nothing answers at http://127.0.0.1:9" in capsys.readouterr().out


def test_advice_stands_below_its_finding_and_warnings_are_no_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.show([Finding("note", "a", "b", "do c"), Finding("warning", "d", "e")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("b") and lines[1].strip() == "→ do c"
    assert lines[-1] == "0 will not work, 1 will work badly"
