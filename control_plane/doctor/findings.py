"""What a check has to say."""

from typing import Literal, NamedTuple

Level = Literal["good", "note", "warning", "failure"]


class Finding(NamedTuple):
    level: Level  # failure: it will not work; warning: it will work badly; note: good to know
    subject: str
    text: str
    advice: str = ""  # what to do
