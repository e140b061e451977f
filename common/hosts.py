"""Addresses as options name them."""

from ipaddress import ip_address


def reachable(host: str) -> str:
    """``host`` as part of a URL that this machine can connect to."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
