"""``baton serve`` as a user meets it: real processes, the real model."""

import os
import re
import select
import signal
import subprocess
from pathlib import Path

import pytest

from tests.system.server import STOP_TIMEOUT_S, Server, baton, clean_environment, serving

PROMPT = "The capital of France is"

pytestmark = pytest.mark.timeout(600)


def gone(pid: int) -> bool:
    """Ended; whoever has to take note of it may not have done so yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        baton(*words),
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=STOP_TIMEOUT_S,
        check=False,
    )


def test_what_it_says_at_the_start_is_true(system: Server) -> None:
    assert set(system.pids()) == {"proxy", "prefill-0", "decode-0"}
    for name, pid in system.pids().items():
        module = "proxy" if name == "proxy" else f"{name.split('-')[0]}_worker"
        assert module in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    assert re.search(r"decode-0 +\d+ MiB  KV blocks at \S+://\S+", system.output)
    command = next(line for line in system.lines if line.strip().startswith("curl "))
    assert f"{system.url}/v1/completions" in command


def test_workers_run_on_cores_of_their_own(system: Server) -> None:
    prefill, decode = (os.sched_getaffinity(system.pids()[name]) for name in ("prefill-0", "decode-0"))
    if len(os.sched_getaffinity(0)) > 1:
        assert not prefill & decode
    assert prefill | decode == os.sched_getaffinity(0)


def test_the_command_line_client_streams_an_answer(system: Server) -> None:
    done = run("complete", PROMPT, "--url", system.url, "--max-tokens", "8", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == system.complete(PROMPT, max_tokens=8) + "\n"
    assert "Paris" in done.stdout


def test_a_second_server_beside_the_first_serves_too(system: Server) -> None:
    with serving("--colocated") as other:
        assert set(other.pids()) == {"proxy", "decode-0"}
        assert other.complete(PROMPT) == system.complete(PROMPT)


def test_a_killed_worker_comes_back_and_one_interrupt_ends_everything() -> None:
    with serving() as server:
        before = server.complete(PROMPT)
        for name in ("decode-0", "prefill-0"):
            os.kill(server.pids()[name], signal.SIGKILL)
        server.wait_for(r"worker (prefill|decode)-0 \(.*\) is ready", count=4)
        assert server.complete(PROMPT) == before
        pids = server.pids().values()
        assert server.stop(signal.SIGINT) == 0
        assert all(gone(pid) for pid in pids)
        assert server.lines[-1] == "stopped"


def test_an_answer_under_way_is_finished_before_everything_stops() -> None:
    words = ("complete", PROMPT, "--max-tokens", "24", "--temperature", "0")
    with serving() as server:
        expected = run(*words, "--url", server.url).stdout
        with subprocess.Popen(
            baton(*words, "--url", server.url), stdout=subprocess.PIPE, text=True, env=clean_environment()
        ) as client:
            assert client.stdout is not None
            answer = client.stdout.read(1)
            assert server.stop(signal.SIGTERM) == 0
            answer += client.stdout.read()
        assert (answer, client.returncode) == (expected, 0)


def test_nothing_outlives_a_killed_server() -> None:
    with serving("--colocated") as server:
        ends = [os.pidfd_open(pid) for pid in server.pids().values()]
        server.stop(signal.SIGKILL)
        for end in ends:  # readable when the process has ended
            assert select.select([end], [], [], STOP_TIMEOUT_S)[0]
            os.close(end)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (["/no/such/model"], "/no/such/model"),
        (["--port", "PORT"], "is taken by another process"),
        (["--decode", "5000"], "needs at least"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    system: Server, options: list[str], message: str
) -> None:
    port = system.url.rpartition(":")[2]
    done = run("serve", *(port if word == "PORT" else word for word in options))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("baton serve: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
