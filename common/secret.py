"""The secret that all processes of a deployment share, and what ZeroMQ makes of it.

It is one CURVE key pair (RFC 26, CurveZMQ), which every socket uses, listening or connecting. A listener
cannot be talked to without its public key, which is in the file as well and never sent, so whoever lacks the
file gets past neither side's handshake; what is said after it is encrypted and cannot be altered.
"""

import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from common.config import ConfigError, NetworkConfig
from common.hosts import is_loopback

logger = logging.getLogger(__name__)

FORM = "baton-secret-1"
KEY_CHARACTERS = 40  # a key in Z85 (RFC 32)


class Secret(NamedTuple):
    public: bytes
    private: bytes

    def __repr__(self) -> str:
        return "Secret(...)"

    @classmethod
    def new(cls) -> "Secret":
        return cls(*zmq.curve_keypair())

    @classmethod
    def load(cls, path: str) -> "Secret":
        """Raises ``ConfigError``."""
        try:
            words = Path(path).read_text(encoding="ascii").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--secret-file: {error}") from error
        if len(words) != 3 or words[0] != FORM or any(len(word) != KEY_CHARACTERS for word in words[1:]):
            raise ConfigError(f"--secret-file: {path} is not what baton keygen writes")
        public, private = (word.encode() for word in words[1:])
        try:
            matches = zmq.curve_public(private) == public
        except (ValueError, zmq.ZMQError):
            matches = False
        if not matches:
            raise ConfigError(f"--secret-file: {path} is damaged: its keys do not belong together")
        return cls(public, private)

    def save(self, path: str) -> None:
        """Into a new file that only its owner may read. Raises ``OSError``."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{FORM}\n{self.public.decode()}\n{self.private.decode()}\n")

    def protect(self, socket: "zmq.Socket[Any]") -> None:
        """To be called before the socket binds or connects."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.private
        if socket.type == zmq.ROUTER:
            socket.curve_server = True
        else:
            socket.curve_serverkey = self.public


def secret_of(config: NetworkConfig, host: str) -> Secret | None:
    """The secret of a process that listens at ``host``. Raises ``ConfigError``."""
    if config.secret_file:
        return Secret.load(config.secret_file)
    if not is_loopback(host):
        logger.warning("%s is open to everybody on its network: there is no --secret-file", host or "*")
    return None
