"""Workers from a nursery: the real one, with a module that takes the place of a worker."""

import asyncio
import json
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from control_plane import forking
from control_plane.child import Command
from control_plane.forking import Nursery, Patience
from tests.control_plane.test_supervisor import PATIENCE_S, Lines, dies_with_supervisor, is_alive, supervisor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")

ROOT = Path(__file__).parents[2]
LONG = Patience(import_s=PATIENCE_S, fork_s=PATIENCE_S)
WORKER = """
    import json, os, sys, time
    import heavy

    if __name__ == "__main__":
        facts = dict(
            argv=sys.argv[1:],
            forked=heavy.imported_by != os.getpid(),
            parent=os.getppid(),
            leads=os.getsid(0) == os.getpid(),
            colour=os.environ["COLOUR"],
            shown=open("/proc/self/cmdline").read().split("\\0"),
        )
        print(json.dumps(facts), flush=True)
        if "--end" in sys.argv:
            sys.exit(2)
        time.sleep(600)
"""
HEAVY = "import os\nimported_by = os.getpid()\n"
THREADED = (
    HEAVY + "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
)


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """Where ``slow_worker`` is, and ``heavy``, which it imports."""
    package = tmp_path / "slow_worker"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(textwrap.dedent(WORKER))
    (tmp_path / "heavy.py").write_text(HEAVY)
    return tmp_path


