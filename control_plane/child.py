"""One process of ours, from start to end, its output passed on line by line."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

_LAUNCH = Path(__file__).with_name("launch.py")
_PIPE_CHUNK_BYTES = 1 << 16
_OUTPUT_GRACE_S = 1.0


class Command(NamedTuple):
    """What to run. Stages are stopped one after the other, lowest first."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    cores: tuple[int, ...] = ()
    stage: int = 0
    forkable: bool = False  # it runs a module with -m, which shares what it imports with others


@dataclass(slots=True, eq=False)
class Child:
    command: Command
    pid: int
    output: FileIO  # the reading end of its pipe
    started: float  # time.monotonic()
    exit_code: Callable[[], Awaitable[int]]  # waits for its end; negative: the signal
    last_line: str = ""
    ended: bool = False

    @classmethod
    async def start(cls, command: Command, pass_fds: tuple[int, ...] = ()) -> "Child":
        # A pipe of our own: with asyncio's, the end of the process goes unnoticed while a grandchild has it.
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-IS", str(_LAUNCH), str(os.getpid())),
                *command.argv,
                env=command.environment,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                pass_fds=pass_fds,
                start_new_session=True,  # Ctrl-C in the terminal reaches only the supervisor
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return cls(command, process.pid, FileIO(reading), time.monotonic(), process.wait)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started

    async def wait(self, show: Callable[[str, str], None]) -> int:
        """The exit code (negative: the signal), once the process has ended and its output has been shown. If
        the wait is cancelled the process is killed."""
        passing_on = asyncio.create_task(self._pass_on(show))
        try:
            code = await self.exit_code()
            self.ended = True
            self.kill()  # what it started and left behind
            await asyncio.wait([passing_on], timeout=_OUTPUT_GRACE_S)
        finally:
            if not self.ended:  # later its number may be another's
                self.kill()
            passing_on.cancel()
        return code

    async def _pass_on(self, show: Callable[[str, str], None]) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self.output
        )
        try:
            rest = b""
            while chunk := await reader.read(_PIPE_CHUNK_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _PIPE_CHUNK_BYTES:  # an endless line must not fill our memory
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._show(line, show)
            if rest:
                self._show(rest, show)
        finally:
            transport.close()

    def _show(self, line: bytes, show: Callable[[str, str], None]) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.last_line = text.strip() or self.last_line
        show(self.command.name, text)

    def terminate(self) -> None:
        """Ask it to finish its work and end."""
        if not self.ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, and what it started; harmless when it is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """``exit code 1``, ``SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
