from pathlib import Path

import pytest

from common.secret import Secret
from control_plane import cli


def test_writes_a_new_secret_and_never_over_an_old_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "secret")
    assert cli.run(["keygen", path]) == 0
    secret = Secret.load(path)
    assert cli.run(["keygen", path]) == 2
    assert "exists" in capsys.readouterr().err
    assert Secret.load(path) == secret


@pytest.mark.parametrize("argv", [[], ["a", "b"], ["--out"]])
def test_anything_but_a_file_is_answered_with_the_usage(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["keygen", *argv]) == 2
    assert "usage: baton keygen FILE" in capsys.readouterr().err
