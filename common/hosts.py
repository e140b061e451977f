"""Addresses as options name them."""

from ipaddress import ip_address

# Hosts to listen on, at every address of the machine, and where this machine itself finds who does.
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def reachable(host: str) -> str:
    """``host`` as part of a URL that this machine can connect to."""
    host = ANYWHERE.get(host, host)
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
