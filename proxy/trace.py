"""W3C Trace Context: the header ``traceparent``, which names a trace and the span that one is part of."""

import re

_HEADER = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def trace_id_of(traceparent: str) -> str:
    """Empty for what is no such header."""
    match = _HEADER.fullmatch(traceparent)
    return match[1] if match else ""