def worker(modules: Path, name: str, *arguments: str) -> Command:
    path = os.pathsep.join(map(str, (modules, ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "COLOUR": "green"}
    return Command(name, (sys.executable, "-P", "-m", "slow_worker", *arguments), environment, forkable=True)


def facts(lines: Lines, name: str) -> list[dict[str, Any]]:
    """What the lives of a worker have said, one after the other."""
    told = (line.partition(" | ") for line in lines.getvalue().splitlines())
    return [json.loads(text) for who, _, text in told if who.strip() == name and text.startswith("{")]


@asynccontextmanager
async def supervised(*commands: Command) -> AsyncIterator[tuple[Nursery, Lines, dict[str, int]]]:
    """A supervisor with one nursery, when each worker has spoken; and the workers' pids."""
    [nursery] = forking.nurseries(commands)
    nursery.patience = LONG
    subject, lines = supervisor(*commands, nurseries=[nursery])
    running = asyncio.create_task(subject.run())
    await lines.until(lambda _: all(facts(lines, command.name) for command in commands))
    yield nursery, lines, {name: child.pid for name, child in subject.children.items()}
    subject.stop()
    assert (await running).exit_code == 0


def pid_of(nursery: Nursery) -> int:
    assert nursery.child is not None
    return nursery.child.pid


async def test_a_forked_worker_runs_as_if_executed_and_shares_what_was_imported(modules: Path) -> None:
    async with supervised(worker(modules, "one", "--level", "3")) as (_, lines, _):
        [told] = facts(lines, "one")
    assert told.pop("shown")[1:3] == ["-m", "slow_worker"]
    assert told == {
        "argv": ["--level", "3"],
        "forked": True,
        "parent": os.getpid(),
        "leads": True,
        "colour": "green",
    }


async def test_a_killed_nursery_takes_nobody_along_and_has_a_successor(modules: Path) -> None:
    commands = [worker(modules, name) for name in ("one", "two")]
    async with supervised(*commands) as (nursery, lines, pids):
        first = pid_of(nursery)
        os.kill(first, signal.SIGKILL)
        await lines.until(lambda text: "nursery ended with SIGKILL" in text)
        assert all(is_alive(pid) for pid in pids.values())
        os.kill(pids["one"], signal.SIGKILL)
        await lines.until(lambda _: len(facts(lines, "one")) == 2)
        async with asyncio.timeout(PATIENCE_S):
            while pid_of(nursery) == first:
                await asyncio.sleep(0.01)
        os.kill(pids["two"], signal.SIGKILL)
        await lines.until(lambda _: len(facts(lines, "two")) == 2)
        assert facts(lines, "two")[1]["forked"]


async def test_a_nursery_that_does_not_answer_is_replaced_and_nobody_waits_for_it(modules: Path) -> None:
    async with supervised(worker(modules, "one")) as (nursery, lines, pids):
        nursery.patience = Patience(import_s=0.0, fork_s=0.1)
        os.kill(pid_of(nursery), signal.SIGSTOP)
        os.kill(pids["one"], signal.SIGKILL)
        await lines.until(lambda _: len(facts(lines, "one")) == 2)
        assert not facts(lines, "one")[1]["forked"]
        await lines.until(lambda text: "nursery ended with SIGKILL" in text)


async def test_where_threads_run_after_importing_workers_are_executed(modules: Path) -> None:
    (modules / "heavy.py").write_text(THREADED)
    async with supervised(worker(modules, "one")) as (_, lines, _):
        await lines.until(lambda text: "no place to fork" in text)
        assert not facts(lines, "one")[0]["forked"]
    assert "next start" not in lines.getvalue()


async def test_the_exit_code_of_a_forked_worker_is_known(modules: Path) -> None:
    commands = [worker(modules, "one", "--end")]
    subject, lines = supervisor(*commands, nurseries=forking.nurseries(commands))
    assert (await subject.run()).exit_code == 2
    assert facts(lines, "one")


async def test_a_worker_that_nobody_waited_for_does_not_run_later(modules: Path) -> None:
    command = worker(modules, "one")
    [nursery] = forking.nurseries([command])
    forking.adopt_orphans()
    child = await nursery.start()
    showing = asyncio.create_task(child.wait(lambda _, line: print(line)))
    await start_and_end(nursery, command)
    os.kill(child.pid, signal.SIGSTOP)
    nursery.patience = Patience(import_s=0.0, fork_s=0.05)
    with pytest.raises(TimeoutError):
        await nursery.fork(command)
    os.kill(child.pid, signal.SIGCONT)
    nursery.patience = LONG
    await start_and_end(nursery, command)  # asked for later, so the other one has been forked
    async with asyncio.timeout(PATIENCE_S):
        while not forking.reap(child.pid) and others(child.pid):
            await asyncio.sleep(0.01)
    nursery.close()
    await showing
    assert forking.reap(child.pid)


async def start_and_end(nursery: Nursery, command: Command) -> None:
    child = await nursery.fork(command)
    child.kill()
    assert await child.wait(lambda *_: None) == -signal.SIGKILL


def others(group: int) -> list[int]:
    """Processes of the group besides its leader."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
        except FileNotFoundError:
            continue
        if int(its_group) == group and state != "Z" and path.parent.name != str(group):
            found.append(int(path.parent.name))
    return found


async def test_forked_workers_do_not_outlive_a_killed_supervisor(modules: Path) -> None:
    program = f"""
        import asyncio
        from control_plane import forking
        from control_plane.child import Command

        async def main():
            command = Command(*{tuple(worker(modules, "one"))!r})
            [nursery] = forking.nurseries([command])
            forking.adopt_orphans()
            await nursery.start()
            child = await nursery.fork(command)
            print(child.pid, flush=True)
            await child.wait(lambda name, line: print("up", flush=True))

        asyncio.run(main())
    """
    await dies_with_supervisor(program)


def test_workers_with_other_environments_get_other_nurseries(modules: Path) -> None:
    commands = [worker(modules, name) for name in ("one", "two", "three")]
    commands[2] = commands[2]._replace(environment={**commands[2].environment, "OMP_NUM_THREADS": "7"})
    first, second = forking.nurseries([*commands, commands[0]._replace(name="proxy", forkable=False)])
    assert (set(first.clients), set(second.clients)) == ({"one", "two"}, {"three"})
    assert second.environment["OMP_NUM_THREADS"] == "7"
    assert first.modules == second.modules == ("slow_worker",)
