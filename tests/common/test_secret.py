import stat
from pathlib import Path

import pytest
import zmq

from common.config import ConfigError, NetworkConfig
from common.secret import Secret, secret_of


def test_a_secret_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = Secret.new()
    secret.save(str(path))
    assert Secret.load(str(path)) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    Secret.new().save(str(path))
    before = path.read_text()
    with pytest.raises(FileExistsError):
        Secret.new().save(str(path))
    assert path.read_text() == before


def test_keys_are_not_shown_in_logs() -> None:
    secret = Secret.new()
    assert secret.private.decode() not in f"{secret} {secret!r}"


@pytest.mark.parametrize("damage", ["", "hello", "baton-secret-1 a b", "swap", "another"])
def test_a_file_that_is_no_secret_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "secret"
    one, other = Secret.new(), Secret.new()
    public, private = one.public.decode(), one.private.decode()
    texts = {"swap": (private, public), "another": (other.public.decode(), private)}
    words = ("baton-secret-1", *texts[damage]) if damage in texts else (damage,)
    path.write_text("\n".join(words))
    with pytest.raises(ConfigError, match=r"--secret-file: .*secret"):
        Secret.load(str(path))
    with pytest.raises(ConfigError, match="--secret-file"):
        Secret.load(str(tmp_path / "missing"))


def test_an_open_address_without_a_secret_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    assert secret_of(NetworkConfig(), "127.0.0.1") is None
    assert caplog.text == ""
    assert secret_of(NetworkConfig(), "0.0.0.0") is None
    assert "0.0.0.0 is open to everybody" in caplog.text


def test_protected_sockets_encrypt() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as client:
        for socket in (server, client):
            Secret.new().protect(socket)
            assert socket.mechanism == zmq.CURVE
