"""The supervisor, with small Python programs as children."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from control_plane.child import Command
from control_plane.forking import Nursery
from control_plane.notices import Notices
from control_plane.supervisor import Limits, Supervisor
from control_plane.terminal import Terminal

PATIENCE_S = 30.0
QUICK = Limits(
    start_timeout_s=PATIENCE_S, stop_timeout_s=PATIENCE_S, first_pause_s=0.01, longest_pause_s=0.02
)
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEPER


def command(name: str, program: str, *arguments: str, stage: int = 0) -> Command:
    return Command(name, (sys.executable, "-c", program, *arguments), dict(os.environ), stage=stage)


class Lines(io.StringIO):
    """Output that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)

    async def until(self, wanted: Callable[[str], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not wanted(self.getvalue()):
                self.written.clear()
                await self.written.wait()


async def at_once() -> str:
    return "ready"


async def never() -> str:
    await asyncio.Event().wait()
    raise AssertionError


def supervisor(
    *commands: Command,
    limits: Limits = QUICK,
    ready: Callable[[], Awaitable[str]] = at_once,
    nurseries: Sequence[Nursery] = (),
    notices: Notices | None = None,
) -> tuple[Supervisor, Lines]:
    lines = Lines()
    names = [command.name for command in commands] + [nursery.name for nursery in nurseries]
    terminal = Terminal(names, lines, lines)
    return Supervisor(commands, ready, terminal, limits, nurseries, notices), lines


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_starts_everything_and_stops_it_when_told() -> None:
    subject, lines = supervisor(command("one", SLEEPER), command("two", SLEEPER))
    running = asyncio.create_task(subject.run())
    await lines.until(lambda text: "one | up" in text and "two | up" in text and "ready" in text)
    pids = [child.pid for child in subject.children.values()]
    subject.stop()
    outcome = await running
    assert outcome == (0, "")
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)


async def test_one_interrupt_stops_in_order_of_stages(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = """
        import signal, sys, time
        def end(*_):
            open(sys.argv[2], "a").write(sys.argv[1] + "\\n")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        print("up", flush=True)
        time.sleep(600)
    """
    program = textwrap.dedent(program)
    subject, lines = supervisor(
        command("later", program, "later", str(log), stage=1), command("first", program, "first", str(log))
    )
    running = asyncio.create_task(subject.run())
    await lines.until(lambda text: text.count("| up") == 2)
    os.kill(os.getpid(), signal.SIGINT)
    assert (await running).exit_code == 0
    assert log.read_text().split() == ["first", "later"]


async def test_a_crashed_child_is_started_again(tmp_path: Path) -> None:
    program = """
        import os, sys, time
        count = len(os.listdir(sys.argv[1]))
        open(f"{sys.argv[1]}/{count}", "w")
        if count < 2:
            sys.exit(7)
        print("working", flush=True)
        time.sleep(600)
    """
    subject, lines = supervisor(command("worker", textwrap.dedent(program), str(tmp_path)))
    running = asyncio.create_task(subject.run())
    await lines.until(lambda text: "worker | working" in text)
    subject.stop()
    assert (await running).exit_code == 0
    assert lines.getvalue().count("worker ended with exit code 7; next start in") == 2


async def test_gives_up_on_a_child_that_keeps_crashing_and_ends_the_others() -> None:
    subject, lines = supervisor(
        command("bad", "import os; print('the reason', flush=True); os.kill(os.getpid(), 9)"),
        command("good", SLEEPER),
        ready=never,
    )
    outcome = await subject.run()
    assert outcome.exit_code == 1
    assert outcome.reason == "bad ended 5 times in a row, the last time with SIGKILL: the reason"
    assert lines.getvalue().count("next start") == 4
    assert subject.children == {}


async def test_a_crash_after_long_service_does_not_count_towards_giving_up(tmp_path: Path) -> None:
    """With every life counted as long, more than the permitted number of crashes is survived."""
    program = """
        import os, sys, time
        count = len(os.listdir(sys.argv[1]))
        open(f"{sys.argv[1]}/{count}", "w")
        if count < 7:
            sys.exit(1)
        print("working", flush=True)
        time.sleep(600)
    """
    subject, lines = supervisor(
        command("worker", textwrap.dedent(program), str(tmp_path)), limits=QUICK._replace(quick_s=0.0)
    )
    running = asyncio.create_task(subject.run())
    await lines.until(lambda text: "worker | working" in text)
    subject.stop()
    assert (await running).exit_code == 0


@pytest.mark.skipif(sys.platform != "linux", reason="notices are heard on Linux only")
async def test_a_child_that_has_said_that_it_serves_is_started_again_at_once_however_often() -> None:
    program = """
        from common.notice import tell_ready
        tell_ready()
        print("working", flush=True)
    """
    notices = Notices()
    one = command("worker", textwrap.dedent(program))
    one = one._replace(environment={**one.environment, **notices.environment})
    limits = QUICK._replace(steady_s=0.0, max_quick_ends=2)
    subject, lines = supervisor(one, limits=limits, ready=never, notices=notices)
    running = asyncio.create_task(subject.run())
    await lines.until(lambda text: text.count("worker ended with exit code 0; started again at once") > 2)
    subject.stop()
    assert (await running).exit_code == 0
    notices.close()


async def test_a_child_that_refuses_its_options_is_not_started_again() -> None:
    program = (
        "import sys; print('prefill_worker: error: --dtype: no such thing', file=sys.stderr); sys.exit(2)"
    )
    subject, lines = supervisor(command("bad", program), command("good", SLEEPER), ready=never)
    outcome = await subject.run()
    assert outcome == (2, "bad: --dtype: no such thing")
    assert "next start" not in lines.getvalue()


async def test_says_when_the_system_does_not_become_ready() -> None:
    limits = QUICK._replace(start_timeout_s=0.05)
    subject, _ = supervisor(command("one", SLEEPER), limits=limits, ready=never)
    outcome = await subject.run()
    assert outcome.exit_code == 1
    assert "not ready within 0.05 s" in outcome.reason


async def test_a_child_that_ignores_the_request_to_end_is_killed() -> None:
    subject, lines = supervisor(command("deaf", STUBBORN), limits=QUICK._replace(stop_timeout_s=0.1))
    running = asyncio.create_task(subject.run())
    await lines.until(lambda text: "deaf | up" in text)
    subject.stop()
    assert (await running).exit_code == 0
    assert "deaf did not end within 0.1 s: killed" in lines.getvalue()


async def test_a_second_interrupt_kills_at_once() -> None:
    subject, lines = supervisor(command("deaf", STUBBORN))
    running = asyncio.create_task(subject.run())
    await lines.until(lambda text: "deaf | up" in text)
    subject.stop()
    subject.stop()
    async with asyncio.timeout(PATIENCE_S / 2):  # well under the time it would have been given
        assert (await running).exit_code == 0


async def test_what_a_child_started_is_killed_with_it() -> None:
    program = """
        import subprocess, sys, time
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
        time.sleep(600)
    """
    subject, lines = supervisor(command("parent", textwrap.dedent(program)))
    running = asyncio.create_task(subject.run())
    await lines.until(lambda text: "parent | " in text)
    grandchild = int(lines.getvalue().split("parent | ")[1].split()[0])
    subject.stop()
    await running
    await gone(grandchild)


async def test_output_of_any_shape_is_passed_on() -> None:
    program = (
        "import sys, os; os.write(1, b'x' * 200_000 + b'\\n\\xff\\xfe\\nno newline at the end'); sys.exit(2)"
    )
    subject, lines = supervisor(command("loud", program), ready=never)
    outcome = await subject.run()
    assert outcome == (2, "loud: no newline at the end")
    assert lines.getvalue().count("x") >= 200_000


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promise is Linux's")
async def test_children_do_not_outlive_a_killed_supervisor() -> None:
    program = f"""
        import asyncio, os, sys
        from control_plane.child import Child, Command

        async def main():
            child = await Child.start(Command("one", (sys.executable, "-c", {STUBBORN!r}), dict(os.environ)))
            print(child.pid, flush=True)
            await child.wait(lambda name, line: print(line, flush=True))

        asyncio.run(main())
    """
    await dies_with_supervisor(program)


async def dies_with_supervisor(program: str) -> None:
    """``program`` starts a process, prints its pid and then, in its name, ``up``; it is killed here."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(program), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        pid = int(await process.stdout.readline())
        assert await process.stdout.readline() == b"up\n"
    process.kill()
    await process.wait()
    await gone(pid)


async def gone(pid: int) -> None:
    """Until the process has ended (or is a zombie that nobody waits for)."""
    async with asyncio.timeout(PATIENCE_S):
        while (
            is_alive(pid) and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        ):
            await asyncio.sleep(0.01)
