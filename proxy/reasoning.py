"""What a model thinks before it answers: text between ``<think>`` and ``</think>``, told apart as it comes.

waiting   nothing but space has come yet
inside    thoughts, until the closing tag
after     the answer, to the end; tags are text here
"""

from typing import Literal, NamedTuple

from proxy.stop_strings import overlap

OPEN, CLOSE = "<think>", "</think>"


class Split(NamedTuple):
    thoughts: str
    answer: str


class Reasoning:
    def __init__(self, starts_inside: bool) -> None:
        """``starts_inside``: the prompt ends with the opening tag."""
        self._state: Literal["waiting", "inside", "after"] = "inside" if starts_inside else "waiting"
        self._held = ""
        self._trims = starts_inside  # space at the beginning of thoughts or answer is not part of them

    def push(self, text: str) -> Split:
        held, self._held = self._held + text, ""
        thoughts = ""
        if self._state == "waiting":
            begun = held.lstrip()
            if OPEN.startswith(begun):  # or nothing at all
                self._held = held
                return Split("", "")
            is_thinking = begun.startswith(OPEN)
            self._state = "inside" if is_thinking else "after"
            self._trims = is_thinking
            held = begun.removeprefix(OPEN) if is_thinking else held
        if self._state == "inside":
            thoughts, tag, rest = held.partition(CLOSE)
            if not tag:
                keep = overlap(thoughts, CLOSE)
                self._held = thoughts[len(thoughts) - keep :]
                return Split(self._trim(thoughts[: len(thoughts) - keep]), "")
            thoughts = self._trim(thoughts)
            self._state, self._trims, held = "after", True, rest
        return Split(thoughts, self._trim(held))

    def finish(self) -> Split:
        """What was held back, at the end of the output."""
        held, self._held = self._held, ""
        return Split(held, "") if self._state == "inside" else Split("", held)

    def _trim(self, text: str) -> str:
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        return text
