"""Keeps a set of processes running, and stops them in order.

1  start      every command becomes a child, where possible forked from a nursery
2  watch      a child that has served and ends is started again at once, one that has not after a pause that
              grows; one that refuses its options (exit code 2) or ends without having served five times in a
              row ends the whole set, with the reason
3  stop       on SIGINT or SIGTERM, stage by stage: SIGTERM, time to drain, SIGKILL; a second signal kills
"""

import asyncio
import math
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from control_plane.child import Child, Command, describe_exit
from control_plane.forking import Nursery, adopt_orphans, reap
from control_plane.notices import Notices
from control_plane.terminal import Terminal

EXIT_REFUSED = 2  # of a child: it cannot work as it was asked to, and would not the next time either


class Limits(NamedTuple):
    start_timeout_s: float = 300.0
    stop_timeout_s: float = 35.0  # per stage
    quick_s: float = 30.0  # a child that ends sooner than this was not working,
    steady_s: float = 5.0  # unless it had said this long before that it serves
    max_quick_ends: int = 5  # in a row
    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0
    nursery_pause_s: float = 1.0


class Outcome(NamedTuple):
    exit_code: int
    reason: str  # empty when asked to stop


@dataclass(slots=True, eq=False)
class Supervisor:
    commands: Sequence[Command]
    wait_ready: Callable[[], Awaitable[str]]  # returns the text to show then
    terminal: Terminal
    limits: Limits = field(default_factory=Limits)
    nurseries: Sequence[Nursery] = ()
    notices: Notices | None = None
    children: dict[str, Child] = field(default_factory=dict)
    _ready_at: dict[int, float] = field(default_factory=dict)  # time.monotonic() of their notice, by pid
    _ended_groups: set[int] = field(default_factory=set)  # of processes whose orphans may be left to reap
    _outcome: Outcome | None = None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> Outcome:
        """Until a signal or a failure; no child is left then."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        if self.nurseries:
            adopt_orphans()
            loop.add_signal_handler(signal.SIGCHLD, self._reap)
        if self.notices is not None:
            loop.add_reader(self.notices.socket, self._note_ready, self.notices)
        try:
            async with asyncio.TaskGroup() as group:
                for nursery in self.nurseries:
                    group.create_task(self._keep_nursery(nursery, await nursery.start()))
                keepers = [(command, group.create_task(self._keep(command))) for command in self.commands]
                announcement = group.create_task(self._announce())
                await self._stopping.wait()
                announcement.cancel()
                for nursery in self.nurseries:
                    nursery.close()
                await self._stop_stages(keepers)
        finally:
            for number in (*signals, signal.SIGCHLD):
                loop.remove_signal_handler(number)
            if self.notices is not None:
                loop.remove_reader(self.notices.socket)
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
            child = await self._start(command)
            self.children[command.name] = child
            if self._stopping.is_set():
                child.terminate()
            else:
                self.terminal.started(child)
            code = await self._wait(child)
            del self.children[command.name]
            if self._stopping.is_set():
                return
            quick_ends = 0 if self._has_served(child) else quick_ends + 1
            await self._after_end(child, code, quick_ends)

    async def _start(self, command: Command) -> Child:
        """Forked, or executed if its nursery does not do it. One that does not answer is ended."""
        for nursery in self.nurseries:
            if command.name in nursery.clients:
                try:
                    return await nursery.fork(command)
                except TimeoutError:
                    nursery.close()
                except OSError:
                    pass
        return await Child.start(command)

    async def _keep_nursery(self, nursery: Nursery, child: Child) -> None:
        while (code := await self._wait(child)) != EXIT_REFUSED and not self._stopping.is_set():
            text = f"{nursery.name} ended with {describe_exit(code)}, which harms nobody; next start in"
            self.terminal.say(f"{text} {self.limits.nursery_pause_s:g} s")
            await _wait_at_most(self._stopping, self.limits.nursery_pause_s)
            if self._stopping.is_set():
                break
            child = await nursery.start()
            if self._stopping.is_set():
                nursery.close()

    async def _wait(self, child: Child) -> int:
        code = await child.wait(self.terminal.show)
        self._ended_groups.add(child.pid)
        self._reap()
        return code

    def _reap(self) -> None:
        self._ended_groups = {group for group in self._ended_groups if not reap(group)}

    def _note_ready(self, notices: Notices) -> None:
        self._ready_at |= dict.fromkeys(notices.ready_pids(), time.monotonic())

    def _has_served(self, child: Child) -> bool:
        ready_at = self._ready_at.pop(child.pid, math.inf)
        return child.age_s >= self.limits.quick_s or time.monotonic() - ready_at >= self.limits.steady_s

    async def _after_end(self, child: Child, code: int, quick_ends: int) -> None:
        """Give up, or pause before the next start."""
        name = child.command.name
        if code == EXIT_REFUSED:
            self._end(EXIT_REFUSED, f"{name}: {child.last_line.partition('error: ')[2] or child.last_line}")
        elif quick_ends == 0:
            self.terminal.say(f"{name} ended with {describe_exit(code)}; started again at once")
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
