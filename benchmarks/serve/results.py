"""What was measured, in memory and as a JSON file."""

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.serve.arrivals import Load, OpenLoop, TraceLoop
from benchmarks.serve.client import Outcome
from benchmarks.serve.figures import Figures, Targets, gaps_s

FORMAT = "baton bench serve 1"


class ResultsError(ValueError):
    """Not a file that this program wrote; the text names it."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run of several."""

    label: str
    amount: float  # what the runs differ by: requests a second, or clients at a time
    figures: Figures
    requests: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, load: Load, figures: Figures, outcomes: Sequence[Outcome]) -> "Point":
        amount = load.rate if isinstance(load, OpenLoop | TraceLoop) else float(load.concurrency)
        return cls(load.label, amount, figures, [_times(outcome) for outcome in outcomes])


@dataclass(frozen=True, slots=True)
class Results:
    """One system under several loads of one kind."""

    label: str
    unit: str  # of Point.amount
    targets: Targets
    points: list[Point]
    about: dict[str, Any] = field(default_factory=dict)  # how it was measured

    def write(self, path: Path) -> None:
        whole = {"format": FORMAT, **asdict(self)}
        whole["targets"] = {name: at for name, at in asdict(self.targets).items() if at < math.inf}
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Results":
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise ResultsError(f"{path}: format {found['format']!r}, not {FORMAT!r}")
            points = [Point(**point | {"figures": Figures(**point["figures"])}) for point in found["points"]]
            targets = Targets(**found["targets"])
            return cls(found["label"], found["unit"], targets, points, found["about"])
        except OSError as error:
            raise ResultsError(f"{path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{path}: not what `baton bench serve --json` writes ({error!r})") from error


def surroundings() -> dict[str, Any]:
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
    }


def _times(outcome: Outcome) -> dict[str, Any]:
    """Seconds from when the request was due."""
    times = outcome.token_times
    return {
        "sent_s": round(outcome.sent_at - outcome.due_at, 6),
        "first_s": round(times[0] - outcome.due_at, 6) if times else None,
        "gaps_s": [round(gap, 6) for gap in gaps_s(outcome)],
        "ended_s": round(outcome.ended_at - outcome.due_at, 6),
        "prompt_tokens": outcome.num_prompt_tokens,
        "output_tokens": outcome.num_output_tokens,
        "error": outcome.error,
    }
