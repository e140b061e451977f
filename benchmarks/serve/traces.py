"""Recorded requests: when they came, how long they were, what they shared. None of these files holds text.

- Azure (AzurePublicDataset, LLM inference traces 2023 and 2024): CSV with ``TIMESTAMP``, ``ContextTokens``,
  ``GeneratedTokens``.
- Mooncake: a JSON object per line with ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``:
  equal ids are equal blocks of 512 prompt tokens.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

MOONCAKE_BLOCK_TOKENS = 512
_MICROSECOND_DIGITS = 6


class TraceError(ValueError):
    """A file that is not a trace; the text names the file and the line."""


@dataclass(frozen=True, slots=True)
class Recorded:
    at_s: float  # from the first request of the trace
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0  # prompt tokens of a block


def read(path: Path) -> list[Recorded]:
    """In order of arrival."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = _azure if path.suffix.lower() == ".csv" else _mooncake
            found = sorted(reader(path, file), key=lambda recorded: recorded.at_s)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error
    if not found:
        raise TraceError(f"{path}: no requests in it")
    first = found[0].at_s
    return [
        Recorded(
            one.at_s - first, one.num_prompt_tokens, one.num_output_tokens, one.block_ids, one.block_tokens
        )
        for one in found
    ]


def _azure(path: Path, lines: Iterator[str]) -> Iterator[Recorded]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            whole, _, fraction = row["TIMESTAMP"].removesuffix("+00:00").partition(".")
            at = datetime.fromisoformat(f"{whole}.{fraction[:_MICROSECOND_DIGITS]:0<6}+00:00")
            yield _recorded(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}, line {number}: not a line of an Azure trace ({error!r})") from error


def _mooncake(path: Path, lines: Iterator[str]) -> Iterator[Recorded]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry: dict[str, Any] = json.loads(line)
            lengths = int(entry["input_length"]), int(entry["output_length"])
            ids = tuple(int(block_id) for block_id in entry.get("hash_ids", ()))
            yield _recorded(float(entry["timestamp"]) / 1e3, *lengths, ids)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"{path}, line {number}: not a line of a Mooncake trace ({error!r})") from error


def _recorded(at_s: float, num_prompt: int, num_output: int, block_ids: tuple[int, ...] = ()) -> Recorded:
    if num_prompt < 1 or num_output < 0:
        raise ValueError(f"lengths {num_prompt} and {num_output}")
    return Recorded(at_s, num_prompt, num_output, block_ids, MOONCAKE_BLOCK_TOKENS if block_ids else 0)
