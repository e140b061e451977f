"""Keeps a set of processes running, and stops them in order.

1  start      every command becomes a child
2  watch      a child that ends is started again after a pause that grows; one that refuses its options
              (exit code 2) or ends quickly five times in a row ends the whole set, with the reason
3  stop       on SIGINT or SIGTERM, stage by stage: SIGTERM, time to drain, SIGKILL; a second signal kills
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from control_plane.child import Child, Command, describe_exit
from control_plane.terminal import Terminal

EXIT_REFUSED = 2  # of a child: it cannot work as it was asked to, and would not the next time either


class Limits(NamedTuple):
    start_timeout_s: float = 300.0
    stop_timeout_s: float = 35.0  # per stage
    quick_s: float = 30.0  # a child that ends sooner than this was not working
    max_quick_ends: int = 5  # in a row
    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0


class Outcome(NamedTuple):
    exit_code: int
    reason: str  # empty when asked to stop


@dataclass(slots=True, eq=False)
class Supervisor:
    commands: Sequence[Command]
    wait_ready: Callable[[], Awaitable[str]]  # returns the text to show then
    terminal: Terminal
    limits: Limits = field(default_factory=Limits)
    children: dict[str, Child] = field(default_factory=dict)
    _outcome: Outcome | None = None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> Outcome:
        """Until a signal or a failure; no child is left then."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            async with asyncio.TaskGroup() as group:
                keepers = [(command, group.create_task(self._keep(command))) for command in self.commands]
                announcement = group.create_task(self._announce())
                await self._stopping.wait()
                announcement.cancel()
                await self._stop_stages(keepers)
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
        assert self._outcome is not None
        return self._outcome

    def stop(self) -> None:
        """First call: finish what is under way, then end. Second call: end now."""
        if self._stopping.is_set():
            self.terminal.say("killing all processes")
            for child in self.children.values():
                child.kill()
        else:
            self.terminal.say("stopping: finishing requests under way (a second Ctrl-C ends them)")
            self._end(0, "")

    def _end(self, exit_code: int, reason: str) -> None:
        if self._outcome is None:
            self._outcome = Outcome(exit_code, reason)
        self._stopping.set()

    async def _announce(self) -> None:
        try:
            async with asyncio.timeout(self.limits.start_timeout_s):
                text = await self.wait_ready()
        except TimeoutError:
            self._end(1, f"not ready within {self.limits.start_timeout_s:g} s (--start-timeout-s)")
        else:
            self.terminal.say(text)

    async def _keep(self, command: Command) -> None:
        """The lives of one command's children, one after the other."""
        quick_ends = 0
        while not self._stopping.is_set():
            child = await Child.start(command)
            self.children[command.name] = child
            if self._stopping.is_set():
                child.terminate()
            else:
                self.terminal.started(child)
            code = await child.wait(self.terminal.show)
            del self.children[command.name]
            if self._stopping.is_set():
                return
            quick_ends = quick_ends + 1 if child.age_s < self.limits.quick_s else 1
            await self._after_end(child, code, quick_ends)

    async def _after_end(self, child: Child, code: int, quick_ends: int) -> None:
        """Give up, or pause before the next start."""
        name = child.command.name
        if code == EXIT_REFUSED:
            self._end(EXIT_REFUSED, f"{name}: {child.last_line.partition('error: ')[2] or child.last_line}")
        elif quick_ends >= self.limits.max_quick_ends:
            text = f"{name} ended {quick_ends} times in a row, the last time with {describe_exit(code)}"
            self._end(1, f"{text}: {child.last_line}" if child.last_line else text)
        else:
            pause_s = min(self.limits.first_pause_s * 2 ** (quick_ends - 1), self.limits.longest_pause_s)
            self.terminal.say(f"{name} ended with {describe_exit(code)}; next start in {pause_s:g} s")
            await _wait_at_most(self._stopping, pause_s)

    async def _stop_stages(self, keepers: list[tuple[Command, "asyncio.Task[None]"]]) -> None:
        for stage in sorted({command.stage for command, _ in keepers}):
            tasks = {command.name: task for command, task in keepers if command.stage == stage}
            for name in tasks:
                if name in self.children:
                    self.children[name].terminate()
            await asyncio.wait(tasks.values(), timeout=self.limits.stop_timeout_s)
            for name in tasks:
                if name in self.children:
                    self.terminal.say(f"{name} did not end within {self.limits.stop_timeout_s:g} s: killed")
                    self.children[name].kill()
            await asyncio.wait(tasks.values())


async def _wait_at_most(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
