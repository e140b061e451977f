"""Addresses as options name them."""


def reachable(host: str) -> str:
    """``host`` as part of a URL that this machine can connect to."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
