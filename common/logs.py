"""Log lines of every process: time, level, the part that speaks, text; on stderr."""

import logging
import os
import sys

from common.config import ConfigError

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
_LEVELS = ("debug", "info", "warning", "error")


def setup(level: str = "") -> None:
    """Start logging. ``level`` is debug, info, warning or error; by default ``BATON_LOG_LEVEL`` or info."""
    chosen = (level or os.environ.get("BATON_LOG_LEVEL") or "info").lower()
    if chosen not in _LEVELS:
        raise ConfigError(f"BATON_LOG_LEVEL: expected one of {', '.join(_LEVELS)}, not {chosen!r}")
    logging.basicConfig(
        level=chosen.upper(), format=_FORMAT, datefmt="%H:%M:%S", stream=sys.stderr, force=True
    )
    # Not in the format, so not worth finding out for every line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # Libraries' own chatter is for debugging them.
    for library in ("httpx", "httpcore", "urllib3", "asyncio", "uvicorn"):
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.getLogger().level))
