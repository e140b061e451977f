"""Who asks, and for what besides the body: told by the API key and by headers."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from proxy.errors import ApiError, invalid
from proxy.fleet import Targets

SESSION = "X-Session-ID"  # requests that share it are better served by the same workers
TTFT_TARGET = "X-Baton-SLO-TTFT"  # seconds, instead of --slo-ttft-s
ITL_TARGET = "X-Baton-SLO-ITL"  # seconds, instead of --slo-itl-s
MAX_SESSION = 256  # characters
NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)


class Caller(NamedTuple):
    key: str = ""  # which API key, not the key itself; empty: none was needed
    session: str = ""
    targets: Targets = Targets()


def caller_of(headers: Mapping[str, str], key: str, targets: Targets) -> Caller:
    """``headers`` have names in small letters; ``targets`` are those of requests that name none. Raises
    ApiError that names the header."""
    session = headers.get(SESSION.lower(), "")
    if len(session) > MAX_SESSION:
        raise invalid(SESSION, f"{SESSION} is longer than {MAX_SESSION} characters")
    ttft_s = _seconds(headers, TTFT_TARGET, targets.ttft_s)
    return Caller(key, session, Targets(ttft_s, _seconds(headers, ITL_TARGET, targets.itl_s)))


def _seconds(headers: Mapping[str, str], name: str, default: float) -> float:
    text = headers.get(name.lower())
    if text is None:
        return default
    seconds = float(text) if NUMBER.fullmatch(text) else math.inf
    if seconds == math.inf:
        raise ApiError(400, f"{name} must be a number of seconds, not {text[:50]!r}", param=name)
    return seconds
