"""Finding words in a text that is still growing."""

from typing import NamedTuple


class Scan(NamedTuple):
    text: str  # may be sent
    stopped: bool


class StopStrings:
    """Finds the first stop string in a growing text."""

    def __init__(self, stop: tuple[str, ...], include: bool) -> None:
        self._stop = stop
        self._include = include
        self._held = ""

    def push(self, text: str) -> Scan:
        held = self._held + text
        found = [(at, word) for word in self._stop if (at := held.find(word)) >= 0]
        if found:
            start, word = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            self._held = ""
            return Scan(held[: start + len(word) if self._include else start], True)
        keep = max(overlap(held, word) for word in self._stop)
        self._held = held[len(held) - keep :]
        return Scan(held[: len(held) - keep], False)

    def release(self) -> str:
        """What was held back: no stop string comes any more."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, word: str) -> int:
    """Length of the longest end of ``text`` that is a beginning, but not the whole, of ``word``."""
    longest = min(len(text), len(word) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(word[:size])), 0)
