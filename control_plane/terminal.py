"""What ``baton serve`` shows: its own lines on stdout, its children's on stderr, names in front."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from control_plane.child import Child

_COLOURS = (36, 35, 33, 32, 34, 31)


@dataclass(frozen=True, slots=True)
class Terminal:
    names: Sequence[str]
    out: TextIO
    err: TextIO

    @classmethod
    def standard(cls, names: Sequence[str]) -> "Terminal":
        return cls(names, sys.stdout, sys.stderr)

    def say(self, text: str) -> None:
        _print(text, self.out)

    def started(self, child: Child) -> None:
        cores = child.command.cores
        where = f"core{'s' if len(cores) > 1 else ''} {','.join(map(str, cores))}" if cores else "any core"
        self.say(f"  {self._padded(child.command.name)}  pid {child.pid:<8} {where}")

    def show(self, name: str, line: str) -> None:
        prefix = f"{self._padded(name)} |"
        if self.err.isatty():
            colour = _COLOURS[self.names.index(name) % len(_COLOURS)]
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        _print(f"{prefix} {line}", self.err)

    def _padded(self, name: str) -> str:
        return name.ljust(max(map(len, self.names)))


def _print(text: str, stream: TextIO) -> None:
    with suppress(OSError):  # whoever read our output has gone; serving goes on
        print(text, file=stream, flush=True)
