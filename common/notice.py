"""Tells whoever started this process that it serves, as sd_notify(3) has it: systemd, or ``baton serve``."""

import os
import socket
from contextlib import suppress

VARIABLE = "NOTIFY_SOCKET"


def tell_ready() -> None:
    """Once; without ``NOTIFY_SOCKET`` in the environment, or when nobody listens there, nothing happens."""
    address = os.environ.pop(VARIABLE, "")  # what this process starts speaks for itself
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.settimeout(1.0)
            line.sendto(b"READY=1", "\0" + address[1:] if address.startswith("@") else address)
