"""Where the processes of ``baton serve`` say that they serve, see ``common/notice.py``."""

import socket
import struct
import sys
from collections.abc import Iterator

from common.notice import VARIABLE

_MAX_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")  # pid, user and group of who sent it, as the kernel knows them


class Notices:
    """On Linux; elsewhere nothing is ever heard."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.environment: dict[str, str] = {}  # for those who are to be heard
        if sys.platform == "linux":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self.socket.bind("")  # an abstract name that the system chooses
            name: bytes = self.socket.getsockname()
            self.environment = {VARIABLE: "@" + name[1:].decode()}

    def ready_pids(self) -> Iterator[int]:
        """Of processes that have said since the last call that they serve."""
        while True:
            try:
                text, ancillary, _, _ = self.socket.recvmsg(_MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return
            if b"READY=1" in text.split(b"\n"):
                yield from (_CREDENTIALS.unpack(data)[0] for _, _, data in ancillary)

    def close(self) -> None:
        self.socket.close()
