"""What the reference implementation says: prompts, their tokens, and the tokens it generates.

A different token is accepted only where the reference itself was undecided: where its two best logits lay
less than ``NEAR_TIE`` apart. From there on the texts differ, so the comparison ends.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEAR_TIE = 1e-3
DIRECTORY = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Golden:
    name: str
    text: str | None  # a prompt for completion, or
    messages: list[dict[str, Any]] | None  # a chat
    prompt_ids: list[int]
    token_ids: list[int]  # 64, chosen greedily in float32, going on after the end of the reply
    output: str  # their text, special tokens included
    margins: list[float]  # gap between the two best logits before each token

    def difference(self, token_ids: list[int]) -> str | None:
        """None when ``token_ids`` are these, as far as they go."""
        for index, (found, expected) in enumerate(zip(token_ids, self.token_ids, strict=False)):
            if found != expected:
                margin = self.margins[index]
                near = margin < NEAR_TIE
                return (
                    None
                    if near
                    else f"{self.name}: token {index} is {found}, not {expected} (margin {margin})"
                )
        return None


def load() -> dict[str, Golden]:
    """The prompts by name."""
    content = json.loads((DIRECTORY / "smollm2-135m-instruct.json").read_text(encoding="utf-8"))
    return {entry["name"]: Golden(**entry) for entry in content["prompts"]}


def family_logits() -> dict[str, dict[int, list[float]]]:
    """Logits by tiny model and position, see tests/common/tiny_models.py."""
    content = json.loads((DIRECTORY / "families.json").read_text())
    rows = content["logits"].items()
    return {name: dict(zip(content["positions"], logits, strict=True)) for name, logits in rows}
